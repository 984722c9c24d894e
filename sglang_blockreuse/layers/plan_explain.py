"""What a plan reads in one decode step: the roofline of a bound plan as a table and as a dict.

Bytes are those a perfect kernel must fetch from memory, per step and summed over the batch:

    main     K and V that attention reads, and the block means of its tail
    scan     index keys a full layer scores over the whole history
    rerank   index keys scored inside the pool
    index    int32 positions written and read: T and Ω

`exact_qk` scores the main keys themselves, so such a layer fetches only V of what it selected; so does a layer that
ranks a pool after a scan of pages. Scoring with fewer heads saves arithmetic, not bytes; routed heads first read a
sample of what the pass scores. Weights and activations are left out: no plan changes them.

Lists of a threshold (`selection.share`) are as long as texts make them: what they hold is given as `listed`, as
calibration measures it. Without it they count as full, which is the most that such a plan reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import compress, groupby
from typing import Any

import msgspec
from msgspec import Struct

from sglang_blockreuse.layers.plan import TAIL_BLOCK, BoundLayer, BoundPlan, Prefill, Scorer

_POSITION_BYTES, _FLAG_BYTES = 4, 1
# a token of a page: when its slot was written, and its slot; a page: when its bounds were read, and its tag
_PAGE_TOKEN_BYTES, _PAGE_ENTRY_BYTES = 12, 9
# a block of the tail: when its means were taken, its weight, and of how many keys they are
_BLOCK_ENTRY_BYTES = 16
ROUTE_STRIDE = 16  # that of kernels/reference_route.py, which imports torch
# int4 copies carry a float16 step and a float16 minimum for each half of the channels
_INT4_RANGE_BYTES = 8
# a trained indexer's key: one fp8 value per channel and one float32 scale per token
_INDEXER_SCALE_BYTES = 4


class KVShape(Struct, frozen=True, kw_only=True):
    """The sizes of a model that decide its traffic."""

    num_kv_heads: int
    head_dim: int
    kv_element_bytes: int = 2
    indexer_head_dim: int = 128  # model_indexer only

    @classmethod
    def of_config(cls, config: Mapping[str, Any], *, kv_element_bytes: int = 2) -> KVShape:
        """From a model's config.json."""
        heads = config["num_attention_heads"]
        return cls(
            num_kv_heads=config.get("num_key_value_heads", heads),
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            kv_element_bytes=kv_element_bytes,
        )

    @property
    def key_bytes(self) -> int:
        """K of one token in one layer; V takes the same."""
        return self.num_kv_heads * self.head_dim * self.kv_element_bytes

    def index_bytes(self, scorer: Scorer) -> float:
        """Index keys of one token in one layer, as the scorer reads them."""
        match scorer.kind:
            case "exact_qk":
                return self.key_bytes
            case "int4_keys":
                return self.num_kv_heads * (self.head_dim / 2 + _INT4_RANGE_BYTES)
            case "label_channels":
                return self.num_kv_heads * scorer.channels / 2
            case "learned":
                return scorer.channels / 2
            case "page_minmax":
                return 2 * self.key_bytes / scorer.tokens_per_page
            case "model_indexer":
                return self.indexer_head_dim + _INDEXER_SCALE_BYTES


class LayerCost(Struct, frozen=True, kw_only=True):
    """Bytes of one layer in one step, over the whole batch."""

    layer: int
    role: str
    anchor: int | None
    kv_from: int | None
    key_from: int | None
    main_bytes: float
    scan_bytes: float
    rerank_bytes: float
    index_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.main_bytes + self.scan_bytes + self.rerank_bytes + self.index_bytes


