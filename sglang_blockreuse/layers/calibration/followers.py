"""What every layer of a plan reads, beside what it would have chosen for itself: on the inputs of dense decode.

Dims: Q query heads, R rows of all cases, J keys, K positions that are read

Lists are those of the plan's own scorer. What a layer would have chosen is the best K by exact keys, one list for all
heads; mass is compared with every head's own best K. The errors that earlier layers pass on are not in here: `replay`
has those.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..plan import BoundLayer, BoundPlan, Role, Selection
from .case import Case
from .measures import jaccard, margin, mask_of, mass_recall, recall, rho

_LOW = 0.05  # the quantile over rows
POOLS = (1, 2, 4, 8)  # pool sizes that are tried, in multiples of final_k


@dataclass(frozen=True)
class Follower:
    """One layer. Means over rows, unless they are named otherwise."""

    layer: int
    role: Role
    anchor: int | None  # None: the list is its own
    jaccard: float
    recall: float
    coverage: float | None  # C, of its anchor's pool; None where it has none
    mass_by_head: list[float]  # over each head's own best
    low_by_head: list[float]  # the 5th percentile over rows
    rho: (
        tuple[float, float] | None
    )  # median and 95th percentile, over rows that are no tie; None without an anchor
    stable: (
        float | None
    )  # share of rows whose list (in a pool: whose coverage) is proven, ties counted as not
    num_ties: int
    coverage_by_pool: list[
        float
    ]  # C, were its anchor's pool so large, for POOLS; empty where no full layer lends

    @property
    def mass(self) -> float:
        return sum(self.mass_by_head) / len(self.mass_by_head)

    @property
    def worst_head(self) -> int:
        return min(range(len(self.mass_by_head)), key=self.mass_by_head.__getitem__)


def worst_coverage(layers: Sequence[Follower]) -> list[float]:
    """For each of POOLS the least C of all layers; empty where no layer follows a full one."""
    return [
        min(each) for each in zip(*(at.coverage_by_pool for at in layers if at.coverage_by_pool), strict=True)
    ]


def follow(cases: Sequence[Case], plan: BoundPlan) -> list[Follower]:
    """One record for every layer that reads a selection; none where the texts are too short for one."""
    selection = plan.selection
    cases = [case for case in cases if not plan.rows_are_dense(case.num_tokens)]
    if selection is None or not cases:
        return []
    found: dict[int, list[dict[str, Tensor]]] = defaultdict(list)
    for case in cases:
        _Watcher(case, plan, selection, found).run()
    return [_joined(plan.layers[layer], parts) for layer, parts in sorted(found.items())]


@dataclass
class _Watcher:
    case: Case
    plan: BoundPlan
    selection: Selection
    found: dict[int, list[dict[str, Tensor]]]

    def run(self) -> None:
        self._scores: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # of layers that lend: shares of heads, what is ranked
        self.case.selections(self.plan, self._note)

    def _note(
        self, layer: BoundLayer, read: Tensor, lent: dict[tuple[int, str], Tensor], logits_QRJ: Tensor
    ) -> None:
        shares_QRJ = logits_QRJ.softmax(-1)
        ranked_RJ = self.case.ranked(shares_QRJ, self.selection)
        scores_RJ = shares_QRJ.sum(0).masked_fill(ranked_RJ.isinf(), 0.0)
        if layer.pool_readers or layer.index_readers:
            self._scores[layer.layer] = scores_RJ, ranked_RJ
        if layer.attend == "all":
            return
        num_keys, k = ranked_RJ.shape[-1], self.selection.final_k
        own_RJ = mask_of(ranked_RJ.topk(k, -1).indices, num_keys)
        source = layer.anchor if layer.role == "reuse" else layer.layer
        list_RJ = mask_of(lent[source or 0, "indices"], num_keys)
        part = {
            "jaccard": jaccard(list_RJ, own_RJ),
            "recall": recall(list_RJ, own_RJ),
            "mass": mass_recall(shares_QRJ, read.expand(len(shares_QRJ), -1, -1)),
        }
        if layer.anchor is not None:
            anchor_RJ, anchor_ranked_RJ = self._scores[layer.anchor]
            kept = k
            if layer.role == "reindex":
                kept = self.selection.pool_size or k
                part["coverage"] = recall(mask_of(lent[layer.anchor, "pool"], num_keys), own_RJ)
            if self.plan.layers[layer.anchor].role == "full":
                part["pools"] = torch.stack(
                    [
                        recall(mask_of(anchor_ranked_RJ.topk(size, -1).indices, num_keys), own_RJ)
                        for size in (min(times * k, num_keys) for times in POOLS)
                    ]
                )
            part["rho"] = rho(anchor_RJ, scores_RJ, margin(anchor_ranked_RJ, k, kept))
        self.found[layer.layer].append(part)


def _joined(layer: BoundLayer, parts: Sequence[dict[str, Tensor]]) -> Follower:
    whole = {name: torch.cat([part[name] for part in parts], -1) for name in parts[0]}
    by_row: dict[str, Any] = {"rho": None, "stable": None, "num_ties": 0}
    if "rho" in whole:
        rho_R = whole["rho"]
        sure_R = rho_R[~rho_R.isnan()]
        quantiles = sure_R.quantile(torch.tensor([0.5, 0.95])).tolist() if len(sure_R) else [torch.nan] * 2
        by_row = {
            "rho": (quantiles[0], quantiles[1]),
            "stable": float((rho_R < 1).float().mean()),
            "num_ties": len(rho_R) - len(sure_R),
        }
    return Follower(
        layer=layer.layer,
        role=layer.role,
        anchor=layer.anchor,
        jaccard=float(whole["jaccard"].mean()),
        recall=float(whole["recall"].mean()),
        coverage=float(whole["coverage"].mean()) if "coverage" in whole else None,
        mass_by_head=whole["mass"].mean(-1).tolist(),
        low_by_head=whole["mass"].quantile(_LOW, -1).tolist(),
        coverage_by_pool=whole["pools"].mean(-1).tolist() if "pools" in whole else [],
        **by_row,
    )
