"""Plans as one letter per layer: D dense, A full that attends to everything, F full, X reindex, R reuse.

X ranks inside the pool of the latest A or F, R takes the indices of the latest A, F or X. Where another lender is
meant its layer follows the letter, and the layers stand apart: `F F X0 R` has layer 2 rank in the pool of layer 0.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..plan import BoundPlan, LayerEntry, ModelSpec, PlanSpec, Role, Scorer, Selection
from ..plan_loader import LayerPlan

ROLES: dict[str, Role] = {"D": "dense", "A": "full", "F": "full", "X": "reindex", "R": "reuse"}
EXACT = Scorer()
# a list per KV head for a layer's own attention, and one for all heads that it lends: heads of different layers
# have nothing to do with each other
PER_HEAD = Scorer(heads="kv_head", lend_heads="layer")
# who lends what a letter takes
LENDERS = {"X": "AF", "R": "AFX"}


def split(pattern: str) -> list[str]:
    """One word per layer: its letter, and its anchor where that is not the latest lender."""
    words = pattern.split() if " " in pattern else list(pattern)
    return [_short(words, layer) for layer in range(len(words))]


def join(words: Sequence[str]) -> str:
    """The shortest pattern of these words."""
    short = [_short(words, layer) for layer in range(len(words))]
    return ("" if all(len(word) == 1 for word in short) else " ").join(short)


def lenders(words: Sequence[str], layer: int, letter: str) -> list[int]:
    """Layers a letter at `layer` may take from, the latest first."""
    return [i for i in range(layer - 1, -1, -1) if words[i][0] in LENDERS.get(letter, "")]


def anchor_of(words: Sequence[str], layer: int) -> int | None:
    """Raises KeyError for an unknown letter."""
    letter, named = words[layer][0], words[layer][1:]
    ROLES[letter]
    if named:
        return int(named)
    return next(iter(lenders(words, layer, letter)), None)


def num_full(pattern: str) -> int:
    """Layers that score the whole history, those that attend to it as well among them."""
    return sum(word[0] in "AF" for word in split(pattern))


def plan_of(
    pattern: str,
    selection: Selection,
    *,
    name: str,
    scorer: Scorer = EXACT,
    architecture: str | None = None,
    evidence: str = "",
) -> LayerPlan:
    """Raises PlanError for a pattern that no plan may have, KeyError for an unknown letter."""
    words = split(pattern)
    entries = [
        LayerEntry(
            layers=layer,
            role=ROLES[word[0]],
            anchor=anchor_of(words, layer),
            attend="all" if word[0] == "A" else "selected",
        )
        for layer, word in enumerate(words)
    ]
    spec = PlanSpec(
        version=1,
        name=name,
        model=ModelSpec(architecture=architecture, num_layers=len(words)),
        selection=selection,
        scorer=scorer,
        layers=entries,
        evidence=evidence,
    )
    return LayerPlan(spec, name)


def bound_of(pattern: str, selection: Selection, scorer: Scorer = EXACT) -> BoundPlan:
    """The pattern as a plan, bound."""
    return plan_of(pattern, selection, name=pattern, scorer=scorer).bind(len(split(pattern)), None)


def pattern_of(plan: BoundPlan) -> str:
    """The pattern of a plan."""
    letters: dict[str, str] = {role: letter for letter, role in ROLES.items() if letter != "A"}
    words = []
    for layer in plan.layers:
        letter = "A" if layer.attend == "all" and layer.role == "full" else letters[layer.role]
        words.append(letter + ("" if layer.anchor is None else str(layer.anchor)))
    return join(words)


def uniform(num_layers: int, group: int, follower: str, *, first: int = 0, lead: str = "D") -> str:
    """`first` layers of `lead`, then every `group`-th layer F and the others `follower`."""
    rest = "".join("F" if i % group == 0 else follower for i in range(num_layers - first))
    return lead * first + rest


def _short(words: Sequence[str], layer: int) -> str:
    """The word without an anchor that goes without saying, or that lends nothing (any more)."""
    word = words[layer]
    if not word[1:]:
        return word
    found = lenders(words, layer, word[0])
    return word if int(word[1:]) in found[1:] else word[0]
