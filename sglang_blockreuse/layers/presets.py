"""Known sharing schemes as layer plans, and SGLang's own index-sharing keys read as one.

Each function returns a checked `LayerPlan`; `plan preset` writes those that a server runs (`preset_names`). A preset
states a structure and does not say that it suits a model: calibrate it, or pass `trained_sharing=True` for a
checkpoint that was trained this way.

    index_cache     full + reuse                                       IndexCache, arXiv 2603.12201
    wide_pool       full (coarse scan, own pool) + reindex             LISA‡
    csa2            full + reindex + reuse over shared KV and keys     DeepSeek-V4.1 CSA2, arXiv 2609.19969
    hybrid_oracle   dense layers that lend indices and KV              HySparse, arXiv 2602.03560
    yoco            one KV for all cross-decoder layers                YOCO, arXiv 2405.05254
    clsa            the same with one routing                          CLSA, arXiv 2606.06467
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from sglang_blockreuse.layers.plan import LayerEntry, ModelSpec, PlanError, PlanSpec, Role, Scorer, Selection
from sglang_blockreuse.layers.plan_loader import LayerPlan

# The head axis: how a scan gets by without scoring every head. It composes with any preset.
# ReLU(x) = (x + |x|) / 2: the linear half of all heads fuses exactly into one query, the rest needs heads.
TRAINED_INDEXER = Scorer(kind="model_indexer")
FUSED_HEADS = Scorer(kind="model_indexer", scan_heads="fused")  # LISA
ROUTED_HEADS = Scorer(kind="model_indexer", scan_heads="routed", num_routed_heads=8)  # MISA
ROUTED_HEADS_WITH_RESIDUAL = Scorer(  # ResMiSA
    kind="model_indexer", scan_heads="routed", num_routed_heads=8, residual=True
)


def every(num_layers: int, step: int, *, offset: int = 0) -> tuple[int, ...]:
    """Uniformly spaced full layers, beginning at `offset`."""
    return tuple(range(offset, num_layers, step))


def index_cache(
    num_layers: int, full_layers: Iterable[int], selection: Selection, *, scorer: Scorer | None = None
) -> LayerPlan:
    """Layers behind a full layer take its final indices; layers before the first full one are dense."""
    entry = _grouped(full_layers, "reuse")
    return _plan("index_cache", num_layers, entry, selection=selection, scorer=scorer or Scorer())


def wide_pool(
    num_layers: int, full_layers: Iterable[int], selection: Selection, *, scorer: Scorer | None = None
) -> LayerPlan:
    """A full layer lends its pool; every layer, itself included, rescores that pool with all of its heads.

    `selection.pool_size` is required. The scan that finds the pool fuses the heads unless `scorer` says
    otherwise.
    """
    scorer = scorer or Scorer(scan_heads="fused", rerank_heads="all")
    entry = _grouped(full_layers, "reindex")
    return _plan("wide_pool", num_layers, entry, selection=selection, scorer=scorer)


def _grouped(full_layers: Iterable[int], role: Role) -> Callable[[int], LayerEntry]:
    full = sorted(set(full_layers))

    def entry(layer: int) -> LayerEntry:
        anchor = _latest(full, layer)
        if anchor is None:
            return LayerEntry(layers=layer, role="dense")
        if anchor == layer:
            return LayerEntry(layers=layer, role="full")
        return LayerEntry(layers=layer, role=role, anchor=anchor)

    return entry


def csa2(
    num_layers: int,
    *,
    kv_sources: Sequence[int],
    index_sources: Sequence[int],
    candidate_source: int,
    selection: Selection,
    own_window: int = 128,
    scorer: Scorer = TRAINED_INDEXER,
    trained_sharing: bool = False,
) -> LayerPlan:
    """DeepSeek-V4.1: Full, Reindex and Reuse layers over a few KV sources, as its config names them.

    A KV source owns main KV and indexer keys. An index source scores; behind the candidate source it scores
    only inside that layer's pool. All others read the latest KV source by the latest index source's indices,
    and keep a sliding window of their own. Layers before the first source run the model's own attention.
    """
    kv, index = sorted(kv_sources), sorted(index_sources)

    def entry(layer: int) -> LayerEntry:
        owner, anchor = _latest(kv, layer), _latest(index, layer)
        if owner is None or anchor is None:
            return LayerEntry(layers=layer, role="dense")
        lent = None if owner == layer else owner
        window = 0 if lent is None else own_window
        if anchor != layer:
            return LayerEntry(layers=layer, role="reuse", anchor=anchor, kv_from=lent, own_window=window)
        pool = candidate_source if layer > candidate_source else None
        role: Role = "full" if pool is None else "reindex"
        return LayerEntry(
            layers=layer, role=role, anchor=pool, kv_from=lent, key_from=lent, own_window=window
        )

    model = ModelSpec(num_layers=num_layers, trained_sharing=trained_sharing)
    return _plan("csa2", num_layers, entry, selection=selection, scorer=scorer, model=model)


def hybrid_oracle(
    num_layers: int,
    oracle_layers: Iterable[int],
    selection: Selection,
    *,
    own_window: int,
    trained_sharing: bool = False,
) -> LayerPlan:
    """Oracle layers attend to everything, lend indices and KV; the rest add a local window of their own."""
    oracles = sorted(set(oracle_layers))

    def entry(layer: int) -> LayerEntry:
        anchor = _latest(oracles, layer)
        if anchor is None:
            return LayerEntry(layers=layer, role="dense")
        if anchor == layer:
            return LayerEntry(layers=layer, role="full", attend="all")
        return LayerEntry(layers=layer, role="reuse", anchor=anchor, kv_from=anchor, own_window=own_window)

    model = ModelSpec(num_layers=num_layers, trained_sharing=trained_sharing)
    return _plan("hybrid_oracle", num_layers, entry, selection=selection, scorer=Scorer(), model=model)


def yoco(num_layers: int, num_self_layers: int, *, trained_sharing: bool = False) -> LayerPlan:
    """The last self-decoder layer's KV is the only one that later layers read, densely."""
    last = num_self_layers - 1

    def entry(layer: int) -> LayerEntry:
        return LayerEntry(layers=layer, role="dense", kv_from=None if layer <= last else last)

    model = ModelSpec(num_layers=num_layers, trained_sharing=trained_sharing)
    return _plan("yoco", num_layers, entry, selection=None, scorer=Scorer(), model=model)