class Explanation(Struct, frozen=True, kw_only=True):
    """Costs of a plan beside those of dense decode at the same history length and batch."""

    name: str
    fingerprint: str
    num_tokens: int  # history of each row
    batch: int
    rows_are_dense: bool  # history too short for the plan to apply
    lists_are_bounds: bool  # a threshold decides how long lists are, and nobody said
    prefill: Prefill  # whether tokens that repair reused blocks are read for as decode rows are
    listed: tuple[float, ...]  # positions of a layer's lists, their mean; 0 where it attends to everything
    layers: tuple[LayerCost, ...]
    dense_bytes: float
    kv_bytes_per_token: float  # resident K and V of one token, of all layers that keep their own
    shared_layers: tuple[int, ...]  # that read another layer's KV and keep none
    copies: str  # what is kept beside them
    copy_bytes_per_token: float

    @property
    def total_bytes(self) -> float:
        return sum(layer.total_bytes for layer in self.layers)

    @property
    def ratio(self) -> float:
        """Dense bytes over the plan's: an upper bound of what attention can gain."""
        return self.dense_bytes / self.total_bytes

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready, totals included."""
        layers = [{**msgspec.to_builtins(cost), "total_bytes": cost.total_bytes} for cost in self.layers]
        totals = {"total_bytes": self.total_bytes, "ratio": self.ratio}
        return {**msgspec.to_builtins(self), "layers": layers, **totals}

    def to_text(self) -> str:
        """A table in MB (10^6 bytes) per step, equal neighbours on one line, then the totals."""
        head = ("layers", "role", "anchor", "kv", "keys", "main", "scan", "rerank", "index", "total")
        rows = [head, *self._lines()]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        table = [
            "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
        ]
        size = f"{self.batch} rows of {self.num_tokens} tokens"
        title = f"plan {self.name} ({self.fingerprint[:12]}), {size}, MB per step"
        note = ["all rows run dense: the history is too short for this plan"] if self.rows_are_dense else []
        total = (
            f"plan {_mb(self.total_bytes)} MB, dense {_mb(self.dense_bytes)} MB, {self.ratio:.1f} times less"
        )
        return "\n".join([title, *table, *note, total, *self._memory(), *self._repair(), *self._bound()])

    def _memory(self) -> Iterator[str]:
        if self.shared_layers:
            num_own = len(self.layers) - len(self.shared_layers)
            yield (
                f"{len(self.shared_layers)} layers keep no KV of their own: {self.kv_bytes_per_token:,.0f} bytes per "
                f"token in place of {self.kv_bytes_per_token * len(self.layers) / num_own:,.0f}"
            )
        if self.copy_bytes_per_token:
            share = self.copy_bytes_per_token / self.kv_bytes_per_token
            yield (
                f"{self.copies} keep {self.copy_bytes_per_token:,.0f} bytes per token beside "
                f"{self.kv_bytes_per_token:,.0f} of KV ({share:.1%})"
            )

    def _repair(self) -> Iterator[str]:
        if self.prefill == "sparse":
            yield (
                "prefill: sparse, tokens that repair reused blocks attend under this plan too; the rest of a prefill "
                "is dense"
            )

    def _bound(self) -> Iterator[str]:
        if self.lists_are_bounds:
            yield "lists are full here; a threshold keeps fewer, say how many with --listed"

    def _lines(self) -> Iterator[tuple[str, ...]]:
        def same(cost: LayerCost) -> tuple[object, ...]:
            return msgspec.structs.astuple(cost)[1:]

        for _, group in groupby(self.layers, key=same):
            run = list(group)
            first, last = run[0], run[-1]
            span = str(first.layer) if len(run) == 1 else f"{first.layer}-{last.layer}"
            parts = ("main_bytes", "scan_bytes", "rerank_bytes", "index_bytes", "total_bytes")
            cells = (_mb(sum(getattr(cost, part) for cost in run)) for part in parts)
            links = ("-" if at is None else str(at) for at in (first.anchor, first.kv_from, first.key_from))
            yield (span, first.role, *links, *cells)


def explain(
    plan: BoundPlan,
    shape: KVShape,
    *,
    num_tokens: int,
    batch: int,
    listed: Sequence[float] | float | None = None,
) -> Explanation:
    """Roofline bytes of one decode step of `batch` rows with `num_tokens` of history each.

    `listed` is what a list holds on average under a plan with a threshold, of all layers or of each. Raises ValueError
    unless both counts are at least 1, and for a `listed` that the plan's lists cannot hold.
    """
    if num_tokens < 1 or batch < 1:
        raise ValueError(f"num_tokens and batch must be at least 1, got {num_tokens} and {batch}")
    step = _Step(plan, shape, num_tokens, batch, listed)
    return Explanation(
        name=plan.name,
        fingerprint=plan.fingerprint,
        num_tokens=num_tokens,
        batch=batch,
        rows_are_dense=plan.rows_are_dense(num_tokens),
        prefill=plan.prefill,
        listed=step.listed,
        lists_are_bounds=bool(plan.selection and plan.selection.share) and listed is None,
        layers=tuple(step.cost(layer) for layer in plan.layers),
        dense_bytes=float(batch * plan.num_layers * num_tokens * 2 * shape.key_bytes),
        kv_bytes_per_token=float(2 * len(set(plan.kv_layers)) * shape.key_bytes),
        shared_layers=plan.shared_layers,
        copies=_copies(plan),
        copy_bytes_per_token=_copy_bytes(plan, shape),
    )


def _copies(plan: BoundPlan) -> str:
    scored = ["index keys"] if plan.scorer.kind not in ("exact_qk", "model_indexer") else []
    return " and ".join([*scored, *(["block means"] if plan.tail_layers else [])])


def _copy_bytes(plan: BoundPlan, shape: KVShape) -> float:
    """What is kept per token beside the KV: for the scorer a copy per scoring layer and a flag for all of them, or the
    bounds of a page per scanned layer and what tells whether they hold; for the tail the means of blocks likewise."""
    num_means = len(set(plan.tail_layers.values()))
    means = num_means * 2 * shape.key_bytes / TAIL_BLOCK
    if num_means:
        means += _PAGE_TOKEN_BYTES + _FLAG_BYTES + _BLOCK_ENTRY_BYTES / TAIL_BLOCK
    return means + _scorer_bytes(plan, shape)


def _scorer_bytes(plan: BoundPlan, shape: KVShape) -> float:
    if plan.scorer.kind in ("exact_qk", "model_indexer"):
        return 0.0  # nothing, or what the model keeps anyway
    if plan.scorer.kind == "page_minmax":
        bounds = len(plan.scanned_layers) * shape.index_bytes(plan.scorer)
        return bounds + _PAGE_TOKEN_BYTES + _PAGE_ENTRY_BYTES / plan.scorer.tokens_per_page
    num_copies = len({plan.key_layers[layer.layer] for layer in plan.layers if layer.scores})
    return num_copies * shape.index_bytes(plan.scorer) + _FLAG_BYTES


class _Step:
    """One decode step of a plan at a fixed history length."""

    def __init__(
        self,
        plan: BoundPlan,
        shape: KVShape,
        num_tokens: int,
        batch: int,
        listed: Sequence[float] | float | None,
    ) -> None:
        self.plan, self.shape, self.num_tokens, self.batch = plan, shape, num_tokens, batch
        self.dense = plan.rows_are_dense(num_tokens)
        self.index_key = shape.index_bytes(plan.scorer)
        # pages are of a history: pools and samples are scored by the keys themselves
        self.ranked_key = shape.key_bytes if plan.scorer.kind == "page_minmax" else self.index_key
        selection = plan.selection
        self.listed = self._listed(listed)
        # without a pool, or with one that holds everything, a reindex layer scores the whole history
        self.pool = min((selection.pool_size if selection else None) or num_tokens, num_tokens)
        # lists by which a layer attends, and those that it lends
        self.num_lists, self.num_lent = plan.scorer.list_counts(shape.num_kv_heads)

    def _listed(self, given: Sequence[float] | float | None) -> tuple[float, ...]:
        """Positions of each layer's lists."""
        selection, layers = self.plan.selection, self.plan.layers
        if selection is None:
            return (0.0,) * len(layers)
        most = min(selection.final_k, self.num_tokens)
        if given is None or selection.share is None:
            sizes: Sequence[float] = (most,) * len(layers)
        else:
            sizes = given if isinstance(given, Sequence) else (given,) * len(layers)
        selects = [layer.role != "dense" and layer.attend == "selected" for layer in layers]
        if len(sizes) != len(layers) or any(not 0 < n <= most for n in compress(sizes, selects)):
            raise ValueError(
                f"listed is {given}, but lists of plan {self.plan.name} hold up to {most} positions (selection.final_k)"
            )
        return tuple(float(n) if at else 0.0 for n, at in zip(sizes, selects, strict=True))

    def _lent(self, layer: BoundLayer) -> float:
        """Positions of the indices that a layer writes for others, or takes."""
        takes = self.listed[layer.layer] or max((self.listed[at] for at in layer.index_readers), default=0.0)
        selection = self.plan.selection
        return takes or float(min(selection.final_k if selection else 0, self.num_tokens))

    def cost(self, layer: BoundLayer) -> LayerCost:
        dense = self.dense or layer.role == "dense"
        return LayerCost(
            layer=layer.layer,
            role=layer.role,
            anchor=layer.anchor,
            kv_from=layer.kv_from,
            key_from=layer.key_from,
            main_bytes=self.batch * self._main(layer, dense),
            scan_bytes=0.0 if dense else self.batch * self._scan(layer),
            rerank_bytes=0.0 if dense else self.batch * self._rerank(layer),
            index_bytes=0.0 if dense else self.batch * self._index(layer),
        )

    def _main(self, layer: BoundLayer, dense: bool) -> float:
        key = self.shape.key_bytes
        if dense or layer.attend == "all":
            return 2 * key * self.num_tokens
        own_window = 2 * key * min(layer.own_window, self.num_tokens)
        keys_were_scored = self._scores_keys(layer) and not self.plan.scores_foreign_keys(layer)
        tail = 0
        if layer.tail != "none":
            tail = 2 * key * (self.num_tokens // TAIL_BLOCK)
            keys_were_scored = False  # what is listed is taken out of the means
        return (1 if keys_were_scored else 2) * key * self.listed[layer.layer] + own_window + tail

    def _scan(self, layer: BoundLayer) -> float:
        if layer.role != "full":
            return 0.0
        foreign = self.plan.scores_foreign_keys(layer)
        if layer.attend == "all" and self.plan.scorer.kind == "exact_qk" and not foreign:
            return 0.0  # attention reads the same keys anyway
        every = self.plan.selection.refresh_every if self.plan.selection else 1
        # the mean over steps: one scan, then the last pool and what came since
        scans = self.index_key * self.num_tokens + (every - 1) * self.ranked_key * self.pool
        samples = self._sample(self.num_tokens) + (every - 1) * self._sample(self.pool)
        return (scans + samples * (self.plan.scorer.scan_heads == "routed")) / every

    def _rerank(self, layer: BoundLayer) -> float:
        if layer.role != "reindex" and not self._ranks_own_pool(layer):
            return 0.0
        scorer = self.plan.scorer
        routed = (scorer.rerank_heads or scorer.scan_heads) == "routed"
        return self.ranked_key * self.pool + routed * self._sample(self.pool)

    def _ranks_own_pool(self, layer: BoundLayer) -> bool:
        return layer.role == "full" and self.plan.reranks_own_pool and self.pool < self.num_tokens

    def _scores_keys(self, layer: BoundLayer) -> bool:
        """What the layer selected was scored by its keys in the end."""
        if self.plan.scorer.kind == "page_minmax":
            return layer.role == "reindex" or self._ranks_own_pool(layer)
        return layer.scores and self.plan.scorer.kind == "exact_qk"

    def _sample(self, num_columns: int) -> float:
        """Keys on which a router measures the heads, of so many that a pass scores."""
        selection = self.plan.selection
        forced = min(selection.sink + selection.window, num_columns) if selection else 0
        return self.ranked_key * (forced + -(-(num_columns - forced) // ROUTE_STRIDE))

    def _index(self, layer: BoundLayer) -> float:
        """T is written where it is scored and read by attention; Ω is written once, read by each reranker."""
        finer = self.num_lists > self.num_lent
        if layer.attend == "all" or not layer.scores:
            positions = self._lent(layer) * self.num_lent
        else:
            positions = self._lent(layer) * (2 * self.num_lists + (finer and bool(layer.index_readers)))
        if self.pool < self.num_tokens and (layer.role == "reindex" or layer.pool_readers):
            positions += self.pool * self.num_lent
        return float(_POSITION_BYTES * positions)


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:.3f}" if num_bytes < 1e6 else f"{num_bytes / 1e6:,.1f}"
