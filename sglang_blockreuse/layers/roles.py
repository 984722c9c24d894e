"""What the sparse roles of a plan do in one layer, for decode rows and repair tokens alike.

    role      scores                    writes              attends to
    dense     -                         -                   everything
    full      the whole history         pool Ω, indices T   its T
    reindex   its anchor's pool         T                   its T
    reuse     -                         -                   its anchor's T

Nothing here looks at a value: what differs between rows is data that the operations read, so a captured step runs the
same code as a step on the CPU. A consumer whose shared state is stale scans for itself; that scan runs in every step
and does nothing where no row is stale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.ops import Checked, Chosen, Ops, Queries, Rows, Table
from .plan import BoundLayer, BoundPlan, Selection
from .ranks import Ranks
from .scorers import Scores
from .share_state import ShareState
from .step_clock import OFF, StepClock


@dataclass(frozen=True, slots=True)
class Selecting:
    """Rows that select in one step, each with one query, and what they share."""

    rows: Rows
    history_R: Tensor  # uint8 of zeros: every row scores its history, none a pool
    state: ShareState
    window: int | Tensor  # newest positions that are always read, int32 [R] where rows differ in them
    # room for pools of earlier steps and what came since, where a plan refreshes
    extended: Table | None = None
    clock: StepClock = OFF


@dataclass(slots=True)
class _Scored:
    """What `Scores.score` took and left."""

    pool: Table
    pooled_R: Tensor
    worth_RQW: Tensor
    page_size: int
    summed_R1W: Tensor | None = None  # over the queries of all ranks, once a list needed it


class Counts:
    """What steps with pools of earlier steps read, int64: tokens that were scanned, that were reranked, and steps since
    the scans."""

    def __init__(self, device: torch.device | str) -> None:
        self.reads_3 = torch.zeros(3, dtype=torch.int64, device=device)

    def resumed(self, lens_R: Tensor, sizes_R: Tensor, seen_R: Tensor, age_R: Tensor) -> None:
        resumes_R = seen_R > 0
        scanned, reranked = torch.where(resumes_R, 0, lens_R), torch.where(resumes_R, sizes_R, 0)
        self.reads_3 += torch.stack((scanned.sum(), reranked.sum(), age_R.sum()))


class Roles:
    """The roles of one plan, over the operations of a device. Keeps no step: what a step is comes as `Selecting`."""

    def __init__(
        self,
        plan: BoundPlan,
        ops: Ops,
        scores: Scores,
        k_pools: list[Tensor],
        counts: Counts,
        ranks: Ranks | None,
    ) -> None:
        """k_pools [S, H, D] of every layer: `key_from` scores those of another one. ranks: None where lists need no
        others."""
        assert plan.selection is not None
        self.plan, self.ops, self._scores, self._ranks = plan, ops, scores, ranks
        self._selection: Selection = plan.selection
        self._key_layers, self._k_pools = plan.key_layers, k_pools
        self._counts = counts

    def attends_by_scores(self, layer: BoundLayer) -> bool:
        """What the layer's scan leaves are the weights of its attention: of its own keys, all heads, every position."""
        scorer = self.plan.scorer
        exact = scorer.kind == "exact_qk" and scorer.scan_heads == "all" and layer.key_from is None
        return self.ops.gives_shares and exact and self._selection.refresh_every == 1

    def select(self, layer: BoundLayer, step: Selecting, q: Queries, k_SHD: Tensor) -> Chosen:
        """What each row attends to; a layer that others follow has written it for them."""
        if layer.role == "full":
            return Chosen(self._full(layer, step, q, k_SHD))
        table, checked = step.state.take(layer)
        if self._ranks is not None:
            checked = self._everywhere(layer, step, checked)
        if layer.role == "reindex":
            scored = self._score(layer, step, q, k_SHD, step.rows, table, checked.fresh_R, rerank=True)
            return Chosen(self._keep_indices(layer, step, scored))
        own = step.state.own
        if not self.ops.all_fresh(checked):
            stale = step.rows.selecting(checked.stale_lens_R)
            scored = self._score(layer, step, q, k_SHD, stale, own, step.history_R, rerank=False)
            self._keep(step, stale, scored, own)
        return Chosen(table, own, checked.fresh_R)

    def oracle(
        self, layer: BoundLayer, step: Selecting, q: Queries, k_SHD: Tensor, v_SHD: Tensor, out_RQD: Tensor
    ) -> None:
        """Attention over everything by the scan that chooses for others, into `out_RQD`."""
        scored = self._score(layer, step, q, k_SHD, step.rows, step.state.own, step.history_R, rerank=False)
        step.clock.lap("rest")
        self.ops.attend_shares(scored.worth_RQW, v_SHD, step.rows, out_RQD)
        step.clock.lap("attention")
        self._lend(layer, step, q, k_SHD, scored)

    def _everywhere(self, layer: BoundLayer, step: Selecting, checked: Checked) -> Checked:
        """Fresh on every rank; what only others found stale is counted here too."""
        assert self._ranks is not None
        fresh_R = self._ranks.everywhere(checked.fresh_R)
        step.state.stale[layer.role][-1] += (checked.fresh_R > fresh_R).sum()
        stale_lens_R = torch.where(fresh_R, 0, step.rows.lens_R)
        return Checked(fresh_R.to(torch.uint8), stale_lens_R, checked.good_RF)

    def _full(self, layer: BoundLayer, step: Selecting, q: Queries, k_SHD: Tensor) -> Table:
        candidates, pooled_R = step.state.own, step.history_R
        if step.extended is not None:
            candidates, pooled_R = step.extended, self._resume(layer, step, step.extended)
        scored = self._score(layer, step, q, k_SHD, step.rows, candidates, pooled_R, rerank=False)
        return self._lend(layer, step, q, k_SHD, scored)

    def _lend(self, layer: BoundLayer, step: Selecting, q: Queries, k_SHD: Tensor, scored: _Scored) -> Table:
        """Pool and indices of a full layer from its scores; the table by which it attends."""
        rows, state, reranks = step.rows, step.state, self.plan.reranks_own_pool
        if layer.pool_readers or reranks or step.extended is not None:
            pool = state.table_to_write(layer, "pool")
            self._keep(step, rows, scored, pool, part="compaction")
            state.seal(layer, "pool")
            if step.extended is not None:
                state.note_scans(layer, scored.pooled_R)
            if reranks:
                every_R = torch.ones_like(step.history_R)
                scored = self._score(layer, step, q, k_SHD, rows, pool, every_R, rerank=True)
        return self._keep_indices(layer, step, scored)

    def _resume(self, layer: BoundLayer, step: Selecting, extended: Table) -> Tensor:
        """Fill `extended` with the layer's last pools and what came since; uint8 [R], 0: the row scans."""
        table, seen_R, age_R = step.state.resume(layer)
        if self._ranks is not None:
            resumes_R = self._ranks.everywhere(seen_R)
            seen_R, age_R = seen_R * resumes_R, age_R * resumes_R
        self.ops.extend(step.rows, table, seen_R, extended)
        sizes_R = extended.counts[step.rows.requests_R]
        self._counts.resumed(step.rows.lens_R, sizes_R, seen_R, age_R)
        return (seen_R > 0).to(torch.uint8)

    def _keep_indices(self, layer: BoundLayer, step: Selecting, scored: _Scored) -> Table:
        """Indices for the readers, and the table by which the layer itself attends: lists of its own are finer
        where it lends one list for all KV heads."""
        own, scorer = step.state.own, self.plan.scorer
        if layer.index_readers:
            table = step.state.table_to_write(layer, "indices")
            self._keep(step, step.rows, scored, table)
            step.state.seal(layer, "indices")
            if scorer.lends == scorer.heads:
                return table
        if layer.attend != "all":
            self._keep(step, step.rows, scored, own)
        return own

    def _score(
        self,
        layer: BoundLayer,
        step: Selecting,
        q: Queries,
        k_SHD: Tensor,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        *,
        rerank: bool,
    ) -> _Scored:
        step.clock.lap("rest")
        source = self._key_layers[layer.layer]
        if source != layer.layer:
            k_SHD = self._k_pools[source]
        shares = self._scores.score(source, q, k_SHD, rows, pool, pooled_R, rerank=rerank)
        # whether rows resume a pool is data, which nobody but a running clock asks for
        resumes = step.clock.runs and bool(pooled_R.all())
        step.clock.lap("rerank" if rerank or resumes else "scan")
        return _Scored(pool, pooled_R, *shares)

    def _keep(self, step: Selecting, rows: Rows, scored: _Scored, out: Table, *, part: str = "top_k") -> None:
        """Keep what scored best. One list for a layer is ranked by the heads of all ranks."""
        step.clock.lap("rest")
        scorer, worth = self.plan.scorer, scored.worth_RQW
        heads = scorer.heads if out is step.state.own else scorer.lends
        if self._ranks is not None and heads == "layer":
            if scored.summed_R1W is None:
                scored.summed_R1W = self._ranks.shares(worth)
            worth = scored.summed_R1W
        self.ops.keep(
            rows,
            scored.pool,
            scored.pooled_R,
            worth,
            self._selection.sink,
            step.window,
            out,
            scored.page_size,
        )
        step.clock.lap(part)
