"""Plans as one letter per layer: D dense, F full, X reindex, R reuse.

X ranks inside the pool of the latest F, R takes the indices of the latest F or X.
"""

from __future__ import annotations

from ..plan import BoundPlan, LayerEntry, ModelSpec, PlanSpec, Role, Selection
from ..plan_loader import LayerPlan

ROLES: dict[str, Role] = {"D": "dense", "F": "full", "X": "reindex", "R": "reuse"}


def plan_of(
    pattern: str, selection: Selection, *, name: str, architecture: str | None = None, evidence: str = ""
) -> LayerPlan:
    """Raises PlanError for a pattern that no plan may have, KeyError for an unknown letter."""
    entries: list[LayerEntry] = []
    full: int | None = None
    indices: int | None = None
    for layer, letter in enumerate(pattern):
        anchor = {"X": full, "R": indices}.get(letter)
        entries.append(LayerEntry(layers=layer, role=ROLES[letter], anchor=anchor))
        full = layer if letter == "F" else full
        indices = layer if letter in "FX" else indices
    spec = PlanSpec(
        version=1,
        name=name,
        model=ModelSpec(architecture=architecture, num_layers=len(pattern)),
        selection=selection,
        layers=entries,
        evidence=evidence,
    )
    return LayerPlan(spec, name)


def bound_of(pattern: str, selection: Selection) -> BoundPlan:
    """The pattern as a plan, bound."""
    return plan_of(pattern, selection, name=pattern).bind(len(pattern), None)


def pattern_of(plan: BoundPlan) -> str:
    """The letters of a plan, whatever its anchors are."""
    letters = {role: letter for letter, role in ROLES.items()}
    return "".join(letters[layer.role] for layer in plan.layers)


def uniform(num_layers: int, group: int, follower: str, *, first: int = 0, lead: str = "D") -> str:
    """`first` layers of `lead`, then every `group`-th layer F and the others `follower`."""
    rest = "".join("F" if i % group == 0 else follower for i in range(num_layers - first))
    return lead * first + rest
