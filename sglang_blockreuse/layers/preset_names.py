"""Sharing schemes by the names of their papers: from a model's shape to a plan that a server runs.

    named("indexcache", Shape(num_layers=30))           # any checkpoint: calibrate it
    named("yoco", Shape(num_layers=30, trained=True))   # refused without `trained`

A scheme whose layers read another layer's KV is the model only for a checkpoint that was trained so. Without that
promise it is refused, with what the checkpoint must have learned. What a paper has and no server of this project runs
(an indexer of the model's own, a window of a layer's own keys) is left out and told in `Preset.differs`; scores
are those of the model's own queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches

import msgspec

from . import presets
from .plan import ModelSpec, PlanError, Scorer, Selection
from .plan_loader import LayerPlan, parse_plan

_EXACT = Scorer()
OPTIONS = ("pool_size", "full", "kv", "self_layers", "routed_heads")
_MIN_LAYERS = 4  # half of the model keeps KV of its own, and a group that shares has two layers


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model's shape and what a user chooses of a scheme; None: the scheme's own choice."""

    num_layers: int
    architecture: str | None = None
    final_k: int = 256
    pool_size: int | None = None  # four times final_k
    full: tuple[int, ...] | None = None  # layers that choose for others; csa2: beside those of `kv`
    kv: tuple[int, ...] | None = None  # layers whose KV the others read
    self_layers: int | None = None  # leading layers with KV of their own: half of the model
    routed_heads: int | None = None  # query heads that score for all
    trained: bool = False  # the checkpoint was trained for the scheme

    def full_or_every(self, step: int) -> tuple[int, ...]:
        return self.full or presets.every(self.num_layers, step)

    def num_self_layers(self) -> int:
        return self.num_layers // 2 if self.self_layers is None else self.self_layers

    def selection(self, *, pool: bool = False) -> Selection:
        size = 4 * self.final_k if self.pool_size is None else self.pool_size
        return Selection(final_k=self.final_k, pool_size=size if pool else None)


@dataclass(frozen=True, kw_only=True)
class Preset:
    """One scheme, and what of a `Shape` it heeds beside the model."""

    what: str
    options: tuple[str, ...]
    build: Callable[[Shape], LayerPlan]
    trained_for: str | None = None  # what a checkpoint must have learned; None: any will do
    differs: str | None = None  # what the paper has and the plan has not


def named(name: str, shape: Shape) -> LayerPlan:
    """The plan of a scheme for a model. Raises PlanError for a name that no plan can say, an option that the scheme
    does not have, a shape that it does not fit, and a checkpoint of which it asks more."""
    preset, source = known(name), f"preset {name}"
    if shape.num_layers < _MIN_LAYERS:
        rule = f"layers share in groups, and a model of fewer than {_MIN_LAYERS} has none"
        raise PlanError(source, "--layers", shape.num_layers, rule, "Give the number of the model's layers")
    _check_options(name, preset, shape)
    if preset.trained_for is not None and not shape.trained:
        rule = f"a checkpoint must have been trained for it: {preset.trained_for}"
        fix = (
            "Say --trained for one that was. For any other take indexcache or lisa-dagger, which share no KV"
        )
        raise PlanError(source, "--trained", False, rule, fix)
    if preset.trained_for is None and shape.trained:
        rule = f"{name} asks nothing of a checkpoint and shares no KV"
        raise PlanError(source, "--trained", True, rule, "Leave --trained out")
    model = ModelSpec(
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        trained_sharing=preset.trained_for is not None,
    )
    plan = LayerPlan(msgspec.structs.replace(preset.build(shape).spec, name=name, model=model), source)
    return parse_plan(plan.to_yaml(), source)  # read back as a user's file is, every value checked


def known(name: str) -> Preset:
    """The scheme of this name. Raises PlanError."""
    if name in UNSAID:
        fix = f"Take one of {', '.join(PRESETS)}"
        raise PlanError("plan preset", "", name, f"a plan cannot say it: {UNSAID[name]}", fix)
    if name not in PRESETS:
        close = get_close_matches(name, PRESETS, n=1)
        fix = f"Did you mean {close[0]}" if close else "Give one of these names"
        raise PlanError("plan preset", "", name, f"known are {', '.join(PRESETS)}", fix)
    return PRESETS[name]


def _check_options(name: str, preset: Preset, shape: Shape) -> None:
    for option in OPTIONS:
        value, flag = getattr(shape, option), _flag(option)
        if value is not None and option not in preset.options:
            rule = f"{name} has no such choice; it has {', '.join(map(_flag, preset.options))}"
            raise PlanError(f"preset {name}", flag, value, rule, f"Leave {flag} out")
    _check_layers(name, "full", shape.full or (), 0, shape)
    _check_layers(name, "kv", shape.kv or (), 0, shape)
    _check_layers(name, "self_layers", (shape.num_self_layers(),), 1, shape)


def _check_layers(name: str, option: str, given: tuple[int, ...], first: int, shape: Shape) -> None:
    for layer in given:
        if not first <= layer < shape.num_layers:
            rule = f"the model has {shape.num_layers} layers"
            fix = f"Give {first} to {shape.num_layers - 1}"
            raise PlanError(f"preset {name}", _flag(option), layer, rule, fix)


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"


