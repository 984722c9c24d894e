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

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from ..kernels.cpu_scan import PLAIN, Mix
from ..kernels.ops import Keys, Ops, Queries, Routing, Rows, Table
from .index_keys import IndexKeys, Int4Copy, KeyCopy, MappedCopy
from .index_weights import IndexWeights, read_weights
from .page_index import PageIndex
from .plan import BoundPlan
from .plan_support import MAPPED

if TYPE_CHECKING:
    from .device_keys import DeviceIndexKeys


class Shares(NamedTuple):
    """What `keep` ranks."""

    worth_RQW: Tensor
    page_size: int  # tokens of a column where a row scored its history


class KeyStore(Protocol):
    """What stands beside the keys for scorers, whatever it is: see index_keys, device_keys, page_index."""

    @property
    def layers(self) -> Collection[int]: ...

    @property
    def copies(self) -> Mapping[int, KeyCopy]: ...

    @property
    def num_bytes(self) -> int: ...

    @property
    def stale_1(self) -> Tensor:
        """int64, what was checked and found to be of other keys, and mended."""
        ...

    def written(self, slots_T: Tensor) -> None: ...

    def begin(self, rows: Rows) -> None: ...

    def refresh(self, layer: int, k_SHD: Tensor) -> None: ...


class Scores:
    """What columns are worth to a layer's rows, [R, Q', W]; Q' are the queries that score, or the lists."""

    def __init__(
        self, plan: BoundPlan, num_q_heads: int, num_heads: int, keys: KeyStore | None, ops: Ops
    ) -> None:
        self.keys, self._ops = keys, ops
        self._scorer, self._selection = plan.scorer, plan.selection
        self._num_heads = num_heads
        # chosen heads and a residual for each KV head may be more than there are heads
        self._max_queries = num_q_heads + num_heads * plan.scorer.residual
        self._work = torch.zeros(0)
        self._width = 0

    def begin(self, num_rows: int, width: int) -> None:
        """Scratch of one step; state that outlives it holds no float per key."""
        self._work, self._width = self._ops.scratch(num_rows, self._max_queries, width).flatten(), width

    def score(
        self,
        layer: int,
        q: Queries,
        k_SHD: Tensor,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        *,
        rerank: bool,
    ) -> Shares:
        """Worth as `Ops.score` leaves it. A layer without copy or pages scores the keys themselves. rerank: every row
        scores its pool."""
        stored: Keys = k_SHD
        copy = None if self.keys is None else self.keys.copies.get(layer)
        if copy is not None:
            stored, q = copy.scored, copy.queries(q)
        q, mix = self._queries(stored, q, rows, pool, pooled_R, rerank)
        if not rerank and isinstance(self.keys, PageIndex) and layer in self.keys.layers:
            return self._score_pages(self.keys, layer, q, k_SHD, rows, pool, pooled_R, mix)
        work_RQW = self._scratch(q)
        self._ops.score(q, stored, rows, pool, pooled_R, work_RQW, mix)
        return Shares(work_RQW, 1)

    def _score_pages(
        self,
        pages: PageIndex,
        layer: int,
        q: Queries,
        k_SHD: Tensor,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        mix: Mix | None,
    ) -> Shares:
        pools = bool(pooled_R.any())
        work_RQW = self._scratch(q, None if pools else pages.page_size)
        if pools:
            self._ops.score(
                q,
                k_SHD,
                rows.selecting(torch.where(pooled_R > 0, rows.lens_R, 0)),
                pool,
                pooled_R,
                work_RQW,
                mix,
            )
        pages.score(layer, q, k_SHD, rows, pooled_R, work_RQW, mix or PLAIN)
        return Shares(work_RQW, pages.page_size)

    def _scratch(self, q: Queries, page_size: int | None = None) -> Tensor:
        num_rows, num_queries = q.values.shape[:2]
        num_worths = self._ops.num_worths(num_queries)
        width = self._width if page_size is None else -(-self._width // page_size)
        return self._work[: num_rows * num_worths * width].view(num_rows, num_worths, width)

    def _queries(
        self, stored: Keys, q: Queries, rows: Rows, pool: Table, pooled_R: Tensor, rerank: bool
    ) -> tuple[Queries, Mix | None]:
        scorer = self._scorer
        heads = (scorer.rerank_heads or scorer.scan_heads) if rerank else scorer.scan_heads
        if heads == "all":
            return q, None
        if heads == "fused":
            return Queries(q.values.unflatten(1, (self._num_heads, -1)).mean(2), q.scale), None
        assert self._selection is not None
        assert scorer.num_routed_heads is not None
        routing = Routing(
            num_heads=self._num_heads,
            num_lists=self._num_heads if scorer.heads == "kv_head" else 1,
            num_chosen=scorer.num_routed_heads,
            residual=scorer.residual,
            sinks=self._selection.sink,
            window=self._selection.window,
        )
        return self._ops.route(q, stored, rows, pool, pooled_R, routing)


def make_device_keys(
    plan: BoundPlan, k_pool_SHD: Tensor, num_q_heads: int, model_identity: str | None
) -> DeviceIndexKeys | None:
    """As `make_index_keys`, for captured steps."""
    if plan.scorer.kind == "exact_qk":
        return None
    from .device_keys import DeviceCopy, DeviceIndexKeys, DeviceInt4, DeviceMapped

    shape, device = k_pool_SHD.shape, k_pool_SHD.device
    weights = _weights(plan, k_pool_SHD, num_q_heads, model_identity)
    copies: dict[int, DeviceCopy] = {
        layer: DeviceInt4(*shape, device=device)
        if weights is None
        else DeviceMapped(shape[0], weights.layers[layer], device)
        for layer in _copied_layers(plan)
    }
    return DeviceIndexKeys(copies, shape[0], device)


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
    shape, weights = k_pool_SHD.shape, _weights(plan, k_pool_SHD, num_q_heads, model_identity)
    copies: dict[int, KeyCopy] = {
        layer: Int4Copy(*shape) if weights is None else MappedCopy(shape[0], weights.layers[layer])
        for layer in _copied_layers(plan)
    }
    return IndexKeys(copies, shape[0], strict=strict)


def _copied_layers(plan: BoundPlan) -> list[int]:
    return [at.layer for at in plan.layers if at.scores and plan.key_layers[at.layer] == at.layer]


def _weights(
    plan: BoundPlan, k_pool_SHD: Tensor, num_q_heads: int, model_identity: str | None
) -> IndexWeights | None:
    if plan.scorer.kind not in MAPPED:
        return None
    weights = read_weights(plan, model_identity)
    weights.check_shapes(plan.scorer.channels, num_q_heads, *k_pool_SHD.shape[1:])
    return weights
