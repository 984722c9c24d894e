"""The rules a layer plan must keep, and the expansion of its ranges to one record per layer.

Every rule raises `PlanError` with the path of the value that breaks it. Relations are checked layer by layer,
so the first error reported is about the earliest layer that cannot run.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import NoReturn

from msgspec import UNSET
from msgspec.structs import replace

from sglang_blockreuse.layers.plan import BoundLayer, LayerEntry, PlanError, PlanSpec, Scorer

# Far above any model; keeps a slip such as 0-9999999 from being expanded.
MAX_LAYERS = 1024
_RANGE = re.compile(r"(\d+)(?:\s*-\s*(\d+))?")


def resolve(spec: PlanSpec, source: str, num_layers: int | None) -> tuple[BoundLayer, ...]:
    """Check `spec` and return one record per layer.

    `num_layers` is the model's count, None while no model is known; a plan of `all` then has one layer.
    """
    _check_selection(spec, source)
    _check_scorer(spec, source)
    owner = _expand(spec, source, num_layers)
    _check_prefill(spec, source)
    layers = tuple(BoundLayer.from_entry(i, spec.layers[owner[i]], spec.selection) for i in range(len(owner)))
    _check_tails(spec, source)
    _check_first_sparse(layers, owner, source)
    for layer in layers:
        _LayerCheck(spec, source, layers, owner, layer).run()
    return _with_readers(layers)


def span(entry: LayerEntry) -> tuple[int, int] | None:
    """First and last layer of an entry, both included; None for `all`.

    Raises ValueError with the reason if the text is no range.
    """
    if entry.layers == "all":
        return None
    match = _RANGE.fullmatch(str(entry.layers).strip())
    if match is None:
        raise ValueError("layers are named by a number (2), a closed range (3-6) or all")
    first, last = int(match[1]), int(match[2] or match[1])
    if last < first:
        raise ValueError(f"a range runs upwards and {last} is below {first}")
    if last >= MAX_LAYERS:
        raise ValueError(f"layer numbers end at {MAX_LAYERS - 1}")
    return first, last


def _expand(spec: PlanSpec, source: str, num_layers: int | None) -> list[int]:
    """Index of the entry that names each layer, in layer order."""
    if not spec.layers:
        raise PlanError(source, "layers", [], "every layer needs a role", "Add {layers: all, role: dense}")
    count = spec.model.num_layers if num_layers is None else num_layers
    owner: dict[int, int] = {}
    for i, entry in enumerate(spec.layers):
        path = f"layers[{i}].layers"
        try:
            bounds = span(entry)
        except ValueError as error:
            raise PlanError(source, path, entry.layers, str(error), "Write for example layers: 3-6") from None
        if bounds is None:
            if len(spec.layers) > 1:
                rule = "all names every layer, so no other entry has a layer left"
                raise PlanError(source, path, "all", rule, "Replace all by the range that is meant")
            bounds = (0, (count or 1) - 1)
        for layer in range(bounds[0], bounds[1] + 1):
            if layer in owner:
                rule = f"layer {layer} is already named by layers[{owner[layer]}]"
                raise PlanError(source, path, entry.layers, rule, "Name every layer once")
            if count is not None and layer >= count:
                rule = f"the model has {count} layers (0..{count - 1})"
                raise PlanError(
                    source, path, entry.layers, rule, f"End at {count - 1} or pick this model's plan"
                )
            owner[layer] = i
    expected = max(owner) + 1 if count is None else count
    missing = [layer for layer in range(expected) if layer not in owner]
    if missing:
        rule = f"layer {missing[0]} has no role ({len(missing)} of {expected} layers are missing)"
        fix = f"Add {{layers: {missing[0]}, role: dense}} or extend a range"
        raise PlanError(source, "layers", f"{len(owner)} layers", rule, fix)
    return [owner[layer] for layer in range(expected)]


def _check_selection(spec: PlanSpec, source: str) -> None:
    selection = spec.selection
    if selection is None:
        for i, entry in enumerate(spec.layers):
            if entry.role != "dense":
                rule = f"layers[{i}] is {entry.role} and needs to know how many positions to read"
                raise PlanError(source, "selection", UNSET, rule, "Add selection: {final_k: 256}")
        return
    forced, k, pool = selection.sink + selection.window, selection.final_k, selection.pool_size
    if k <= forced:
        rule = f"its {selection.sink} sinks and {selection.window} window tokens leave nothing to choose"
        raise PlanError(
            source, "selection.final_k", k, rule, f"Give at least {forced + 1}, or less sink or window"
        )
    if selection.share is not None and not forced:
        rule = "a row without a position above it would have an empty list"
        raise PlanError(source, "selection.share", selection.share, rule, "Give at least 1 sink or window")
    if pool is not None and pool < k:
        rule = f"a pool smaller than final_k = {k} cannot fill the list"
        raise PlanError(
            source, "selection.pool_size", pool, rule, f"Give at least {k}; 2 to 4 times final_k is usual"
        )
    if selection.refresh_every > 1 and pool is None:
        rule = f"full layers live on their pool for {selection.refresh_every} steps and no pool size is set"
        raise PlanError(source, "selection.pool_size", UNSET, rule, f"Add pool_size, for example {4 * k}")
    for i, entry in enumerate(spec.layers):
        if entry.role == "reindex" and pool is None:
            rule = f"layers[{i}] reranks inside a pool and no pool size is set"
            raise PlanError(source, "selection.pool_size", UNSET, rule, f"Add pool_size, for example {2 * k}")


def _check_scorer(spec: PlanSpec, source: str) -> None:
    scorer = spec.scorer

    def refuse(field: str, rule: str, fix: str) -> NoReturn:
        value = getattr(scorer, field)
        raise PlanError(source, f"scorer.{field}", UNSET if value is None else value, rule, fix)

    for field, kinds in (("page_size", ("page_minmax",)), ("num_channels", ("label_channels", "learned"))):
        if getattr(scorer, field) is not None and scorer.kind not in kinds:
            refuse(
                field,
                f"only kind {' and '.join(kinds)} has it and the kind is {scorer.kind}",
                f"Remove it or set kind: {kinds[0]}",
            )
    if scorer.heads == "layer" and scorer.lend_heads == "kv_head":
        refuse("lend_heads", "a layer with one list has none per KV head to lend", "Set heads: kv_head")
    _check_weights(scorer, refuse)
    _check_routing(scorer, refuse)
    if scorer.rerank_heads is not None and (spec.selection is None or spec.selection.pool_size is None):
        refuse(
            "rerank_heads", "there is no pool to rerank in", "Add selection.pool_size or remove rerank_heads"
        )


def _check_weights(scorer: Scorer, refuse: Callable[[str, str, str], NoReturn]) -> None:
    if scorer.weights is not None and scorer.kind not in ("label_channels", "learned"):
        refuse("weights", f"kind {scorer.kind} learns nothing", "Remove it, or set kind: learned")
    if (scorer.weights is None) != (scorer.weights_sha256 is None):
        absent = "weights" if scorer.weights is None else "weights_sha256"
        refuse(absent, "a file and the digest of its content come together", f"Add {absent}")


def _check_routing(scorer: Scorer, refuse: Callable[[str, str, str], NoReturn]) -> None:
    routed = "routed" in (scorer.scan_heads, scorer.rerank_heads)
    if routed and scorer.num_routed_heads is None:
        refuse("num_routed_heads", "routed scoring chooses that many heads per query", "Add for example 8")
    if not routed and scorer.num_routed_heads is not None:
        refuse("num_routed_heads", "no pass is routed", "Remove it or set scan_heads: routed")
    if not routed and scorer.residual:
        refuse("residual", "only routed scoring leaves heads out", "Remove it or set scan_heads: routed")


def _check_prefill(spec: PlanSpec, source: str) -> None:
    if spec.prefill == "sparse" and all(entry.role == "dense" for entry in spec.layers):
        rule = "every layer is dense, so repair has nothing to select from"
        raise PlanError(source, "prefill", spec.prefill, rule, "Remove it, or give a layer the role full")


def _check_tails(spec: PlanSpec, source: str) -> None:
    for i, entry in enumerate(spec.layers):
        if entry.tail == "block_mean" and (entry.role == "dense" or entry.attend == "all"):
            rule = "its layers attend to everything, so nothing is left for a tail"
            raise PlanError(source, f"layers[{i}].tail", entry.tail, rule, "Remove it")


def _check_first_sparse(layers: tuple[BoundLayer, ...], owner: list[int], source: str) -> None:
    first = next((layer for layer in layers if layer.role != "dense"), None)
    if first is not None and first.role != "full":
        rule = f"layer {first.layer} is the first sparse layer and nothing before it writes a pool or indices"
        fix = f"Give layer {first.layer} the role full (or dense)"
        raise PlanError(source, f"layers[{owner[first.layer]}].role", first.role, rule, fix)


class _LayerCheck:
    """The relations of one layer to the layers it reads from."""

    def __init__(
        self, spec: PlanSpec, source: str, layers: tuple[BoundLayer, ...], owner: list[int], layer: BoundLayer
    ) -> None:
        self.spec, self.source, self.layers, self.layer = spec, source, layers, layer
        self.path = f"layers[{owner[layer.layer]}]"

    def run(self) -> None:
        self._check_anchor()
        self._check_kv_from()
        self._check_key_from()
        layer = self.layer
        if layer.attend == "all" and layer.role != "full":
            self._refuse(
                "attend", "only a full layer can attend to all and still write indices", "Remove attend"
            )
        if layer.own_window and layer.kv_from is None:
            self._refuse(
                "own_window", "a layer without kv_from keeps all of its own KV anyway", "Remove own_window"
            )

    def _refuse(self, field: str, rule: str, fix: str) -> NoReturn:
        value = getattr(self.layer, field)
        raise PlanError(self.source, f"{self.path}.{field}", UNSET if value is None else value, rule, fix)

    def _earlier(self, field: str, verb: str, fix: str) -> BoundLayer:
        """The layer that `field` names, refused unless it lies before this one."""
        at = self.layer.layer
        source: int = getattr(self.layer, field)
        if source >= at:
            before = f"0..{at - 1}" if at else "none: this is the first layer"
            self._refuse(field, f"layer {at} {verb} and its source must lie before it ({before})", fix)
        return self.layers[source]

    def _check_anchor(self) -> None:
        role, at, anchor = self.layer.role, self.layer.layer, self.layer.anchor
        if role in ("dense", "full"):
            if anchor is not None:
                fix = "Remove the anchor, or give the layer the role reindex or reuse"
                self._refuse("anchor", f"layer {at} is {role} and takes nothing from an anchor", fix)
            return
        takes = "pool" if role == "reindex" else "indices"
        if anchor is None:
            self._refuse(
                "anchor", f"layer {at} is {role} and needs the layer whose {takes} it takes", "Add anchor"
            )
        fix = f"Name an earlier full layer or give layer {at} the role full"
        source = self._earlier("anchor", f"takes the {takes} of its anchor", fix)
        if source.role == "full" or (role == "reuse" and source.role == "reindex"):
            return
        if source.anchor is not None:
            fix = f"Write anchor: {source.anchor}, the layer it takes its own from"
        self._refuse("anchor", f"layer {source.layer} is {source.role} and writes no {takes} of its own", fix)

    def _check_kv_from(self) -> None:
        if self.layer.kv_from is None:
            return
        source = self._earlier(
            "kv_from", "reads another layer's KV", "Name an earlier layer or remove kv_from"
        )
        if source.kv_from is not None:
            rule = f"layer {source.layer} keeps no KV of its own, it reads that of layer {source.kv_from}"
            self._refuse("kv_from", rule, f"Write kv_from: {source.kv_from}")

    def _check_key_from(self) -> None:
        layer = self.layer
        if layer.key_from is None:
            return
        if not layer.scores:
            self._refuse(
                "key_from", f"layer {layer.layer} is {layer.role} and scores nothing", "Remove key_from"
            )
        source = self._earlier(
            "key_from", "scores another layer's keys", "Name an earlier layer or remove key_from"
        )
        if not source.scores:
            rule = f"layer {source.layer} is {source.role} and keeps no indexer keys"
            self._refuse("key_from", rule, "Name an earlier full or reindex layer, or remove key_from")
        if source.key_from is not None:
            rule = (
                f"layer {source.layer} has no indexer keys of its own, only those of layer {source.key_from}"
            )
            self._refuse("key_from", rule, f"Write key_from: {source.key_from}")


def _with_readers(layers: tuple[BoundLayer, ...]) -> tuple[BoundLayer, ...]:
    pool: dict[int, list[int]] = {}
    indices: dict[int, list[int]] = {}
    for layer in layers:
        if layer.anchor is not None:
            readers = pool if layer.role == "reindex" else indices
            readers.setdefault(layer.anchor, []).append(layer.layer)
    return tuple(
        replace(
            layer,
            pool_readers=tuple(pool.get(layer.layer, ())),
            index_readers=tuple(indices.get(layer.layer, ())),
        )
        for layer in layers
    )
