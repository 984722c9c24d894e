"""Ways to spoil a valid layer plan, each at a place the error must name.

A plan from `raw_plans(every_role=True)` begins dense, full, reindex, reuse, dense; the corruptions rely on that.
"""

from __future__ import annotations

from collections.abc import Callable

from plan_strategies import Raw


def first_layer(entry: Raw) -> int:
    return int(str(entry["layers"]).split("-")[0])


def _find(raw: Raw, *roles: str, **present: bool) -> int:
    """Index of the entry that has one of the roles and the lowest layer, as rules are checked in layer order."""
    hits = [
        i
        for i, entry in enumerate(raw["layers"])
        if entry["role"] in roles and all((key in entry) == wanted for key, wanted in present.items())
    ]
    return min(hits, key=lambda i: first_layer(raw["layers"][i]))


def _set(raw: Raw, index: int, key: str, value: object) -> str:
    raw["layers"][index][key] = value
    return f"layers[{index}].{key}"


CORRUPTIONS: list[Callable[[Raw], str]] = []


def corruption(spoil: Callable[[Raw], str]) -> Callable[[Raw], str]:
    """Register a way to spoil a plan in place; it returns the path of the damage."""
    CORRUPTIONS.append(spoil)
    return spoil


@corruption
def unknown_key_in_an_entry(raw: Raw) -> str:
    return _set(raw, 0, "achor", 1)


@corruption
def unknown_key_in_a_section(raw: Raw) -> str:
    raw["selection"]["topk"] = 4
    return "selection.topk"


@corruption
def unknown_section(raw: Raw) -> str:
    raw["options"] = {}
    return "options"


@corruption
def newer_version(raw: Raw) -> str:
    raw["version"] = 2
    return "version"


@corruption
def unknown_role(raw: Raw) -> str:
    return _set(raw, 0, "role", "shared")


@corruption
def unknown_prefill(raw: Raw) -> str:
    raw["prefill"] = "full"
    return "prefill"


@corruption
def sparse_prefill_of_dense_layers(raw: Raw) -> str:
    raw["prefill"] = "sparse"
    raw["layers"] = [{"layers": "all", "role": "dense"}]
    return "prefill"


@corruption
def missing_role(raw: Raw) -> str:
    del raw["layers"][0]["role"]
    return "layers[0].role"


@corruption
def text_for_a_layer(raw: Raw) -> str:
    return _set(raw, _find(raw, "reuse"), "anchor", "one")


@corruption
def negative_layer(raw: Raw) -> str:
    return _set(raw, _find(raw, "reuse"), "anchor", -1)


@corruption
def range_that_runs_down(raw: Raw) -> str:
    return _set(raw, 0, "layers", "3-1")


@corruption
def range_in_words(raw: Raw) -> str:
    return _set(raw, 0, "layers", "the first three")


@corruption
def layer_named_twice(raw: Raw) -> str:
    raw["layers"].append({"layers": 0, "role": "dense"})
    return f"layers[{len(raw['layers']) - 1}].layers"


@corruption
def layer_left_out(raw: Raw) -> str:
    del raw["layers"][0]
    return "layers"


@corruption
def layer_beyond_the_model(raw: Raw) -> str:
    raw["layers"].append({"layers": raw["model"]["num_layers"], "role": "dense"})
    return f"layers[{len(raw['layers']) - 1}].layers"


@corruption
def all_beside_others(raw: Raw) -> str:
    raw["layers"].insert(0, {"layers": "all", "role": "dense"})
    return "layers[0].layers"


@corruption
def no_layers(raw: Raw) -> str:
    raw["layers"] = []
    return "layers"


@corruption
def first_sparse_layer_not_full(raw: Raw) -> str:
    index = _find(raw, "full", "reindex", "reuse")
    raw["layers"][index]["anchor"] = 0
    return _set(raw, index, "role", "reuse")


@corruption
def anchor_after_its_consumer(raw: Raw) -> str:
    return _set(raw, _find(raw, "reindex"), "anchor", raw["model"]["num_layers"] - 1)


@corruption
def anchor_on_itself(raw: Raw) -> str:
    index = _find(raw, "reuse")
    return _set(raw, index, "anchor", first_layer(raw["layers"][index]))


@corruption
def anchor_left_out(raw: Raw) -> str:
    index = _find(raw, "reuse")
    del raw["layers"][index]["anchor"]
    return f"layers[{index}].anchor"


@corruption
def anchor_on_a_dense_layer(raw: Raw) -> str:
    return _set(raw, _find(raw, "dense"), "anchor", 0)


@corruption
def indices_of_a_dense_anchor(raw: Raw) -> str:
    return _set(raw, _find(raw, "reuse"), "anchor", 0)


