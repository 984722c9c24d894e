"""Valid layer plans for hypothesis, as parsed YAML."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

Raw = dict[str, Any]


@st.composite
def raw_plans(draw: st.DrawFn, every_role: bool = False) -> Raw:
    """A valid plan as parsed YAML. `every_role` starts it with one layer of each role, for corruptions to hit."""
    num_layers = draw(st.integers(5, 12) if every_role else st.integers(1, 12))
    sink, window = draw(st.integers(0, 8)), draw(st.integers(0, 64))
    final_k = sink + window + draw(st.integers(1, 512))
    selection: Raw = {
        "final_k": final_k,
        "sink": sink,
        "window": window,
        "min_seq_len": draw(st.integers(0, 4096)),
    }
    pool = every_role or draw(st.booleans())
    if pool:
        selection["pool_size"] = final_k + draw(st.integers(0, 4096))
    layers: list[Raw] = []
    if every_role:
        layers = [
            {"role": "dense"},
            {"role": "full"},
            {"role": "reindex", "anchor": 1},
            {"role": "reuse", "anchor": 1},
            {"role": "dense"},
        ]
    for layer in range(len(layers), num_layers):
        layers.append(_layer(draw, layer, layers, pool))
    is_sparse = any(words["role"] != "dense" for words in layers)
    return {
        "version": 1,
        "prefill": draw(st.sampled_from(["dense", "sparse"])) if is_sparse else "dense",
        "name": draw(st.text(st.characters(codec="ascii", categories=("L", "N")), min_size=1)),
        "model": {"num_layers": num_layers},
        "selection": selection,
        "scorer": draw(_scorers(pool)),
        "layers": _in_ranges(draw, layers),
    }


def _layer(draw: st.DrawFn, layer: int, before: list[Raw], pool: bool) -> Raw:
    full = [i for i, words in enumerate(before) if words["role"] == "full"]
    scoring = [i for i, words in enumerate(before) if words["role"] in ("full", "reindex")]
    roles = ["dense", "full"] + ["reuse"] * bool(scoring) + ["reindex"] * bool(full and pool)
    words: Raw = {"role": draw(st.sampled_from(roles))}
    if words["role"] in ("reuse", "reindex"):
        words["anchor"] = draw(st.sampled_from(full if words["role"] == "reindex" else scoring))
    owners = [i for i, other in enumerate(before) if "kv_from" not in other]
    if owners and draw(st.integers(0, 3)) == 0:
        words["kv_from"] = draw(st.sampled_from(owners))
        words["own_window"] = draw(st.integers(0, 32))
    keys = [i for i in scoring if "key_from" not in before[i]]
    if keys and words["role"] in ("full", "reindex") and draw(st.integers(0, 3)) == 0:
        words["key_from"] = draw(st.sampled_from(keys))
    if words["role"] == "full":
        words["attend"] = draw(st.sampled_from(["selected", "all"]))
    return words


@st.composite
def _scorers(draw: st.DrawFn, pool: bool) -> Raw:
    kinds = ["exact_qk", "int4_keys", "label_channels", "page_minmax", "learned", "model_indexer"]
    scorer: Raw = {"kind": draw(st.sampled_from(kinds)), "heads": draw(st.sampled_from(["layer", "kv_head"]))}
    if scorer["heads"] == "kv_head" and draw(st.booleans()):
        scorer["lend_heads"] = draw(st.sampled_from(["layer", "kv_head"]))
    if scorer["kind"] == "page_minmax":
        scorer["page_size"] = draw(st.integers(1, 64))
    if scorer["kind"] == "label_channels":
        scorer["num_channels"] = draw(st.integers(1, 64))
    if scorer["kind"] in ("label_channels", "learned") and draw(st.booleans()):
        scorer |= {"weights": "weights.safetensors", "weights_sha256": "0" * 64}
    scorer["scan_heads"] = draw(st.sampled_from(["all", "fused", "routed"]))
    if scorer["scan_heads"] == "routed":
        scorer |= {"num_routed_heads": draw(st.integers(1, 8)), "residual": draw(st.booleans())}
    if pool and draw(st.booleans()):
        scorer["rerank_heads"] = "all"
    return scorer


def _in_ranges(draw: st.DrawFn, layers: list[Raw]) -> list[Raw]:
    """Equal neighbours are sometimes written as one range, and entries stand in any order."""
    entries: list[Raw] = []
    first = 0
    for layer, words in enumerate(layers):
        last_of_run = layer + 1 == len(layers) or layers[layer + 1] != words or draw(st.booleans())
        if last_of_run:
            entries.append({"layers": layer if first == layer else f"{first}-{layer}", **words})
            first = layer + 1
    return draw(st.permutations(entries))
