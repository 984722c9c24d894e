"""How full and reindex layers score positions on the CPU: by the keys of the pool, or by a copy beside it.

    kind             reads per token and KV head of D channels
    exact_qk         the keys
    int4_keys        D / 2 + 8 bytes: every channel in 4 bits, ranges per key
    label_channels   C / 2 bytes: the channels that mattered most in calibration, in 4 bits
    learned          C / 2 bytes per token, all heads together: a trained projection, in 4 bits

With `scan_heads: fused` the query heads of a KV head score as one, their mean.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import Tensor

from ..kernels import cpu_select
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_select import Geometry, Rows, Table
from .index_keys import IndexKeys, Int4Copy, KeyCopy, MappedCopy
from .index_weights import IndexWeights, read_weights
from .plan import BoundPlan
from .plan_support import MAPPED


class Scores:
    """Shares of the softmax [R, Q', W] of a layer's rows; Q' are the query heads, or the KV heads where fused."""

    def __init__(self, plan: BoundPlan, geometry: Geometry, keys: IndexKeys | None) -> None:
        self.geometry, self.keys = geometry, keys
        self._fused = geometry._replace(group=1)
        scorer = plan.scorer
        self._scan_fused = scorer.scan_heads == "fused"
        self._rerank_fused = (scorer.rerank_heads or scorer.scan_heads) == "fused"
        self._work: Any = np.zeros(0, np.float32)
        self._width = 0

    def begin(self, num_rows: int, width: int) -> None:
        """Scratch of one step; state that outlives it holds no float per key."""
        size = num_rows * self.geometry.num_kv_heads * self.geometry.group * width
        self._work, self._width = np.empty(size, np.float32), width

    def score(
        self, layer: int, q_RQD: Any, k_SHD: Tensor, rows: Rows, pool: Table, pooled_R: Any, *, rerank: bool
    ) -> Any:
        """Scores as `cpu_select.score` leaves them. A layer without a copy scores the keys themselves."""
        copy = self.keys.copies.get(layer) if self.keys is not None else None
        geometry, q_RQC = self.geometry, q_RQD if copy is None else copy.queries(q_RQD)
        if self._rerank_fused if rerank else self._scan_fused:
            geometry = self._fused
            q_RQC = q_RQC.reshape(len(q_RQC), geometry.num_kv_heads, -1, q_RQC.shape[2]).mean(2)
        num_rows, num_queries, _ = q_RQC.shape
        work_RQW = self._work[: num_rows * num_queries * self._width].reshape(
            num_rows, num_queries, self._width
        )
        if copy is None:
            cpu_select.score(geometry, q_RQC, as_array(k_SHD), rows, pool, pooled_R, work_RQW)
        else:
            copy.score(q_RQC, rows, pool, pooled_R, work_RQW)
        return work_RQW


def make_index_keys(
    plan: BoundPlan, k_pool_SHD: Tensor, num_q_heads: int, model_identity: str | None, *, strict: bool
) -> IndexKeys | None:
    """The copies that a plan's scorer reads; None for exact_qk.

    Raises WeightsError for a file of weights that does not fit the plan or the model.
    """
    kind = plan.scorer.kind
    if kind == "exact_qk":
        return None
    num_slots, num_heads, head_dim = k_pool_SHD.shape
    weights: IndexWeights | None = None
    if kind in MAPPED:
        weights = read_weights(plan, model_identity)
        weights.check_shapes(plan.scorer.channels, num_q_heads, num_heads, head_dim)
    copies: dict[int, KeyCopy] = {
        layer.layer: Int4Copy(num_slots, num_heads, head_dim)
        if weights is None
        else MappedCopy(num_slots, weights.layers[layer.layer])
        for layer in plan.layers
        if layer.scores and plan.key_layers[layer.layer] == layer.layer
    }
    return IndexKeys(copies, num_slots, strict=strict)
