"""Tensor-parallel ranks under a layer plan: each scores with its own heads, and all must choose the same.

A plan's one list for a layer is ranked by all query heads of the model, as in calibration. So shares are summed over
ranks before such a list is kept, and a consumer that finds its anchor's state stale on one rank scans on all of them:
ranks that disagree would wait for each other's sums. Lists per KV head stay on the rank that holds the head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .plan import BoundPlan
from .plan_support import MAPPED


@dataclass(frozen=True, slots=True)
class Ranks:
    """Ranks that share a model's heads."""

    num_ranks: int
    num_kv_heads: int  # of the model
    sum: Callable[[Tensor], Tensor]  # over all ranks, the same bits on each of them; may write its operand

    def shares(self, worth_RQW: Tensor) -> Tensor:
        """float32 [R, 1, W], what one list of all ranks' queries ranks; undefined where the scores are."""
        return self.sum(worth_RQW.sum(1, keepdim=True))

    def everywhere(self, good_R: Tensor) -> Tensor:
        """bool [R]: good on every rank."""
        return self.sum((good_R == 0).to(torch.int32)) == 0


def unsupported_over_ranks(plan: BoundPlan, ranks: Ranks) -> Iterator[str]:
    """What in a plan cannot be scored by ranks that know their own heads only."""
    scorer, spread = plan.scorer, f"with {ranks.num_ranks} tensor-parallel ranks"
    if scorer.kind in MAPPED:
        yield f"scorer.kind {scorer.kind} {spread}: its file of weights is for all heads of the model at once"
    scans = {scorer.scan_heads, scorer.rerank_heads or scorer.scan_heads}
    if "routed" in scans and scorer.heads == "layer":
        yield f"routed heads {spread}: a list of the whole layer is routed over heads that no rank has side by side"
    if ranks.num_kv_heads < ranks.num_ranks and (scorer.heads == "kv_head" or scans != {"all"}):
        yield (
            f"scorer.heads {scorer.heads} and scan_heads {scorer.scan_heads} {spread}: the model has "
            f"{ranks.num_kv_heads} KV heads, so the queries of one stand on several ranks; use heads: layer with "
            "scan_heads: all, or fewer ranks"
        )
