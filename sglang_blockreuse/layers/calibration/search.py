"""Searches the roles of the layers: a prior from the mass-loss table, then changes judged by the model itself.

The table adds up what single layers lose, which is not what a model loses: two changes that are harmless alone may
not be harmless together. So the table only proposes, and every step is measured anew on the pattern at hand.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..plan import Selection
from .case import Case, Figures
from .pattern import bound_of, uniform

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Found:
    """One accepted pattern and its mean KL to dense decode on the calibration cases."""

    pattern: str
    kl: float
    num_full: int


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
    """Cases are evaluated in turn; a pass restarts at the first layer where a candidate differs."""

    cases: Sequence[Case]
    selection: Selection
    num_screened: int = 2  # cases that choose who is measured on all
    num_confirmed: int = 3
    report: Progress = lambda line: None
    history: list[Found] = field(default_factory=list)
    _turn: int = 0

    def measure(self, pattern: str) -> float:
        plan = bound_of(pattern, self.selection)
        return Figures.joined([case.figures(plan) for case in self.cases]).kl

    def shrink(self, pattern: str, follower: str, num_full: int) -> Found:
        """Turn full layers into followers, the cheapest first, until `num_full` are left."""
        found = self._note(pattern, self.measure(pattern))
        while found.num_full > num_full:
            found = self._best_of(found.pattern, list(demotions(found.pattern, follower)))
        return found

    def polish(self, pattern: str, rounds: int, moves: Callable[[str], Iterator[str]] | None = None) -> Found:
        """Take the best move as long as it helps, at most `rounds` times; by default full layers move."""
        found = self._note(pattern, self.measure(pattern))
        for _ in range(rounds):
            candidates = list((moves or shifts)(found.pattern))
            better = self._best_of(found.pattern, candidates) if candidates else found
            if better.kl >= found.kl:
                break
            found = better
        return found

    def _best_of(self, pattern: str, candidates: Sequence[str]) -> Found:
        """The best candidate: screened on a rotating pair of cases, the best few confirmed on all."""
        plan = bound_of(pattern, self.selection)
        traces = [case.log_probs(plan)[1] for case in self.cases]
        some = [
            (self._turn + i * 2) % len(self.cases) for i in range(min(self.num_screened, len(self.cases)))
        ]
        self._turn += 1

        def kl(candidate: str, which: Sequence[int]) -> float:
            since = next(i for i, (a, b) in enumerate(zip(pattern, candidate, strict=True)) if a != b)
            bound = bound_of(candidate, self.selection)
            return Figures.joined(
                [self.cases[i].figures(bound, since=since, trace=traces[i]) for i in which]
            ).kl

        screened = sorted((kl(candidate, some), candidate) for candidate in candidates)[: self.num_confirmed]
        best_kl, best = min((kl(candidate, range(len(self.cases))), candidate) for _, candidate in screened)
        return self._note(best, best_kl)

    def _note(self, pattern: str, kl: float) -> Found:
        found = Found(pattern, kl, pattern.count("F"))
        self.history.append(found)
        self.report(f"{found.num_full:2d} full  KL {kl:.4f}  {pattern}")
        return found


def demotions(pattern: str, follower: str) -> Iterator[str]:
    """One full layer less; the first one stays, because nobody else could lead."""
    first = pattern.index("F")
    for layer, letter in enumerate(pattern):
        if letter == "F" and layer != first:
            yield _with(pattern, {layer: follower})


def shifts(pattern: str) -> Iterator[str]:
    """One full layer changes places with a neighbour that is not."""
    first = pattern.index("F")
    for layer in range(first + 1, len(pattern)):
        if pattern[layer] != "F":
            continue
        for other in (layer - 1, layer + 1):
            if first < other < len(pattern) and pattern[other] != "F":
                yield _with(pattern, {layer: pattern[other], other: "F"})


def cheapenings(pattern: str) -> Iterator[str]:
    """One reindex layer becomes reuse: three roles from two."""
    for layer, letter in enumerate(pattern):
        if letter == "X":
            yield _with(pattern, {layer: "R"})


def starts(overlap_loss: Tensor, num_full: int, follower: str) -> list[str]:
    """Patterns a search may begin with: the prior, and a uniform one beside it."""
    num_layers = len(overlap_loss)
    group = max(1, num_layers // num_full)
    return [prior(overlap_loss, num_full, follower), uniform(num_layers, group, follower)]


def _with(pattern: str, letters: dict[int, str]) -> str:
    return "".join(letters.get(layer, letter) for layer, letter in enumerate(pattern))