@corruption
def pool_of_a_dense_anchor(raw: Raw) -> str:
    return _set(raw, _find(raw, "reindex"), "anchor", 0)


@corruption
def pool_of_a_reindex_anchor(raw: Raw) -> str:
    index = next(i for i, entry in enumerate(raw["layers"]) if str(entry["layers"]) == "3")
    raw["layers"][index]["role"] = "reindex"
    return _set(raw, index, "anchor", 2)


@corruption
def indices_of_a_reuse_anchor(raw: Raw) -> str:
    index = next(i for i, entry in enumerate(raw["layers"]) if first_layer(entry) == 4)
    raw["layers"][index]["role"] = "reuse"
    return _set(raw, index, "anchor", 3)


@corruption
def reindex_without_a_pool(raw: Raw) -> str:
    del raw["selection"]["pool_size"]
    return "selection.pool_size"


@corruption
def pool_below_k(raw: Raw) -> str:
    raw["selection"]["pool_size"] = raw["selection"]["final_k"] - 1
    return "selection.pool_size"


@corruption
def k_of_zero(raw: Raw) -> str:
    raw["selection"]["final_k"] = 0
    return "selection.final_k"


@corruption
def k_used_up_by_sinks_and_window(raw: Raw) -> str:
    raw["selection"]["sink"] = raw["selection"]["final_k"] - raw["selection"]["window"]
    return "selection.final_k"


@corruption
def sparse_without_a_selection(raw: Raw) -> str:
    del raw["selection"]
    return "selection"


@corruption
def kv_from_a_later_layer(raw: Raw) -> str:
    return _set(raw, _find(raw, "dense", kv_from=False), "kv_from", raw["model"]["num_layers"] - 1)


@corruption
def kv_from_a_layer_without_its_own(raw: Raw) -> str:
    for layer, source in ((2, 0), (3, 2)):
        index = next(i for i, entry in enumerate(raw["layers"]) if str(entry["layers"]) == str(layer))
        raw["layers"][index]["kv_from"] = source
    return f"layers[{index}].kv_from"


@corruption
def keys_for_a_layer_that_scores_nothing(raw: Raw) -> str:
    return _set(raw, _find(raw, "reuse"), "key_from", 1)


@corruption
def keys_of_a_layer_that_scores_nothing(raw: Raw) -> str:
    return _set(raw, _find(raw, "reindex"), "key_from", 0)


@corruption
def own_window_without_shared_kv(raw: Raw) -> str:
    return _set(raw, _find(raw, "dense", kv_from=False), "own_window", 16)


@corruption
def oracle_that_is_not_full(raw: Raw) -> str:
    return _set(raw, _find(raw, "reuse"), "attend", "all")


@corruption
def page_size_of_another_scorer(raw: Raw) -> str:
    raw["scorer"] = {"kind": "int4_keys", "page_size": 16}
    return "scorer.page_size"


@corruption
def lists_lent_that_a_layer_does_not_have(raw: Raw) -> str:
    raw["scorer"] = {"heads": "layer", "lend_heads": "kv_head"}
    return "scorer.lend_heads"


@corruption
def routing_without_a_number(raw: Raw) -> str:
    raw["scorer"] = {"scan_heads": "routed"}
    return "scorer.num_routed_heads"


@corruption
def residual_without_routing(raw: Raw) -> str:
    raw["scorer"] = {"scan_heads": "fused", "residual": True}
    return "scorer.residual"


@corruption
def number_of_routed_heads_without_routing(raw: Raw) -> str:
    raw["scorer"] = {"scan_heads": "fused", "num_routed_heads": 8}
    return "scorer.num_routed_heads"


@corruption
def weights_of_a_scorer_that_learns_nothing(raw: Raw) -> str:
    raw["scorer"] = {"kind": "int4_keys", "weights": "w.safetensors", "weights_sha256": "0" * 64}
    return "scorer.weights"


@corruption
def weights_without_their_digest(raw: Raw) -> str:
    raw["scorer"] = {"kind": "learned", "weights": "w.safetensors"}
    return "scorer.weights_sha256"


@corruption
def rerank_without_a_pool(raw: Raw) -> str:
    raw["layers"] = [{"layers": "all", "role": "full"}]
    raw["scorer"] = {"scan_heads": "fused", "rerank_heads": "all"}
    del raw["selection"]["pool_size"]
    return "scorer.rerank_heads"


@corruption
def keys_of_a_layer_without_its_own(raw: Raw) -> str:
    for layer, source in ((2, 1), (3, 2)):
        index = next(i for i, entry in enumerate(raw["layers"]) if str(entry["layers"]) == str(layer))
        raw["layers"][index] |= {"role": "reindex", "anchor": 1, "key_from": source}
    return f"layers[{index}].key_from"
