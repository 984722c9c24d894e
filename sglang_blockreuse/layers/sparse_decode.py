"""Decode steps under a layer plan on the CPU: scan, pool, rerank, attention over what was selected.

Dims: T tokens of the forward, R sparse rows, Q query heads, D head dim, S pool slots, B request slots of the host

    role      scores                    writes              attends to
    dense     -                         -                   everything
    full      the whole history         pool Ω, indices T   its T
    reindex   its anchor's pool         T                   its T
    reuse     -                         -                   its anchor's T

A row is sparse where the plan's selection is shorter than its history and its request did not ask for exact
decoding; the other rows of the same batch run dense in the same layer. The law of selection is `reference_select`;
what a scorer reads in place of the keys stands in `index_keys` and `page_index`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numba
import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_select, cpu_sparse
from ..kernels.cpu_attention import Workspace, run_attention
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_select import Geometry, Rows, Table
from ..metrics import Metrics
from .block_means import BlockMeans
from .decode_counts import StepCounter
from .decode_step import NO_BIAS, NO_TAGS, Batch, DenseRows, SparseRows, Step, subset
from .plan import BoundLayer, BoundPlan
from .plan_support import unsupported_plan
from .scorers import Scores, make_index_keys
from .share_state import ShareState, digest
from .step_clock import RunningClock, StepClock


class _Scored(NamedTuple):
    """What `cpu_select.score` took and left."""

    rows: Rows
    pool: Table
    pooled_R: Any
    shares_RQW: Any
    page_size: int
    weight: float


class SparseDecoder:
    """Runs a bound plan with sparse layers. Raises NotImplementedError for a plan that it would compute wrongly.

    One forward at a time: `begin` for a decode batch, then `run` for every layer in order.
    """

    def __init__(
        self,
        plan: BoundPlan,
        *,
        num_requests: int,
        num_q_heads: int,
        k_pools: Sequence[Tensor],
        model_identity: str | None = None,
        metrics: Metrics | None = None,
        strict: bool = False,
        timing: bool = False,
    ) -> None:
        k_pool_SHD = k_pools[0]
        _, num_heads, head_dim = k_pool_SHD.shape
        reasons = list(unsupported_plan(plan, k_pool_SHD, num_q_heads))
        if reasons or plan.selection is None:
            raise NotImplementedError(
                f"layer plan {plan.name} ({plan.source}): sparse decode on the CPU does not compute this plan: "
                f"{'; '.join(reasons)}. Change the plan, or choose full."
            )
        num_lists, num_lent = plan.scorer.list_counts(num_heads)
        self.plan, self.selection = plan, plan.selection
        self.key_layers = plan.key_layers
        self.k_pools = k_pools  # [S, H, D] of every layer: `key_from` scores those of another one
        self.geometry = Geometry(k_pool_SHD.dtype, num_heads, num_q_heads // num_heads, head_dim)
        self.state = ShareState(plan, num_requests, num_lists, num_lent=num_lent, strict=strict)
        self.metrics = metrics or Metrics()
        self.keys = make_index_keys(plan, k_pool_SHD, num_q_heads, model_identity, strict=strict)
        self.scores = Scores(plan, self.geometry, self.keys)
        self.tails: BlockMeans | None = None
        if plan.tail_layers:
            self.tails = BlockMeans(plan, self.geometry, len(k_pool_SHD), strict=strict)
        self.workspace = Workspace()
        self.clock: StepClock = RunningClock() if timing else StepClock()
        # a full layer's last pool and what came since, where it is not scanned
        self.extended: Table | None = None
        if plan.selection.refresh_every > 1:
            size = (plan.selection.pool_size or 0) + plan.selection.refresh_every
            self.extended = Table.empty(num_requests, num_lent, size)
        # windows by request slot (int32), where rows differ in what is forced
        self.windows_B: Any = None
        self._counter = StepCounter(plan)

    # -- steps -------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> Step | None:
        """Start a decode step; None where every row runs dense."""
        lens_T = np.array(batch.lens, np.int64)
        short_T = (lens_T < self.selection.min_seq_len) | (lens_T <= self.selection.final_k)
        sparse_T = ~(short_T | batch.dense.astype(bool))
        self._counter.count(self.metrics, lens_T, short_T, sparse_T)
        self.clock.begin(self.metrics)
        if not sparse_T.any():
            return None
        share_threads()
        step = Step(batch, sparse_T)
        self.state.begin(step.rows.requests_R, np.asarray(batch.row_ids)[step.sparse], step.rows.lens_R)
        self.scores.begin(len(step.sparse), int(step.rows.lens_R.max()))
        if self.keys is not None:
            self.keys.begin(step.rows)
        if self.tails is not None:
            self.tails.begin(step.rows)
        return step

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is about to be written, in every layer."""
        if self.keys is not None:
            self.keys.written(slots_T)
        if self.tails is not None:
            self.tails.written(slots_T)

    def run(
        self,
        step: Step,
        layer_id: int,
        q_TQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        out_TQD: Tensor,
        *,
        scale: float,
    ) -> None:
        """Attention of one layer for all rows of the step into `out_TQD`; tokens behind the batch's become 0."""
        layer = self.plan.layers[layer_id]
        self.clock.enter(layer.role)
        self._run(layer, step, q_TQD, k_SHD, v_SHD, out_TQD, scale)
        self.clock.leave()

    def _run(
        self,
        layer: BoundLayer,
        step: Step,
        q_TQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        out_TQD: Tensor,
        scale: float,
    ) -> None:
        by_shares = layer.attend == "all" and self.attends_by_scores(layer)
        if layer.role == "dense" or (layer.attend == "all" and not by_shares):
            plan = step.dense_plan(every_row=True)
            run_attention(plan, q_TQD, k_SHD, v_SHD, out_TQD, scale=scale, workspace=self.workspace)
        elif not step.all_sparse:
            self.run_dense_rows(step, q_TQD, k_SHD, v_SHD, out_TQD, scale)
        self.clock.lap("dense")
        if layer.role == "dense":
            return
        num_tokens = step.num_tokens
        q_RQD = q_TQD[:num_tokens] if step.all_sparse else q_TQD[step.sparse_R]
        q, keys, values = (q_RQD.float() * scale).numpy(), as_array(k_SHD), as_array(v_SHD)
        self.refresh_keys(layer, k_SHD)
        self._refresh_tails(layer, k_SHD, v_SHD)
        out_RQD = torch.empty(q_RQD.shape, dtype=torch.float32)
        if by_shares:
            self._oracle(layer, step, q, k_SHD, values, out_RQD.numpy())
        else:
            chosen = list(self.select(layer, step, q, k_SHD))
            if layer.attend == "all":
                return
            self._counter.count_lists(self.metrics, chosen)
            self.clock.lap("rest")
            self.attend(layer, chosen, q, keys, values, out_RQD.numpy())
            self.clock.lap("attention")
        if step.all_sparse:
            out_TQD[:num_tokens] = out_RQD
            out_TQD[num_tokens:] = 0
        else:
            out_TQD[step.sparse_R] = out_RQD.to(out_TQD.dtype)

    def run_dense_rows(
        self, step: DenseRows, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float
    ) -> None:
        q_NQD = q_TQD[step.dense_N]
        out_NQD = torch.empty_like(q_NQD)
        plan = step.dense_plan(every_row=False)
        run_attention(plan, q_NQD, k_SHD, v_SHD, out_NQD, scale=scale, workspace=self.workspace)
        out_TQD[step.num_tokens :] = 0
        out_TQD[step.dense_N] = out_NQD

    def refresh_keys(self, layer: BoundLayer, k_SHD: Tensor) -> None:
        """Bring the index keys of the forward's rows up to date, once the layer has written its keys."""
        if self.keys is None or layer.layer not in self.keys.layers:
            return
        num_stale = self.keys.refresh(layer.layer, k_SHD)
        self.clock.lap("copy")
        if num_stale:
            self.metrics.add("decode_stale_keys_total", num_stale)

    def _refresh_tails(self, layer: BoundLayer, k_SHD: Tensor, v_SHD: Tensor) -> None:
        if self.tails is None or layer.layer not in self.tails.layers:
            return
        num_stale = self.tails.refresh(layer.layer, k_SHD, v_SHD)
        self.clock.lap("copy")
        if num_stale:
            self.metrics.add("decode_stale_keys_total", num_stale)

    def attend(
        self,
        layer: BoundLayer,
        chosen: Sequence[tuple[Any, Rows, Table]],
        q: Any,
        keys: Any,
        values: Any,
        out: Any,
    ) -> None:
        """Attention of float32 queries, which carry the scale, over what `select` gave, into `out`."""
        if len(chosen) == 1:
            _, rows, table = chosen[0]
            self._attend(layer, q, keys, values, rows, table, out)
            return
        for which, rows, table in chosen:
            part = np.empty((len(which), *q.shape[1:]), np.float32)
            self._attend(layer, q[which], keys, values, rows, table, part)
            out[which] = part

    def _attend(
        self, layer: BoundLayer, q: Any, keys: Any, values: Any, rows: Rows, table: Table, out: Any
    ) -> None:
        if layer.tail == "none":
            cpu_sparse.attend(self.geometry, q, keys, values, rows, table, out)
            return
        assert self.tails is not None
        self.tails.attend(layer.layer, q, keys, values, rows, table, out)

    # -- roles -------------------------------------------------------------------------------

    def select(
        self, layer: BoundLayer, step: SparseRows, q: Any, k_SHD: Tensor
    ) -> Iterator[tuple[Any, Rows, Table]]:
        """(rows of the step, the same as Rows, the table that holds their indices), disjoint and complete."""
        every = slice(None)
        if layer.role == "full":
            yield every, step.rows, self._full(layer, step, q, k_SHD)
            return
        table, fresh_R = self.state.take(layer)
        stale = np.flatnonzero(fresh_R == 0)
        if len(stale):
            self.metrics.add("decode_own_scans_total", len(stale), role=layer.role)
        if layer.role == "reindex":
            scored = self._score(layer, q, k_SHD, step.rows, table, fresh_R, rerank=True)
            yield every, step.rows, self._keep_indices(layer, scored)
        elif not len(stale):
            yield every, step.rows, table
        else:
            rows, own, history = subset(step.rows, stale), self.state.own, step.history_R[stale]
            self._keep(self._score(layer, q[stale], k_SHD, rows, own, history, rerank=False), own)
            yield stale, rows, own
            fresh = np.flatnonzero(fresh_R)
            if len(fresh):
                yield fresh, subset(step.rows, fresh), table

    def attends_by_scores(self, layer: BoundLayer) -> bool:
        """What the layer's scan leaves are the weights of its attention: of its own keys, all heads, every position."""
        scorer = self.plan.scorer
        exact = scorer.kind == "exact_qk" and scorer.scan_heads == "all" and layer.key_from is None
        return exact and self.extended is None

    def _oracle(
        self, layer: BoundLayer, step: SparseRows, q: Any, k_SHD: Tensor, values: Any, out: Any
    ) -> None:
        """Attention over everything by the scan that chooses for others, into `out`."""
        scored = self._score(layer, q, k_SHD, step.rows, self.state.own, step.history_R, rerank=False)
        self.clock.lap("rest")
        cpu_sparse.attend_shares(self.geometry, scored.shares_RQW, values, step.rows, out)
        self.clock.lap("attention")
        self._lend(layer, step, q, k_SHD, scored)

    def _full(self, layer: BoundLayer, step: SparseRows, q: Any, k_SHD: Tensor) -> Table:
        candidates, pooled_R = self.state.own, step.history_R
        if self.extended is not None:
            candidates, pooled_R = self.extended, self._resume(layer, step, self.extended)
        scored = self._score(layer, q, k_SHD, step.rows, candidates, pooled_R, rerank=False)
        return self._lend(layer, step, q, k_SHD, scored)

    def _lend(self, layer: BoundLayer, step: SparseRows, q: Any, k_SHD: Tensor, scored: _Scored) -> Table:
        """Pool and indices of a full layer from its scores; the table by which it attends."""
        rows, state, reranks = step.rows, self.state, self.plan.reranks_own_pool
        if layer.pool_readers or reranks or self.extended is not None:
            pool = state.table_to_write(layer, "pool")
            self._rank(scored, pool, "compaction")
            state.seal(layer, "pool")
            if self.extended is not None:
                state.note_scans(layer, scored.pooled_R)
            if reranks:
                every_R = np.ones_like(step.history_R)
                scored = self._score(layer, q, k_SHD, rows, pool, every_R, rerank=True)
        return self._keep_indices(layer, scored)

    def _resume(self, layer: BoundLayer, step: SparseRows, extended: Table) -> Any:
        """Fill `extended` with the layer's last pools and what came since; uint8 [R], 0: the row scans."""
        table, seen_R, age_R = self.state.resume(layer)
        cpu_select.extend(step.rows, table, seen_R, extended)
        pooled_R = (seen_R > 0).astype(np.uint8)
        lens_R, sizes_R = step.rows.lens_R, extended.counts[step.rows.requests_R].max(1)
        self.metrics.add("decode_tokens_total", int(lens_R[seen_R == 0].sum()), kind="scanned")
        self.metrics.add("decode_tokens_total", int(sizes_R[seen_R > 0].sum()), kind="reranked")
        self.metrics.add("decode_staleness_total", int(age_R.sum()), axis="steps")
        return pooled_R

    def _keep_indices(self, layer: BoundLayer, scored: _Scored) -> Table:
        """Indices for the readers, and the table by which the layer itself attends: lists of its own are finer
        where it lends one list for all KV heads."""
        own, scorer = self.state.own, self.plan.scorer
        if layer.index_readers:
            table = self.state.table_to_write(layer, "indices")
            self._keep(scored, table)
            self.state.seal(layer, "indices")
            if scorer.lends == scorer.heads:
                return table
        if layer.attend != "all":
            self._keep(scored, own)
        return own

    def _score(
        self,
        layer: BoundLayer,
        q: Any,
        k_SHD: Tensor,
        rows: Rows,
        pool: Table,
        pooled_R: Any,
        *,
        rerank: bool,
    ) -> _Scored:
        self.clock.lap("rest")
        source = self.key_layers[layer.layer]
        if source != layer.layer:
            k_SHD = self.k_pools[source]
        shares = self.scores.score(source, q, k_SHD, rows, pool, pooled_R, rerank=rerank)
        self.clock.lap("rerank" if pooled_R.all() else "scan")
        return _Scored(rows, pool, pooled_R, *shares)

    def _keep(self, scored: _Scored, out: Table) -> None:
        """The indices of every list of `out`."""
        share, num_lists = self.selection.share, out.positions.shape[1]
        self._rank(scored, out, "top_k", None if share is None else share * scored.weight / num_lists)

    def _rank(self, scored: _Scored, out: Table, part: str, least: float | None = None) -> None:
        self.clock.lap("rest")
        rows, pool, pooled_R, shares_RQW, page_size, _ = scored
        sinks, window = self.selection.sink, self.selection.window
        if self.windows_B is not None:
            window = self.windows_B[rows.requests_R]
        cpu_select.keep(
            rows, pool, pooled_R, shares_RQW, sinks, window, out, page_size=page_size, least=least
        )
        self.clock.lap(part)


