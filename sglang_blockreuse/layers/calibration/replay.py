"""Where a plan's error comes from: misses of each layer by itself, and what earlier layers passed on.

With e_l the difference of the hidden states to those of dense decode, e_{l+1} ~ J_l e_l + e_{T,l}: the second term is
the layer's own miss. It is measured by giving every layer the hidden states of dense decode (oracle replay); the
closed loop, in which errors travel, is the plan as it is served.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..plan import BoundPlan
from .case import Case, baseline_of


@dataclass(frozen=True)
class Replay:
    """Relative error ||h - h_dense|| / ||h_dense|| of every layer's output, mean over rows."""

    direct: list[float]  # the layer alone on dense inputs
    total: list[float]  # all layers before it under the plan too


def replay(case: Case, plan: BoundPlan) -> Replay:
    """Both errors of one case."""
    _, dense = case.log_probs(baseline_of(plan))
    alone = [case.layer_alone(layer, dense, plan) for layer in range(case.model.num_layers - 1)]
    _, served = case.log_probs(plan)
    return Replay(
        direct=[_error(hidden, dense.hidden[layer + 1]) for layer, hidden in enumerate(alone)],
        total=[
            _error(hidden, oracle) for hidden, oracle in zip(served.hidden[1:], dense.hidden[1:], strict=True)
        ],
    )


def _error(hidden: Tensor, oracle: Tensor) -> float:
    return float(((hidden - oracle).norm(dim=-1) / oracle.norm(dim=-1)).mean())
