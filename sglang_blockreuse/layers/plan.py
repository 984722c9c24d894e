"""Records of a layer plan: what a plan file may say, and what a plan says once it is bound to a model.

A plan gives every decoder layer one role for decode steps:

    dense    the model's own attention over the whole history
    full     scores the whole history, writes the pool Ω (size M) and the indices T (size k)
    reindex  scores only inside its anchor's pool, writes its own T            (eq. 7 of the source)
    reuse    attends over its anchor's T as it is

With `prefill: sparse` the roles also hold for the tokens that repair reused blocks; the rest of a prefill is dense.

Four objects can be shared and each is another promise: T (`reuse`), Ω (`reindex`), main KV (`kv_from`),
indexer keys (`key_from`). The first two are decided anew each step, the last two change what the cache holds.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

import msgspec
from msgspec import UNSET, Meta, Struct

Role = Literal["dense", "full", "reindex", "reuse"]
Attend = Literal["selected", "all"]
Tail = Literal["none", "block_mean"]
Prefill = Literal["dense", "sparse"]
ScorerKind = Literal["exact_qk", "int4_keys", "label_channels", "page_minmax", "learned", "model_indexer"]
ListHeads = Literal["layer", "kv_head"]
ScanHeads = Literal["all", "fused", "routed"]

Share = Annotated[float, Meta(gt=0, lt=1)]
Count = Annotated[int, Meta(ge=1)]
Size = Annotated[int, Meta(ge=0)]
LayerId = Annotated[int, Meta(ge=0)]


TAIL_BLOCK = 64  # consecutive positions for which one pseudo-key stands


class PlanError(ValueError):
    """A plan that cannot work: where it stands, the value, the rule it breaks and the way out.

    `path` is the place inside the file (`layers[3].anchor`), empty when the whole file is meant.
    All arguments are positional, so that the error survives pickling between server processes.
    """

    def __init__(self, source: str, path: str, value: object, rule: str, fix: str) -> None:
        super().__init__(source, path, value, rule, fix)
        self.source, self.path, self.value, self.rule, self.fix = source, path, value, rule, fix

    def __str__(self) -> str:
        where = f"{self.source}: {self.path}" if self.path else self.source
        return f"{where}: got {_shown(self.value)}, but {self.rule}. {self.fix}."


def _shown(value: object) -> str:
    text = "nothing" if value is UNSET else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


class _Strict(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Base of everything a file may contain.

    Defaults are left out when written, so a field added later with a neutral default keeps the fingerprints
    of older plans.
    """


class ModelSpec(_Strict):
    """The model a plan was made for. Both fields are checked when the plan is bound, absent ones are free."""

    architecture: str | None = None  # the checkpoint's architectures[0], e.g. LlamaForCausalLM
    num_layers: Count | None = None
    trained_sharing: bool = False  # the checkpoint was trained with this plan's kv_from and key_from


class Selection(_Strict):
    """How many positions one row reads in one step.

    `final_k` counts every position attention reads, sinks and window among them; the scorer chooses the
    remaining `final_k - sink - window`. (`k = 64 plus 4 sinks plus 64 window` is `final_k: 132` here.)

    With `share` a list holds sinks, window and every position whose share of the softmax, the mean over the queries
    that score for the list, exceeds it: as many as the row needs, and the best `final_k` where they are more.
    """

    final_k: Count  # k, positions attention reads per row; with `share` the most that a list holds
    share: Share | None = None  # what a position must exceed to be listed, in place of a count
    pool_size: Count | None = None  # M, candidates a full layer keeps for its reindex layers
    sink: Size = 4  # leading positions of the sequence that are always in T
    window: Size = 64  # newest positions that are always in T
    min_seq_len: Size = 0  # rows shorter than this run dense
    # what stands for positions that a list leaves out, in layers that say nothing else; block_mean: one pseudo-key
    # for those of every TAIL_BLOCK positions, with the mean of their keys and of their values
    tail: Tail = "none"
    # steps from one scan of a full layer to the next; between, its last pool grows along
    refresh_every: Count = 1