def share_threads() -> None:
    """Compiled kernels take as many threads as PyTorch: numba's setting belongs to a thread, PyTorch's may change."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def warm_up(decoder: SparseDecoder, k_pool_SHD: Tensor, num_q_heads: int) -> None:
    """Compile the kernels now (seconds), so that no request waits for them."""
    _, num_heads, head_dim = k_pool_SHD.shape
    tiny = torch.zeros(4, num_heads, head_dim, dtype=k_pool_SHD.dtype)
    rows = Rows(np.zeros(1, np.int32), np.ones(1, np.int32), np.zeros((1, 1), np.int32), NO_TAGS, NO_BIAS)
    table = Table.empty(1, 1, 1)
    none_R, q = np.zeros(1, np.uint8), np.zeros((1, num_q_heads, head_dim), np.float32)
    decoder.scores.begin(1, 1)
    if decoder.keys is not None:
        decoder.keys.begin(rows)
    # a layer with a copy, and one without that scans for itself
    for layer in {layer.layer: None for layer in (*decoder.plan.layers[:1], *_scoring(decoder.plan)[:1])}:
        for rerank in (False, True):
            scored = decoder.scores.score(layer, q, tiny, rows, table, none_R, rerank=rerank)
            cpu_select.keep(rows, table, none_R, scored.shares_RQW, 0, 1, table, page_size=scored.page_size)
    keys = as_array(tiny)
    cpu_sparse.attend(decoder.geometry, q, keys, keys, rows, table, np.zeros_like(q))
    if (tails := decoder.tails) is not None:
        tails.begin(rows)
        layer_id = next(iter(tails.layers))
        tails.refresh(layer_id, tiny, tiny)
        tails.attend(layer_id, q, keys, keys, rows, table, np.zeros_like(q))
    if any(layer.attend == "all" and decoder.attends_by_scores(layer) for layer in decoder.plan.layers):
        shares_RQW = np.zeros((1, num_q_heads, 1), np.float32)
        cpu_sparse.attend_shares(decoder.geometry, shares_RQW, keys, rows, np.zeros_like(q))
    if decoder.extended is not None:
        cpu_select.extend(rows, table, np.zeros(1, np.int64), decoder.extended)
    digest()(rows.requests_R, *table)


def _scoring(plan: BoundPlan) -> list[BoundLayer]:
    return [layer for layer in plan.layers if layer.scores]