def _index_cache(shape: Shape) -> LayerPlan:
    return presets.index_cache(shape.num_layers, shape.full_or_every(4), shape.selection())


def _heads(scorer: Callable[[int], Scorer]) -> Callable[[Shape], LayerPlan]:
    """Every layer scans by a few heads; with `full`, the others follow."""

    def build(shape: Shape) -> LayerPlan:
        chosen = scorer(8 if shape.routed_heads is None else shape.routed_heads)
        return presets.index_cache(shape.num_layers, shape.full_or_every(1), shape.selection(), scorer=chosen)

    return build


def _wide_pool(shape: Shape) -> LayerPlan:
    return presets.wide_pool(shape.num_layers, shape.full_or_every(4), shape.selection(pool=True))


def _csa2(shape: Shape) -> LayerPlan:
    """As the 40 layers of DeepSeek-V4.1-Flash are laid out: KV sources in the first half, one pool behind them."""
    kv = shape.kv or tuple(range(2, shape.num_layers // 2 + 1, 6))
    index = {*kv, *(shape.full or range(max(kv) + 4, shape.num_layers, 4))}
    return presets.csa2(
        shape.num_layers,
        kv_sources=kv,
        index_sources=sorted(index),
        candidate_source=max(kv),
        selection=shape.selection(pool=True),
        own_window=0,
        scorer=_EXACT,
    )


def _hysparse(shape: Shape) -> LayerPlan:
    return presets.hybrid_oracle(shape.num_layers, shape.full_or_every(4), shape.selection(), own_window=0)


def _yoco(shape: Shape) -> LayerPlan:
    return presets.yoco(shape.num_layers, shape.num_self_layers())


def _clsa(shape: Shape) -> LayerPlan:
    return presets.clsa(shape.num_layers, shape.num_self_layers(), shape.selection(), scorer=_EXACT)


def _routed(num: int, *, residual: bool = False) -> Scorer:
    return Scorer(scan_heads="routed", num_routed_heads=num, residual=residual)


_NO_INDEXER = "the paper scores with the model's own indexer, this plan with its queries and keys"
_NO_WINDOW = (
    "each layer of the paper keeps a window of its own KV beside the shared one, those of this plan do not"
)

PRESETS = {
    "indexcache": Preset(
        what="full layers lend their final indices (IndexCache, arXiv 2603.12201)",
        options=("full",),
        build=_index_cache,
        differs=_NO_INDEXER,
    ),
    "lisa": Preset(
        what="one fused query scores for all heads of a KV head (LISA)",
        options=("full",),
        build=_heads(lambda num: Scorer(scan_heads="fused")),
        differs=f"{_NO_INDEXER}, and without the paper's residual",
    ),
    "lisa-dagger": Preset(
        what="a full layer lends a wide pool, every layer ranks it with all heads (LISA‡)",
        options=("full", "pool_size"),
        build=_wide_pool,
        differs=f"{_NO_INDEXER}; the pool is the best M, not what passes a threshold",
    ),
    "misa": Preset(
        what="a few heads, chosen for each query, score for all (MISA, arXiv 2605.07363)",
        options=("full", "routed_heads"),
        build=_heads(_routed),
        differs=f"{_NO_INDEXER}; heads are chosen by a sample of keys, not by a trained router",
    ),
    "resmisa": Preset(
        what="routed heads, and the mean of the others beside them (ResMiSA)",
        options=("full", "routed_heads"),
        build=_heads(lambda num: _routed(num, residual=True)),
        differs=f"{_NO_INDEXER}; heads are chosen by a sample of keys, not by a trained router",
    ),
    "csa2": Preset(
        what="full, reindex and reuse layers over the KV and keys of a few (CSA2, arXiv 2609.19969)",
        options=("full", "kv", "pool_size"),
        build=_csa2,
        trained_for="layers attend to the KV of a few source layers and to none of their own",
        differs=f"{_NO_INDEXER}; {_NO_WINDOW}",
    ),
    "hysparse": Preset(
        what="dense layers lend indices and KV to the sparse ones behind them (HySparse, arXiv 2602.03560)",
        options=("full",),
        build=_hysparse,
        trained_for="sparse layers attend to the KV of the dense layer before them and to none of their own",
        differs=_NO_WINDOW,
    ),
    "yoco": Preset(
        what="the second half of the model reads one KV, that of the first half's last layer (YOCO, arXiv 2405.05254)",
        options=("self_layers",),
        build=_yoco,
        trained_for="all cross-decoder layers attend to one layer's KV",
        differs="the paper's self-decoder attends to a window or a state; here it is the model's own attention",
    ),
    "clsa": Preset(
        what="one KV and one routing for all cross-decoder layers (CLSA, arXiv 2606.06467)",
        options=("self_layers",),
        build=_clsa,
        trained_for="all cross-decoder layers attend to one layer's KV, at the positions that one of them chose",
        differs=_NO_INDEXER,
    ),
}

# schemes that the format has no words for
UNSAID = {
    "csa": "one cache entry stands for several tokens, made by weights of the model, and a pool here has one per token",
    "hca": "one cache entry stands for many tokens, made by weights of the model, and a pool here has one per token",
    "hysparse2": "it joins a self-decoder and a cross-decoder, whose KV is bridged by weights of the model",
}