class Scorer(_Strict):
    """How full and reindex layers score positions: which keys they read, and which heads do the scoring."""

    # exact_qk reads the main keys, model_indexer is the one a DSA model was trained with
    kind: ScorerKind = "exact_qk"
    heads: ListHeads = "layer"  # one list per layer, or one per KV head
    # lists that a layer lends to others, its pool and its indices; as `heads` when absent
    lend_heads: ListHeads | None = None
    page_size: Count | None = None  # page_minmax only; 16 when absent
    # label_channels: int4 channels per KV head, 16 when absent; learned: of all heads together, 32 when absent
    num_channels: Count | None = None
    # label_channels and learned: the file that calibration wrote, relative to the plan, and its content
    weights: str | None = None
    weights_sha256: str | None = None
    # fused: one mixed query scores for all heads; routed: a few heads chosen per query
    scan_heads: ScanHeads = "all"
    num_routed_heads: Count | None = None  # with routed: heads of one list that score
    residual: bool = False  # with routed: the fused term stands in for the heads that were not chosen
    rerank_heads: ScanHeads | None = None  # heads that score inside the pool; as scan_heads when absent

    @property
    def channels(self) -> int:
        """`num_channels`, or the default of the kind."""
        return self.num_channels or (32 if self.kind == "learned" else 16)

    @property
    def tokens_per_page(self) -> int:
        """`page_size`, or its default."""
        return self.page_size or 16

    @property
    def lends(self) -> ListHeads:
        """`lend_heads`, or its default."""
        return self.lend_heads or self.heads

    def list_counts(self, num_kv_heads: int) -> tuple[int, int]:
        """Lists by which a layer attends, and those that it lends: 1, or one per KV head."""
        own, lent = (num_kv_heads if heads == "kv_head" else 1 for heads in (self.heads, self.lends))
        return own, lent

    @property
    def reranks_own_pool(self) -> bool:
        """A full layer whose scan is coarser than its rerank picks T from its own pool, as consumers do."""
        return self.kind == "page_minmax" or self.rerank_heads not in (None, self.scan_heads)


class LayerEntry(_Strict):
    """One line of the file: the same words for one layer (`3`), a closed range (`3-6`) or `all`."""

    layers: int | str
    role: Role
    anchor: LayerId | None = None  # whose pool (reindex) or indices (reuse) are read
    kv_from: LayerId | None = None  # layer whose main KV is read in place of an own one
    key_from: LayerId | None = None  # layer whose indexer keys are scored
    attend: Attend = "selected"  # full only; all = attends densely and still writes T (an oracle layer)
    own_window: Size = 0  # with kv_from: newest tokens whose own KV is kept and read besides
    tail: Tail | None = None  # where a list is attended to; as selection.tail when absent


class PlanSpec(_Strict):
    """The whole file, as written. Only `LayerPlan` says that it is valid."""

    version: Literal[1]
    name: Annotated[str, Meta(min_length=1)]
    layers: list[LayerEntry]
    model: ModelSpec = ModelSpec()
    selection: Selection | None = None
    scorer: Scorer = Scorer()
    prefill: Prefill = (
        "dense"  # sparse: tokens that repair reused blocks attend under the plan, as decode rows do
    )
    evidence: str = ""  # where the figures for this plan stand, or `unproven`; no part of the fingerprint


class BoundLayer(Struct, frozen=True, kw_only=True):
    """One layer of a bound plan. `*_readers` are the later layers that consume what this layer writes."""

    layer: int
    role: Role
    anchor: int | None = None
    kv_from: int | None = None
    key_from: int | None = None
    attend: Attend = "selected"
    own_window: int = 0
    tail: Tail = "none"
    pool_readers: tuple[int, ...] = ()
    index_readers: tuple[int, ...] = ()

    @classmethod
    def from_entry(cls, layer: int, entry: LayerEntry, selection: Selection | None) -> Self:
        """The layer as its entry says it; readers are filled in once all layers are known."""
        words = {field: getattr(entry, field) for field in entry.__struct_fields__ if field != "layers"}
        return cls(layer=layer, **{**words, "tail": entry_tail(entry, selection)})

    @property
    def scores(self) -> bool:
        """Full and reindex layers score positions and write their own T."""
        return self.role in ("full", "reindex")


