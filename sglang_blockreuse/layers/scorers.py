"""How full and reindex layers score positions on the CPU: by the keys of the pool, or by something smaller beside it.

    kind             reads per token and KV head of D channels
    exact_qk         the keys
    int4_keys        D / 2 + 8 bytes: every channel in 4 bits, ranges per key
    label_channels   C / 2 bytes: the channels that mattered most in calibration, in 4 bits
    learned          C / 2 bytes per token, all heads together: a trained projection, in 4 bits
    page_minmax      2 / P of the keys: their ranges over pages of P tokens; pools are ranked by the keys

With `fused` heads the query heads of a KV head score as one, their mean. With `routed` heads a few query heads score
for all (`reference_route`).
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import numpy as np
from torch import Tensor

from ..kernels import cpu_route, cpu_select
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_scan import PLAIN, Mix
from ..kernels.cpu_select import Geometry, Rows, Table
from .index_keys import IndexKeys, Int4Copy, KeyCopy, MappedCopy
from .index_weights import IndexWeights, read_weights
from .page_index import PageIndex
from .plan import BoundPlan
from .plan_support import MAPPED


class Shares(NamedTuple):
    """What `cpu_select.keep` ranks."""

    shares_RQW: Any  # float32 [R, Q', W]
    page_size: int  # tokens of a column where a row scored its history
    weight: float  # what the queries of a row count for together: their number, unless some stand for others


class _Scored(Protocol):
    """What queries are compared with: keys of the pool, or a copy of them."""

    def queries(self, q_RQD: Any) -> Any: ...

    def score(
        self, q_RQC: Any, rows: Rows, pool: Table, pooled_R: Any, work_RQW: Any, mix: Mix = PLAIN
    ) -> None: ...


class _PoolKeys:
    def __init__(self, geometry: Geometry, keys_SHD: Any) -> None:
        self._geometry, self._keys_SHD = geometry, keys_SHD

    def queries(self, q_RQD: Any) -> Any:
        return q_RQD

    def score(
        self, q_RQC: Any, rows: Rows, pool: Table, pooled_R: Any, work_RQW: Any, mix: Mix = PLAIN
    ) -> None:
        cpu_select.score(
            _for(self._geometry, q_RQC), q_RQC, self._keys_SHD, rows, pool, pooled_R, work_RQW, mix
        )


def _for(geometry: Geometry, q_RQC: Any) -> Geometry:
    """The geometry of queries that may be fewer than the model's."""
    return geometry._replace(group=q_RQC.shape[1] // geometry.num_kv_heads)


class Scores:
    """Shares of the softmax of a layer's rows, [R, Q', W]; Q' are the queries that score."""

    def __init__(self, plan: BoundPlan, geometry: Geometry, keys: IndexKeys | PageIndex | None) -> None:
        self.geometry, self.keys = geometry, keys
        self._scorer, self._selection = plan.scorer, plan.selection
        self._num_q_heads = geometry.num_kv_heads * geometry.group
        # chosen heads and a residual for each KV head may be more than there are heads
        self._max_queries = self._num_q_heads + geometry.num_kv_heads * plan.scorer.residual
        self._work: Any = np.zeros(0, np.float32)
        self._width = 0

    def begin(self, num_rows: int, width: int) -> None:
        """Scratch of one step; state that outlives it holds no float per key."""
        self._work, self._width = np.empty(num_rows * self._max_queries * width, np.float32), width

    def score(
        self, layer: int, q_RQD: Any, k_SHD: Tensor, rows: Rows, pool: Table, pooled_R: Any, *, rerank: bool
    ) -> Shares:
        """Scores as `cpu_select.score` leaves them. A layer without copy or pages scores the keys themselves."""
        stored = self._stored(layer, k_SHD)
        q_RQC, mix = self._queries(stored, q_RQD, rows, pool, pooled_R, rerank)
        keys, scans = self.keys, not (rerank or pooled_R.all())
        if scans and isinstance(keys, PageIndex) and layer in keys.layers:
            work_RQW = self._scratch(q_RQC, None if pooled_R.any() else keys.page_size)
            if pooled_R.any():
                mine = rows._replace(lens_R=np.where(pooled_R, rows.lens_R, 0))
                stored.score(q_RQC, mine, pool, pooled_R, work_RQW, mix)
            keys.score(_for(self.geometry, q_RQC), layer, q_RQC, rows, pooled_R, work_RQW, mix)
            return Shares(work_RQW, keys.page_size, _weight(q_RQC, mix))
        work_RQW = self._scratch(q_RQC)
        stored.score(q_RQC, rows, pool, pooled_R, work_RQW, mix)
        return Shares(work_RQW, 1, _weight(q_RQC, mix))

    def _stored(self, layer: int, k_SHD: Tensor) -> _Scored:
        copy = self.keys.copies.get(layer) if isinstance(self.keys, IndexKeys) else None
        return _PoolKeys(self.geometry, as_array(k_SHD)) if copy is None else copy

    def _scratch(self, q_RQC: Any, page_size: int | None = None) -> Any:
        num_rows, num_queries, _ = q_RQC.shape
        width = self._width if page_size is None else -(-self._width // page_size)
        return self._work[: num_rows * num_queries * width].reshape(num_rows, num_queries, width)

    def _queries(
        self, stored: _Scored, q_RQD: Any, rows: Rows, pool: Table, pooled_R: Any, rerank: bool
    ) -> tuple[Any, Mix]:
        scorer, q_RQC = self._scorer, stored.queries(q_RQD)
        heads = (scorer.rerank_heads or scorer.scan_heads) if rerank else scorer.scan_heads
        if heads == "all":
            return q_RQC, PLAIN
        num_heads = self.geometry.num_kv_heads
        if heads == "fused":
            return q_RQC.reshape(len(q_RQC), num_heads, -1, q_RQC.shape[2]).mean(2), PLAIN
        assert self._selection is not None
        assert scorer.num_routed_heads is not None
        sinks, window = self._selection.sink, self._selection.window
        sampled, table, counting = cpu_route.sample(rows, pool, pooled_R, sinks, window)
        shares = np.empty((*q_RQC.shape[:2], counting.shape[2]), np.float32)
        stored.score(q_RQC, sampled, table, np.ones(len(q_RQC), np.uint8), shares)
        num_lists = num_heads if scorer.heads == "kv_head" else 1
        chosen = cpu_route.choose(shares, counting, num_lists, scorer.num_routed_heads)
        return cpu_route.mix(q_RQC, chosen, num_heads, residual=scorer.residual)


def _weight(q_RQC: Any, mix: Mix) -> float:
    """Every row has as many chosen heads, so all rows weigh alike."""
    return float(mix.weights_RQ[0].sum()) if len(mix.weights_RQ) else float(q_RQC.shape[1])


def make_index_keys(
    plan: BoundPlan, k_pool_SHD: Tensor, num_q_heads: int, model_identity: str | None, *, strict: bool
) -> IndexKeys | PageIndex | None:
    """What a plan's scorer reads in place of the keys; None for exact_qk.

    Raises WeightsError for a file of weights that does not fit the plan or the model.
    """
    kind = plan.scorer.kind
    if kind == "exact_qk":
        return None
    if kind == "page_minmax":
        return PageIndex(plan.scanned_layers, k_pool_SHD, plan.scorer.tokens_per_page, strict=strict)
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
