"""The rows of one decode step: which of them are sparse, and the dense attention of the others.

Dims as in sparse_decode.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu_attention import AttentionPlan, KeyBias, plan_attention
from ..kernels.cpu_select import HIDDEN, Rows

NO_TAGS, NO_BIAS = np.zeros(0, np.uint8), np.zeros(4, np.float32)


class Batch(NamedTuple):
    """A decode batch as the host gives it, in batch order."""

    slot_table: Tensor  # int32 [B, positions]
    requests: Sequence[int]  # request slots
    lens: Sequence[int]  # keys of each row, its own token among them
    row_ids: Any  # int64 [T], what tells the holder of a slot from its predecessors
    dense: Any  # uint8 [T], rows that must not be sparse
    bias: KeyBias | None


class SparseRows(Protocol):
    """Rows that select, each with one query."""

    @property
    def rows(self) -> Rows: ...

    @property
    def history_R(self) -> Any:
        """uint8 [R] of zeros: every row scores its history, none a pool."""
        ...


class DenseRows(Protocol):
    """What of a forward attends to everything."""

    @property
    def num_tokens(self) -> int: ...

    @property
    def dense_N(self) -> Tensor:
        """int64, tokens of the forward that are not sparse."""
        ...

    def dense_plan(self, *, every_row: bool) -> AttentionPlan: ...


class Step:
    """One decode step: which rows are sparse, and the dense attention of the others, planned when it is needed."""

    def __init__(self, batch: Batch, sparse_T: Any) -> None:
        self.batch = batch
        self.all_sparse = bool(sparse_T.all())
        self.sparse = np.flatnonzero(sparse_T)
        self.dense = np.flatnonzero(~sparse_T)
        self.sparse_R = torch.from_numpy(self.sparse)
        self.dense_N = torch.from_numpy(self.dense)
        requests, lens = np.array(batch.requests, np.int32), np.array(batch.lens, np.int32)
        self.rows = Rows(
            requests[self.sparse], lens[self.sparse], batch.slot_table.numpy(), *bias_terms(batch.bias)
        )
        self.history_R = np.zeros(len(self.sparse), np.uint8)  # every row scores its history, none a pool
        self._plans: dict[bool, AttentionPlan] = {}

    @property
    def num_tokens(self) -> int:
        return len(self.batch.requests)

    def dense_plan(self, *, every_row: bool) -> AttentionPlan:
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


def subset(rows: Rows, which: Any) -> Rows:
    return rows._replace(requests_R=rows.requests_R[which], lens_R=rows.lens_R[which])


def bias_terms(bias: KeyBias | None) -> tuple[Any, Any]:
    """Tags and the logit term of each of the four tags; no tags where both terms are 0."""
    if bias is None or (bias.alpha == 0 and bias.beta == 0):
        return NO_TAGS, NO_BIAS
    terms = [0.0, bias.alpha, bias.beta, bias.alpha + bias.beta]
    return bias.tags_S.numpy(), np.array(terms, np.float32).clip(min=HIDDEN)