def clsa(
    num_layers: int,
    num_self_layers: int,
    selection: Selection,
    *,
    scorer: Scorer = TRAINED_INDEXER,
    trained_sharing: bool = False,
) -> LayerPlan:
    """YOCO with one routing: the first cross-decoder layer scores the shared KV, the others reuse that."""
    last, router = num_self_layers - 1, num_self_layers

    def entry(layer: int) -> LayerEntry:
        if layer <= last:
            return LayerEntry(layers=layer, role="dense")
        if layer == router:
            return LayerEntry(layers=layer, role="full", kv_from=last)
        return LayerEntry(layers=layer, role="reuse", anchor=router, kv_from=last)

    model = ModelSpec(num_layers=num_layers, trained_sharing=trained_sharing)
    return _plan("clsa", num_layers, entry, selection=selection, scorer=scorer, model=model)


def from_sglang_config(config: Mapping[str, Any], *, source: str = "config.json") -> LayerPlan:
    """The plan that SGLang runs for a DSA checkpoint, from its Hugging Face config as a mapping.

    The precedence is SGLang's (`dsa_layer_skips_topk`): `indexer_types`, `cli_factor`, `index_topk_pattern`,
    then `index_topk_freq` with `index_skip_topk_offset`. A list or pattern shorter than the model means full
    for the rest. A skipped layer reuses the latest layer that was not skipped. Where SGLang would start on a
    skipped layer and read a buffer nobody wrote, this raises `PlanError`.
    """
    for key in ("num_hidden_layers", "index_topk"):
        if not isinstance(config.get(key), int):
            rule = f"only a DSA config, with {key}, shares indices"
            raise PlanError(source, key, config.get(key), rule, "Pass the config of a DSA checkpoint")
    num_layers: int = config["num_hidden_layers"]
    key, skips = _sglang_rule(config, source)
    if skips(0):
        rule = "layer 0 would reuse indices that no layer has written"
        raise PlanError(source, key, config.get(key), rule, "Make layer 0 a full layer")
    full = [layer for layer in range(num_layers) if not skips(layer)]

    architectures = config.get("architectures") or [None]
    model = ModelSpec(architecture=architectures[0], num_layers=num_layers)
    selection = Selection(final_k=config["index_topk"], sink=0, window=0)
    entry = _grouped(full, "reuse")
    return _plan("sglang", num_layers, entry, selection=selection, scorer=TRAINED_INDEXER, model=model)


def _sglang_rule(config: Mapping[str, Any], source: str) -> tuple[str, Callable[[int], bool]]:
    """The key that decides, and whether a layer skips its own top-k by it."""
    types = config.get("indexer_types")
    if types is not None:
        return "indexer_types", lambda layer: layer < len(types) and types[layer] == "shared"
    factor = _positive(config, "cli_factor", source)
    if factor > 1:
        return "cli_factor", lambda layer: layer % factor != 0
    pattern = config.get("index_topk_pattern")
    if pattern is not None:
        return "index_topk_pattern", lambda layer: layer < len(pattern) and pattern[layer] == "S"
    freq = _positive(config, "index_topk_freq", source)
    # without an offset SGLang counts from layer 1, which is what an offset of 2 says
    offset = 2
    if config.get("index_skip_topk_offset") is not None:
        offset = _positive(config, "index_skip_topk_offset", source)
    return "index_topk_freq", lambda layer: max(layer - offset + 1, 0) % freq != 0


def _positive(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if value is None:
        return 1
    if not isinstance(value, int) or value < 1:
        raise PlanError(
            source, key, value, "SGLang accepts positive integers", f"Give {key} a value of at least 1"
        )
    return value


def _latest(layers: Sequence[int], layer: int) -> int | None:
    """The last of the sorted `layers` that is not behind `layer`; None if all are."""
    at = bisect_right(layers, layer)
    return layers[at - 1] if at else None


def _plan(
    name: str,
    num_layers: int,
    entry: Callable[[int], LayerEntry],
    *,
    selection: Selection | None,
    scorer: Scorer,
    model: ModelSpec | None = None,
) -> LayerPlan:
    spec = PlanSpec(
        version=1,
        name=name,
        model=model or ModelSpec(num_layers=num_layers),
        selection=selection,
        scorer=scorer,
        layers=[entry(layer) for layer in range(num_layers)],
        evidence="unproven",
    )
    return LayerPlan(spec=spec, source=f"preset {name}")
