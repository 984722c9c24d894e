"""Decode steps under a layer plan: what a plan keeps between steps, and one layer of a step.

Dims: T tokens of the forward, R sparse rows, Q query heads, D head dim, S pool slots, B request slots of the host

A row is sparse where the plan's selection is shorter than its history and its request did not ask for exact
decoding; the other rows of the same batch run dense in the same layer. What the roles do stands in `roles`, what a
scorer reads in place of the keys in `index_keys` and `page_index`, the law of the operations in `kernels/ops_law`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numba
import numpy as np
import torch
from torch import Tensor

from ..kernels.choose import cpu_ops
from ..kernels.cpu_attention import Workspace
from ..kernels.ops import Chosen, Expected, Lent, Ops, Rows, Table
from ..metrics import Metrics
from .decode_counts import StepCounter, Tally
from .decode_step import Batch, DecodeStep, Step
from .plan import BoundLayer, BoundPlan
from .plan_support import unsupported_plan
from .ranks import Ranks, unsupported_over_ranks
from .roles import Counts, Roles, Selecting
from .scorers import KeyStore, Scores, make_device_keys, make_index_keys
from .share_state import ShareState
from .step_clock import RunningClock, StepClock


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
        ranks: Ranks | None = None,
        strict: bool = False,
        timing: bool = False,
        ops: Ops | None = None,
        unsupported: Iterable[str] | None = None,
        captured: bool = False,
    ) -> None:
        """k_pools, num_q_heads: of this rank; ranks: None where it is the only one; ops: the CPU's when absent.

        unsupported: what of the plan these operations do not compute; what the CPU's do not when absent.
        captured: steps may be recorded and run again, so nothing of them is listed on the host.
        """
        k_pool_SHD = k_pools[0]
        num_heads, device = k_pool_SHD.shape[1], k_pool_SHD.device
        reasons = list(
            unsupported_plan(plan, k_pool_SHD, num_q_heads) if unsupported is None else unsupported
        )
        if ranks is not None:
            reasons += unsupported_over_ranks(plan, ranks)
        if reasons or plan.selection is None:
            raise NotImplementedError(
                f"layer plan {plan.name} ({plan.source}): sparse decode does not compute this plan: "
                f"{'; '.join(reasons)}. Change the plan, or choose full."
            )
        self.ops = cpu_ops() if ops is None else ops
        self.plan, self.selection = plan, plan.selection
        self.num_q_heads, self.num_heads = num_q_heads, num_heads
        self.k_pools = k_pools
        self.strict, self._device = strict, device
        self.state = self.make_state(plan, num_requests)
        self.keys: KeyStore | None
        if captured:
            self.keys = make_device_keys(plan, k_pool_SHD, num_q_heads, model_identity)
        else:
            self.keys = make_index_keys(plan, k_pool_SHD, num_q_heads, model_identity, strict=strict)
        self.scores = Scores(plan, num_q_heads, num_heads, self.keys, self.ops)
        self.workspace = Workspace()
        self.clock: StepClock = RunningClock() if timing else StepClock()
        counts = Counts(device)
        # lists that ranks make together; where each KV head has its own, nothing is
        together = "layer" in (plan.scorer.heads, plan.scorer.lends)
        self.roles = Roles(plan, self.ops, self.scores, list(k_pools), counts, ranks if together else None)
        # a full layer's last pool and what came since, where it is not scanned
        self._extended: Table | None = None
        if plan.selection.refresh_every > 1:
            size = (plan.selection.pool_size or 0) + plan.selection.refresh_every
            num_lent = plan.scorer.list_counts(num_heads)[1]
            self._extended = Table.empty(num_requests, num_lent, size, device)
        self._counter = StepCounter(plan)
        stale_keys_1 = torch.zeros(1, dtype=torch.int64, device=device)
        if self.keys is not None:
            stale_keys_1 = self.keys.stale_1
        self._tally = Tally(self.state.stale, counts.reads_3, stale_keys_1, self._counter)
        self._metrics = metrics or Metrics()

    @property
    def metrics(self) -> Metrics:
        """What was counted up to now. Waits for the device."""
        self.report()
        return self._metrics

    @metrics.setter
    def metrics(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def report(self) -> None:
        """Bring to the metrics what steps counted on the device, which is waited for."""
        self._tally.report(self._metrics)

    def poll(self) -> None:
        """The same for what has arrived, without waiting."""
        self._tally.poll(self._metrics)

    def count_on_device(self, sums_5: Tensor) -> None:
        """Rows are counted on the device (`RowSums`), not when a step begins."""
        self._tally.count_rows(sums_5)

    def make_state(self, plan: BoundPlan, num_requests: int) -> ShareState:
        num_lists, num_lent = plan.scorer.list_counts(self.num_heads)
        return ShareState(
            plan,
            num_requests,
            num_lists,
            num_lent=num_lent,
            strict=self.strict,
            ops=self.ops,
            device=self._device,
        )

    # -- steps -------------------------------------------------------------------------------

    def begin(self, batch: Batch) -> Step | None:
        """Start a decode step; None where every row runs dense."""
        lens_T = np.array(batch.lens, np.int64)
        short_T = (lens_T < self.selection.min_seq_len) | (lens_T <= self.selection.final_k)
        sparse_T = ~(short_T | batch.dense.astype(bool))
        self._counter.count(self._metrics, lens_T, short_T, sparse_T)
        self.poll()
        self.clock.begin(self._metrics)
        if not sparse_T.any():
            return None
        share_threads()
        step = Step(batch, sparse_T, self.workspace)
        row_ids_R = torch.from_numpy(np.asarray(batch.row_ids, np.int64)[step.sparse])
        self.start(step, row_ids_R, int(step.rows.lens_R.max()))
        return step

    def start(self, step: DecodeStep, row_ids_R: Tensor, width: int) -> None:
        """Start a step whose rows have up to `width` keys."""
        self.state.begin(step.rows.requests_R, row_ids_R, step.rows.lens_R)
        self.scores.begin(len(row_ids_R), width)
        if self.keys is not None:
            self.keys.begin(step.rows)

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is about to be written, in every layer."""
        if self.keys is not None:
            self.keys.written(slots_T)

    def run(
        self,
        step: DecodeStep,
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
        step: DecodeStep,
        q_TQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        out_TQD: Tensor,
        scale: float,
    ) -> None:
        by_shares = layer.attend == "all" and self.roles.attends_by_scores(layer)
        if layer.role == "dense" or (layer.attend == "all" and not by_shares):
            step.attend_all(q_TQD, k_SHD, v_SHD, out_TQD, scale)
        else:
            step.attend_dense(q_TQD, k_SHD, v_SHD, out_TQD, scale)
        self.clock.lap("dense")
        if layer.role == "dense":
            return
        q = self.ops.queries(step.queries(q_TQD), scale)
        self.refresh_keys(layer, k_SHD)
        selecting = Selecting(
            step.rows, step.history_R, self.state, self.selection.window, self._extended, self.clock
        )
        if layer.attend == "all" and not by_shares:
            self.roles.select(layer, selecting, q, k_SHD)
            return
        out_RQD = step.output(out_TQD)
        if by_shares:
            self.roles.oracle(layer, selecting, q, k_SHD, v_SHD, out_RQD)
        else:
            chosen = self.roles.select(layer, selecting, q, k_SHD)
            self.clock.lap("rest")
            self.ops.attend(q, k_SHD, v_SHD, step.rows, chosen, out_RQD)
            self.clock.lap("attention")
        step.put(out_RQD, out_TQD)

    def refresh_keys(self, layer: BoundLayer, k_SHD: Tensor) -> None:
        """Bring the index keys of the forward's rows up to date, once the layer has written its keys."""
        if self.keys is None or layer.layer not in self.keys.layers:
            return
        self.keys.refresh(layer.layer, k_SHD)
        self.clock.lap("copy")


