"""Searches the roles of the layers: a prior from the mass-loss table, then changes judged by the model itself.

The table adds up what single layers lose, which is not what a model loses: two changes that are harmless alone may
not be harmless together. So the table only proposes, and every step is measured anew on the pattern at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..plan import Scorer, Selection
from .case import Case, Figures, Trace, by_kind
from .pattern import EXACT, bound_of, join, lenders, num_full, split, uniform

Progress = Callable[[str], None]
Moves = Callable[[str], Iterator[str]]


@dataclass(frozen=True)
class Found:
    """One accepted pattern and its KL to dense decode on the calibration cases."""

    pattern: str
    kl: float  # mean over kinds of text, of their means over rows
    num_full: int
    worst: str  # the kind with the highest KL
    worst_kl: float


def prior(loss_AL: Tensor, num_full: int, follower: str, *, first: int = 0) -> str:
    """The pattern with `num_full` full layers and the least summed loss, by dynamic programming.

    Layers before `first` are dense, layer `first` is full. Raises ValueError where that many do not fit.
    """
    num_layers = len(loss_AL)
    if not 1 <= num_full <= num_layers - first:
        raise ValueError(f"num_full is {num_full}, but 1 to {num_layers - first} layers can be full")
    loss = loss_AL.nan_to_num(1.0).tolist()
    # best[m][b]: least loss of layers first..b-1 with m full ones, and where the last of them stands
    best: list[dict[int, tuple[float, int]]] = [{first: (0.0, -1)}]
    for _ in range(num_full):
        new: dict[int, tuple[float, int]] = {}
        for start, (spent, _) in best[-1].items():
            total = spent
            for end in range(start + 1, num_layers + 1):
                if end not in new or total < new[end][0]:
                    new[end] = (total, start)
                if end < num_layers:
                    total += loss[start][end]
        best.append(new)
    full, end = [], num_layers
    for level in range(num_full, 0, -1):
        end = best[level][end][1]
        full.append(end)
    return "D" * first + "".join("F" if layer in full else follower for layer in range(first, num_layers))


@dataclass
class Search:
    """Cases are evaluated in turn; a pass restarts at the first layer where a candidate differs.

    The objective is the mean over kinds, so that kinds with many cases do not outvote the others.
    """

    cases: Sequence[Case]
    selection: Selection
    scorer: Scorer = EXACT
    lead: str = "F"  # what a layer becomes that scores for others: F, or A where it attends to everything
    num_screened: int = 2  # cases that choose who is measured on all
    num_confirmed: int = 3
    report: Progress = lambda line: None
    history: list[Found] = field(default_factory=list)
    _turn: int = 0
    _traces: dict[str, list[Trace]] = field(default_factory=dict)

    def measure(self, pattern: str) -> Found:
        plan = bound_of(pattern, self.selection, self.scorer)
        return self._found(pattern, [case.figures(plan) for case in self.cases])

    def shrink(self, pattern: str, follower: str, full: int) -> Found:
        """Turn full layers into followers, the cheapest first, until `full` are left."""
        found = self._note(self.measure(pattern))
        while found.num_full > full:
            found = self._note(self._best_of(found.pattern, list(demotions(found.pattern, follower))))
        return found

    def polish(self, pattern: str, rounds: int, moves: Moves | None = None) -> Found:
        """Take the best move as long as it helps, at most `rounds` times; by default full layers move."""
        found = self._note(self.measure(pattern))
        for _ in range(rounds):
            candidates = list((moves or shifts)(found.pattern))
            better = self._best_of(found.pattern, candidates) if candidates else found
            if better.kl >= found.kl:
                break
            found = self._note(better)
        return found

    def sweep(
        self, pattern: str, letters: str, allowed: Callable[[str], bool] = lambda pattern: True
    ) -> Found:
        """Give every follower in turn the best of these letters and of its lenders, as far as `allowed`."""
        found = self._note(self.measure(pattern))
        for layer in range(len(split(pattern))):
            candidates = [other for other in lendings(found.pattern, layer, letters) if allowed(other)]
            better = self._best_of(found.pattern, candidates) if candidates else found
            found = self._note(better) if better.kl < found.kl else found
        return found

    def exchange(self, pattern: str, follower: str, rounds: int) -> Found:
        """One full layer more where that helps most, and one less where that harms least, as long as it helps."""
        found = self._note(self.measure(pattern))
        for _ in range(rounds):
            more = self._best_of(found.pattern, list(promotions(found.pattern, self.lead)))
            less = self._best_of(more.pattern, list(demotions(more.pattern, follower)))
            if less.kl >= found.kl:
                break
            found = self._note(less)
        return found

    def descend(self, pattern: str, letters: str, cost: Callable[[str], float], budget: float) -> Found:
        """The change that loses least per cost saved, again and again, until the cost is within the budget.

        Changes are those of `thrifts`; it ends before the budget where there is none left.
        """
        found = self._note(self.measure(pattern))
        while (now := cost(found.pattern)) > budget:
            saved = {other: now - cost(other) for other in thrifts(found.pattern, letters)}
            if not (cheaper := [other for other, much in saved.items() if much > 0]):
                break
            found = self._note(self._best_of(found.pattern, cheaper, base_kl=found.kl, saved=saved))
        return found

    def _best_of(
        self,
        pattern: str,
        candidates: Sequence[str],
        *,
        base_kl: float = 0.0,
        saved: Mapping[str, float] | None = None,
    ) -> Found:
        """The best of the candidates on all cases, of those that look best on a few.

        With `saved` the best is the one that adds the least KL to `base_kl` per cost that it saves.
        """
        base = _Base(self.cases, pattern, self.selection, self.scorer, self._traces.get(pattern))
        some = [
            (self._turn * self.num_screened + i) % len(self.cases)
            for i in range(min(self.num_screened, len(self.cases)))
        ]
        self._turn += 1

        def badness(candidate: str, kl: float, base_kl: float) -> float:
            return kl if saved is None else (kl - base_kl) / saved[candidate]

        screened = list(candidates)
        if len(screened) > self.num_confirmed:
            look = base.kl(some)
            looks = {c: sum(figures.kl for figures, _ in base.run(c, some)) / len(some) for c in screened}
            screened.sort(key=lambda c: badness(c, looks[c], look))
            screened = screened[: self.num_confirmed]
        best: Found | None = None
        for candidate in screened:
            parts = list(base.run(candidate, range(len(self.cases))))
            found = self._found(candidate, [figures for figures, _ in parts])
            if best is None or badness(candidate, found.kl, base_kl) < badness(
                best.pattern, best.kl, base_kl
            ):
                # the next step begins at this pattern or at the winner
                best = found
                self._traces = {pattern: base.traces, candidate: [trace for _, trace in parts]}
        if best is None:
            raise ValueError(f"pattern {pattern} has no candidate")
        return best

    def _found(self, pattern: str, parts: Sequence[Figures]) -> Found:
        kinds = by_kind(self.cases, parts)
        worst = max(kinds, key=lambda kind: kinds[kind].kl)
        mean = sum(figures.kl for figures in kinds.values()) / len(kinds)
        return Found(pattern, mean, num_full(pattern), worst, kinds[worst].kl)

    def _note(self, found: Found) -> Found:
        self.history.append(found)
        self.report(
            f"{found.num_full:2d} full  KL {found.kl:.4f}, {found.worst} {found.worst_kl:.4f}  {found.pattern}"
        )
        return found


class _Base:
    """A pattern whose passes were kept: others begin where they differ from it."""

    def __init__(
        self,
        cases: Sequence[Case],
        pattern: str,
        selection: Selection,
        scorer: Scorer,
        traces: list[Trace] | None,
    ) -> None:
        self._cases, self._words, self._selection, self._scorer = cases, split(pattern), selection, scorer
        self._plan = bound_of(pattern, selection, scorer)
        self.traces = traces or [case.log_probs(self._plan)[1] for case in cases]

    def kl(self, which: Sequence[int]) -> float:
        """Of the pattern itself, the mean over these cases."""
        last = self._plan.num_layers - 1
        parts = (self._cases[i].log_probs(self._plan, since=last, trace=self.traces[i])[0] for i in which)
        return sum(self._cases[i].compare(part).kl for i, part in zip(which, parts, strict=True)) / len(which)

    def run(self, candidate: str, which: Iterable[int]) -> Iterator[tuple[Figures, Trace]]:
        """Figures and trace of these cases."""
        plan, words = bound_of(candidate, self._selection, self._scorer), split(candidate)
        # a word says its anchor only where that is not the latest lender, so layers behind this one may differ too
        since = next(i for i, (a, b) in enumerate(zip(self._words, words, strict=True)) if a != b)
        for i in which:
            log_probs, trace = self._cases[i].log_probs(plan, since=since, trace=self.traces[i])
            yield self._cases[i].compare(log_probs), trace


def demotions(pattern: str, follower: str) -> Iterator[str]:
    """One full layer less; the first one stays, because nobody else could lead."""
    words = split(pattern)
    full = [layer for layer, word in enumerate(words) if word[0] in "AF"]
    for layer in full[1:]:
        yield _with(words, {layer: follower})


def promotions(pattern: str, lead: str = "F") -> Iterator[str]:
    """One full layer more."""
    words = split(pattern)
    first = next(layer for layer, word in enumerate(words) if word[0] in "AF")
    for layer in range(first + 1, len(words)):
        if words[layer][0] in "XR":
            yield _with(words, {layer: lead})


def shifts(pattern: str) -> Iterator[str]:
    """One full layer changes places with a neighbour that is not."""
    words = split(pattern)
    first = next(layer for layer, word in enumerate(words) if word[0] in "AF")
    for layer in range(first + 1, len(words)):
        if words[layer][0] not in "AF":
            continue
        for other in (layer - 1, layer + 1):
            if first < other < len(words) and words[other][0] in "XR":
                yield _with(words, {layer: words[other][0], other: words[layer]})


def thrifts(pattern: str, letters: str) -> Iterator[str]:
    """One layer reads less: all becomes what is selected, a full one follows (in one of `letters`, R or X), a
    reindex layer reuses where R is one of them. The first full layer goes on leading."""
    words = split(pattern)
    first = next(layer for layer, word in enumerate(words) if word[0] in "AF")
    for layer, word in enumerate(words):
        less = "F" if word[0] == "A" else ""
        if word[0] in "AF" and layer > first:
            less += letters
        if word[0] == "X" and "R" in letters:
            less += "R"
        for letter in less:
            yield _with(words, {layer: letter})


def lendings(pattern: str, layer: int, letters: str, *, num_lenders: int = 3) -> Iterator[str]:
    """A follower takes another of these letters, or takes from another of the latest lenders."""
    words = split(pattern)
    if words[layer][0] not in "XR":
        return
    now = join(words)
    for letter in letters:
        for lender in lenders(words, layer, letter)[:num_lenders]:
            other = _with(words, {layer: f"{letter}{lender}"})
            if other != now:
                yield other


def starts(overlap_loss: Tensor, num_full: int, follower: str) -> list[str]:
    """Patterns a search may begin with: the prior, and a uniform one beside it."""
    num_layers = len(overlap_loss)
    group = max(1, num_layers // num_full)
    return [prior(overlap_loss, num_full, follower), uniform(num_layers, group, follower)]


def _with(words: Sequence[str], new: dict[int, str]) -> str:
    return join([new.get(layer, word) for layer, word in enumerate(words)])
