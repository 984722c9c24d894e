"""What a decode step reads, counted when it begins: a plan says it all, but for layers that may or may not scan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ..kernels.cpu_select import Rows, Table
from ..metrics import Metrics
from .plan import BoundPlan


class StepCounter:
    """Counts the rows and reads of steps under one plan. Dims: T rows of the step, R sparse ones."""

    def __init__(self, plan: BoundPlan) -> None:
        assert plan.selection is not None
        self._selection, self._num_layers = plan.selection, plan.num_layers
        self._distance = sum(x.layer - x.anchor for x in plan.layers if x.anchor is not None)
        self._num_roles = {
            role: sum(x.role == role for x in plan.layers) for role in ("full", "reindex", "reuse")
        }

    def count(self, metrics: Metrics, lens_T: Any, short_T: Any, sparse_T: Any) -> None:
        for kind, num_rows in (
            ("sparse", int(sparse_T.sum())),
            ("short", int(short_T.sum())),
            ("exact", int((~(short_T | sparse_T)).sum())),
        ):
            if num_rows:
                metrics.add("decode_rows_total", num_rows, kind=kind)
        if sparse_T.any():
            self._count_reads(metrics, lens_T[sparse_T])

    def _count_reads(self, metrics: Metrics, lens_R: Any) -> None:
        roles, selection = self._num_roles, self._selection
        num_dense = self._num_layers - sum(roles.values())
        for kind, num_tokens in (
            ("dense", num_dense * int(lens_R.sum())),
            # with refreshes, each full layer counts for itself
            ("scanned", 0 if selection.refresh_every > 1 else roles["full"] * int(lens_R.sum())),
            ("reranked", roles["reindex"] * int(lens_R.clip(max=selection.pool_size or 0).sum())),
            # lists of a threshold count for themselves
            ("attended", 0 if selection.share else sum(roles.values()) * len(lens_R) * selection.final_k),
        ):
            if num_tokens:
                metrics.add("decode_tokens_total", num_tokens, kind=kind)
        if self._distance:
            metrics.add("decode_staleness_total", self._distance * len(lens_R), axis="layers")

    def count_lists(self, metrics: Metrics, chosen: Iterable[tuple[Any, Rows, Table]]) -> None:
        """What a layer attends to where a threshold decides: the mean over the lists of each row."""
        if self._selection.share is None:
            return
        for _, rows, table in chosen:
            num_tokens = table.counts[rows.requests_R].mean(1).sum()
            metrics.add("decode_tokens_total", round(float(num_tokens)), kind="attended")