def share_threads() -> None:
    """Compiled kernels take as many threads as PyTorch: numba's setting belongs to a thread, PyTorch's may change."""
    numba.set_num_threads(min(torch.get_num_threads(), numba.config.NUMBA_NUM_THREADS))


def warm_up(decoder: SparseDecoder, k_pool_SHD: Tensor, num_q_heads: int) -> None:
    """Compile the CPU's kernels now (seconds), so that no request waits for them."""
    _, num_heads, head_dim = k_pool_SHD.shape
    ops = decoder.ops
    tiny = torch.zeros(4, num_heads, head_dim, dtype=k_pool_SHD.dtype)
    one_R = torch.ones(1, dtype=torch.int32)
    rows = Rows(one_R * 0, one_R, torch.zeros((1, 1), dtype=torch.int32))
    table = Table.empty(1, 1, 1)
    none_R = torch.zeros(1, dtype=torch.uint8)
    q = ops.queries(torch.zeros(1, num_q_heads, head_dim), 1.0)
    decoder.scores.begin(1, 1)
    if decoder.keys is not None:
        decoder.keys.begin(rows)
    # a layer with a copy, and one without that scans for itself
    for layer in {layer.layer: None for layer in (*decoder.plan.layers[:1], *_scoring(decoder.plan)[:1])}:
        for rerank in (False, True):
            shares = decoder.scores.score(layer, q, tiny, rows, table, none_R, rerank=rerank)
            ops.keep(rows, table, none_R, shares.worth_RQW, 0, 1, table, shares.page_size)
    out = torch.zeros(1, num_q_heads, head_dim)
    ops.attend(q, tiny, tiny, rows, Chosen(table), out)
    if any(layer.attend == "all" and decoder.roles.attends_by_scores(layer) for layer in decoder.plan.layers):
        ops.attend_shares(ops.scratch(1, num_q_heads, 1).zero_(), tiny, rows, out)
    if decoder.selection.refresh_every > 1:
        ops.extend(rows, table, torch.zeros(1, dtype=torch.int64), table)
    expected = Expected(rows.requests_R, rows.lens_R, torch.zeros((1, 3), dtype=torch.int64))
    ops.seal(expected, Lent(table, torch.zeros((1, 6), dtype=torch.int64)), (0, 0))


def _scoring(plan: BoundPlan) -> list[BoundLayer]:
    return [layer for layer in plan.layers if layer.scores]
