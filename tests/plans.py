"""Layer plans for the small model with random weights: every role, two groups, and who reads whom."""

from __future__ import annotations

from tiny_models import TALKING_LAYERS

_LAYERS = """  - {layers: 0, role: dense}
  - {layers: 1, role: full}
  - {layers: 2, role: reindex, anchor: 1}
  - {layers: 3, role: reuse, anchor: 2}
  - {layers: 4, role: full}
  - {layers: 5, role: reuse, anchor: 4}
"""
NUM_REINDEX, NUM_REUSE = 1, 2  # layers that follow; one of each is missed where shared state is stale
NUM_SCORING = 3  # layers that score keys
NUM_FULL = 2


def plan_text(selection: str = "final_k: 96, pool_size: 160, sink: 4, window: 32", *more: str) -> str:
    """A plan of this selection; `more` are further lines."""
    head = ("version: 1", "name: test", f"model: {{num_layers: {TALKING_LAYERS}}}")
    return "\n".join([*head, f"selection: {{{selection}}}", *more, "layers:", _LAYERS])


PLAN = plan_text()
# what PLAN is where nobody finds what another layer left
ALONE = PLAN.replace(_LAYERS, "  - {layers: 0, role: dense}\n  - {layers: 1-5, role: full}\n")
