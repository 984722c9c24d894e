"""What a decode step reads, counted when it begins: a plan says it all, but for layers that may or may not scan."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..metrics import Metrics
from .plan import BoundPlan, Selection


class Sums(NamedTuple):
    """What the counts of a step are made of."""

    sparse: int  # rows
    short: int
    exact: int
    keys: int  # of sparse rows
    pooled: int  # of sparse rows, at most as many as their pools hold


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
        """A step whose rows are known on the host."""
        lens_R = lens_T[sparse_T]
        pooled = int(lens_R.clip(max=self._selection.pool_size or 0).sum())
        num_exact = int((~(short_T | sparse_T)).sum())
        self.add(metrics, Sums(len(lens_R), int(short_T.sum()), num_exact, int(lens_R.sum()), pooled))

    def add(self, metrics: Metrics, sums: Sums) -> None:
        for kind, num_rows in (("sparse", sums.sparse), ("short", sums.short), ("exact", sums.exact)):
            if num_rows:
                metrics.add("decode_rows_total", num_rows, kind=kind)
        if sums.sparse:
            self._add_reads(metrics, sums)

    def _add_reads(self, metrics: Metrics, sums: Sums) -> None:
        roles, selection = self._num_roles, self._selection
        num_dense = self._num_layers - sum(roles.values())
        for kind, num_tokens in (
            ("dense", num_dense * sums.keys),
            # with refreshes, each full layer counts for itself
            ("scanned", 0 if selection.refresh_every > 1 else roles["full"] * sums.keys),
            ("reranked", roles["reindex"] * sums.pooled),
            ("attended", sum(roles.values()) * sums.sparse * selection.final_k),
        ):
            if num_tokens:
                metrics.add("decode_tokens_total", num_tokens, kind=kind)
        if self._distance:
            metrics.add("decode_staleness_total", self._distance * sums.sparse, axis="layers")


class RowSums:
    """`Sums` of all steps up to now, gathered on a device."""

    def __init__(self, selection: Selection, device: torch.device | str) -> None:
        self._pool_size = selection.pool_size or 0
        self.sums_5 = torch.zeros(5, dtype=torch.int64, device=device)

    def add(self, requests_R: Tensor, short_R: Tensor, lens_R: Tensor) -> None:
        """lens_R: keys of rows that select, 0 for others. Rows of the host's request slot 0 are padding."""
        sparse_R, real_R = lens_R > 0, requests_R > 0
        rows = (sparse_R, short_R & real_R, real_R & ~short_R & ~sparse_R)
        pooled_R = lens_R.clamp(max=self._pool_size)
        self.sums_5 += torch.stack((*rows, lens_R, pooled_R)).sum(1)


_SERIES: tuple[tuple[str, dict[str, str]], ...] = (
    ("decode_own_scans_total", {"role": "reindex"}),
    ("decode_own_scans_total", {"role": "reuse"}),
    ("decode_tokens_total", {"kind": "scanned"}),
    ("decode_tokens_total", {"kind": "reranked"}),
    ("decode_staleness_total", {"axis": "steps"}),
    ("decode_stale_keys_total", {}),
)


class Tally:
    """Counts that steps leave on the device, brought to the metrics when somebody looks, or as they arrive."""

    def __init__(
        self, stale: dict[str, Tensor], reads_3: Tensor, stale_keys_1: Tensor, counter: StepCounter
    ) -> None:
        """stale: `ShareState.stale`; reads_3: `roles.Counts`; stale_keys_1: copies that were of other keys."""
        self._parts = [stale["reindex"][-1:], stale["reuse"][-1:], reads_3, stale_keys_1]
        self._counter = counter
        self._reported: list[int] = [0] * sum(len(part) for part in self._parts)
        self._coming: tuple[Tensor, Any] | None = None

    def count_rows(self, sums_5: Tensor) -> None:
        """Steps leave the sums of their rows too, see `RowSums`."""
        self._parts.append(sums_5)
        self._reported += [0] * len(sums_5)

    def report(self, metrics: Metrics) -> None:
        """All up to now. Waits for the device."""
        self._report(metrics, [count for part in self._parts for count in part.tolist()])

    def poll(self, metrics: Metrics) -> None:
        """What has arrived of an earlier step; asks for what is there now. Waits for nothing."""
        if not self._parts[0].is_cuda:
            self.report(metrics)
            return
        if self._coming is not None:
            counts, arrived = self._coming
            if not arrived.query():
                return
            self._report(metrics, counts.tolist())
        now = torch.cat(self._parts)
        counts = torch.empty(now.shape, dtype=now.dtype, pin_memory=True)
        counts.copy_(now, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        self._coming = counts, arrived

    def _report(self, metrics: Metrics, counts: list[int]) -> None:
        if counts == self._reported:
            return
        # what arrives may be older than what somebody waited for
        now = [max(count, before) for count, before in zip(counts, self._reported, strict=True)]
        new = [count - before for count, before in zip(now, self._reported, strict=True)]
        self._reported = now
        for count, (name, labels) in zip(new, _SERIES, strict=False):
            if count:
                metrics.add(name, count, **labels)
        if len(new) > len(_SERIES):
            self._counter.add(metrics, Sums(*new[len(_SERIES) :]))
