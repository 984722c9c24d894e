"""The rows of one decode step: which of them are sparse, and the dense attention of the others.

Dims as in sparse_decode.py. On the CPU sparse rows are taken out of the batch, because dense attention of the others
is planned on the host and blocked over their keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu_attention import AttentionPlan, KeyBias, Workspace, plan_attention, run_attention
from ..kernels.ops import Rows


class Batch(NamedTuple):
    """A decode batch as the host gives it, in batch order."""

    slot_table: Tensor  # int32 [B, positions]
    requests: Sequence[int]  # request slots
    lens: Sequence[int]  # keys of each row, its own token among them
    row_ids: Any  # int64 [T], what tells the holder of a slot from its predecessors
    dense: Any  # uint8 [T], rows that must not be sparse
    bias: KeyBias | None


class DecodeStep(Protocol):
    """Rows of one decode step, on the device that serves."""

    @property
    def rows(self) -> Rows:
        """Those that select, each with one query."""
        ...

    @property
    def history_R(self) -> Tensor:
        """uint8 [R] of zeros: every row scores its history, none a pool."""
        ...

    def attend_all(self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float) -> None:
        """Attention of every row to everything, into `out_TQD`."""
        ...

    def attend_dense(
        self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float
    ) -> None:
        """Attention of the rows that do not select, unless `Ops.attend` does it beside the others."""
        ...

    def queries(self, q_TQD: Tensor) -> Tensor:
        """[R, Q, D] of the rows that select."""
        ...

    def output(self, out_TQD: Tensor) -> Tensor:
        """[R, Q, D], where the attention of these rows is written before it is `put`."""
        ...

    def put(self, out_RQD: Tensor, out_TQD: Tensor) -> None: ...


class Step:
    """One decode step on the CPU. Attention of the rows that are not sparse is planned when it is needed."""

    def __init__(self, batch: Batch, sparse_T: Any, workspace: Workspace) -> None:
        self.batch, self._workspace = batch, workspace
        self.all_sparse = bool(sparse_T.all())
        self.sparse = np.flatnonzero(sparse_T)
        self.dense = np.flatnonzero(~sparse_T)
        self._sparse_R = torch.from_numpy(self.sparse)
        self._dense_N = torch.from_numpy(self.dense)
        requests, lens = (
            torch.from_numpy(np.array(values, np.int32)[self.sparse])
            for values in (batch.requests, batch.lens)
        )
        self.rows = Rows(requests, lens, batch.slot_table, batch.bias)
        self.history_R = torch.zeros(len(self.sparse), dtype=torch.uint8)
        self._plans: dict[bool, AttentionPlan] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.batch.requests)

    def attend_all(self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float) -> None:
        plan = self._dense_plan(every_row=True)
        run_attention(plan, q_TQD, k_SHD, v_SHD, out_TQD, scale=scale, workspace=self._workspace)

    def attend_dense(
        self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float
    ) -> None:
        if not self.all_sparse:
            plan = self._dense_plan(every_row=False)
            attend_tokens(
                plan, self._dense_N, self.num_tokens, q_TQD, k_SHD, v_SHD, out_TQD, scale, self._workspace
            )

    def queries(self, q_TQD: Tensor) -> Tensor:
        return q_TQD[: self.num_tokens] if self.all_sparse else q_TQD[self._sparse_R]

    def output(self, out_TQD: Tensor) -> Tensor:
        return torch.empty((len(self.sparse), *out_TQD.shape[1:]), dtype=torch.float32)

    def put(self, out_RQD: Tensor, out_TQD: Tensor) -> None:
        if self.all_sparse:
            out_TQD[: self.num_tokens] = out_RQD
            out_TQD[self.num_tokens :] = 0
        else:
            out_TQD[self._sparse_R] = out_RQD.to(out_TQD.dtype)

    def _dense_plan(self, *, every_row: bool) -> AttentionPlan:
        """Attention of all rows (a dense layer) or of the dense rows alone."""
        if every_row not in self._plans:
            which = range(len(self.batch.requests)) if every_row else self.dense.tolist()
            self._plans[every_row] = plan_attention(
                self.batch.slot_table,
                [self.batch.requests[t] for t in which],
                [self.batch.lens[t] - 1 for t in which],
                [1] * len(which),
                bias=self.batch.bias,
            )
        return self._plans[every_row]


def attend_tokens(
    plan: AttentionPlan,
    tokens_N: Tensor,
    num_tokens: int,
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    out_TQD: Tensor,
    scale: float,
    workspace: Workspace,
) -> None:
    """Dense attention of some tokens of a forward of `num_tokens`; tokens behind those become 0."""
    q_NQD = q_TQD[tokens_N]
    out_NQD = torch.empty_like(q_NQD)
    run_attention(plan, q_NQD, k_SHD, v_SHD, out_NQD, scale=scale, workspace=workspace)
    out_TQD[num_tokens:] = 0
    out_TQD[tokens_N] = out_NQD