class BoundPlan(Struct, frozen=True, kw_only=True):
    """A plan resolved for one model: `layers[i]` is layer i, every reference checked."""

    name: str
    source: str
    fingerprint: str
    selection: Selection | None  # None only if no layer is sparse
    scorer: Scorer
    layers: tuple[BoundLayer, ...]
    prefill: Prefill = "dense"
    weights_file: str | None = None  # path of scorer.weights
    trained_sharing: bool = False  # the checkpoint was trained with its kv_from and key_from
    warnings: tuple[str, ...] = ()  # what the plan promises and this project cannot check

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def is_dense(self) -> bool:
        """Every layer runs the model's own attention on its own KV: the plan is the same as no plan."""
        return all(layer.role == "dense" and layer.kv_from is None for layer in self.layers)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """The layer whose main KV each layer reads: its own, or that of `kv_from`, which keeps its own."""
        return tuple(at.layer if at.kv_from is None else at.kv_from for at in self.layers)

    @property
    def shared_layers(self) -> tuple[int, ...]:
        """Layers that keep no KV of their own."""
        return tuple(layer.layer for layer in self.layers if layer.kv_from is not None)

    @property
    def key_layers(self) -> tuple[int, ...]:
        """The layer whose index keys each layer would score; layers that score the same main KV have one copy."""
        first: dict[int, int] = {}
        for layer in self.layers:
            if layer.scores and layer.key_from is None:
                first.setdefault(self.kv_layers[layer.layer], layer.layer)
        scored = (layer.layer if layer.key_from is None else layer.key_from for layer in self.layers)
        return tuple(first.get(self.kv_layers[at], at) for at in scored)

    def scores_foreign_keys(self, layer: BoundLayer) -> bool:
        """A scoring layer whose scores are not of the keys that its attention reads."""
        source = layer.layer if layer.key_from is None else layer.key_from
        return layer.scores and self.kv_layers[source] != self.kv_layers[layer.layer]

    def all_dense(self) -> Self:
        """The model that this plan is a plan of: every layer dense, on the KV that the plan gives it."""
        layers = (BoundLayer(layer=at.layer, role="dense", kv_from=at.kv_from) for at in self.layers)
        return msgspec.structs.replace(self, layers=tuple(layers))

    @property
    def is_lossless(self) -> bool:
        """The plan computes what the model computes: every layer dense, on its own KV or as it was trained."""
        dense = all(layer.role == "dense" for layer in self.layers)
        return dense and (self.trained_sharing or not self.shared_layers)

    @property
    def is_sparse(self) -> bool:
        """Some layer selects: KV that decode writes is not what a dense pass would write, so it is published
        under `fingerprint` only."""
        return any(layer.role != "dense" for layer in self.layers)

    @property
    def reranks_own_pool(self) -> bool:
        """Full layers have a pool and a scan that is coarser than what ranks it."""
        selection = self.selection
        return selection is not None and selection.pool_size is not None and self.scorer.reranks_own_pool

    @property
    def tail_layers(self) -> dict[int, int]:
        """For each layer with a tail the first one that reads the same main KV: they have one copy of its means."""
        first: dict[int, int] = {}
        tailed = [at.layer for at in self.layers if at.tail != "none"]
        return {at: first.setdefault(self.kv_layers[at], at) for at in tailed}

    @property
    def scanned_layers(self) -> frozenset[int]:
        """The layers whose keys are scanned over the whole history, one of those that read the same main KV."""
        return frozenset(self.key_layers[layer.layer] for layer in self.layers if layer.role == "full")

    def rows_are_dense(self, seq_len: int) -> bool:
        """Whether a row with `seq_len` visible tokens reads everything anyway."""
        selection = self.selection
        return selection is None or seq_len < selection.min_seq_len or seq_len <= selection.final_k


def entry_tail(entry: LayerEntry, selection: Selection | None) -> Tail:
    """The tail of an entry's layers: none where they attend to everything."""
    if selection is None or entry.role == "dense" or entry.attend == "all":
        return "none"
    return entry.tail or selection.tail


def entry_fields(record: type[Struct]) -> tuple[str, ...]:
    """Keys a mapping of this record may have, in file order."""
    return tuple(field.encode_name for field in msgspec.structs.fields(record))
