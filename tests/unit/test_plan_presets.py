"""Published sharing schemes as plans, and SGLang's own keys read with SGLang's own meaning."""

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sglang.srt.configs.model_config import dsa_layer_skips_topk

from sglang_blockreuse.layers import presets
from sglang_blockreuse.layers.plan import PlanError, Selection
from sglang_blockreuse.layers.plan_loader import parse_plan

SELECTION = Selection(final_k=2048, pool_size=8192)
LETTERS = {"dense": "D", "full": "F", "reindex": "X", "reuse": "R"}


def roles(plan):
    return "".join(LETTERS[layer.role] for layer in bound(plan).layers)


def bound(plan):
    return plan.bind(plan.spec.model.num_layers, None)


def csa2(**changes):
    """DeepSeek-V4.1-Flash as its config names it."""
    sources = {
        "kv_sources": [2, 8, 14, 20],
        "index_sources": [2, 8, 14, 20, 24, 28, 32, 36],
        "candidate_source": 20,
    }
    return presets.csa2(40, **sources, selection=Selection(final_k=512, pool_size=16384), **changes)


ALL = [
    presets.index_cache(12, presets.every(12, 4), SELECTION),
    presets.wide_pool(12, [2, 6], SELECTION),
    csa2(),
    presets.hybrid_oracle(12, [0, 6], SELECTION, own_window=128),
    presets.yoco(8, 4),
    presets.clsa(8, 4, SELECTION),
]


@pytest.mark.parametrize("plan", ALL, ids=lambda plan: plan.name)
def test_a_preset_survives_as_a_file(plan):
    assert parse_plan(plan.to_yaml(), "written.yaml").fingerprint == plan.fingerprint


@pytest.mark.parametrize(
    ("plan", "expected"),
    zip(ALL, ["FRRRFRRRFRRR", "DDFXXXFXXXXX", "DDFRRRRRFRRRRRFRRRRRFRRRXRRRXRRRXRRRXRRR"], strict=False),
    ids=lambda value: getattr(value, "name", ""),
)
def test_roles_follow_the_published_pattern(plan, expected):
    assert roles(plan) == expected


def test_csa2_keeps_kv_and_keys_at_four_layers_and_pools_at_one():
    layers = bound(csa2()).layers
    assert [layer.layer for layer in layers[2:] if layer.kv_from is None] == [2, 8, 14, 20]
    assert {layer.layer: (layer.anchor, layer.key_from) for layer in layers if layer.role == "reindex"} == {
        24: (20, 20),
        28: (20, 20),
        32: (20, 20),
        36: (20, 20),
    }
    assert [layer.layer for layer in layers if layer.pool_readers] == [20]
    assert layers[27].anchor == 24


def test_a_wide_pool_is_scanned_coarsely_and_rescored_by_every_layer():
    scorer = presets.wide_pool(12, [2, 6], SELECTION).spec.scorer
    assert (scorer.scan_heads, scorer.rerank_heads) == ("fused", "all")
    assert scorer.reranks_own_pool


def test_an_oracle_attends_to_all_and_lends_indices_and_kv():
    oracle, reader, *_ = bound(presets.hybrid_oracle(12, [0, 6], SELECTION, own_window=128)).layers
    assert (oracle.role, oracle.attend) == ("full", "all")
    assert (reader.role, reader.anchor, reader.kv_from, reader.own_window) == ("reuse", 0, 0, 128)


def test_a_cross_decoder_has_one_kv_and_one_routing():
    layers = bound(presets.clsa(8, 4, SELECTION)).layers
    assert [layer.kv_from for layer in layers] == [None] * 4 + [3] * 4
    assert [layer.anchor for layer in layers] == [None] * 5 + [4] * 3


@pytest.mark.parametrize(
    "scorer",
    [presets.FUSED_HEADS, presets.ROUTED_HEADS, presets.ROUTED_HEADS_WITH_RESIDUAL],
    ids=["LISA", "MISA", "ResMiSA"],
)
def test_head_axis_scorers_combine_with_layer_sharing(scorer):
    plans = [
        presets.index_cache(8, [0, 4], SELECTION, scorer=kind) for kind in (presets.TRAINED_INDEXER, scorer)
    ]
    assert roles(plans[0]) == roles(plans[1])
    assert plans[0].fingerprint != plans[1].fingerprint


def test_only_a_checkpoint_trained_that_way_is_not_warned_about():
    assert len(bound(csa2()).warnings) == 2
    assert bound(csa2(trained_sharing=True)).warnings == ()


INDEX_KEYS = st.fixed_dictionaries(
    {"num_hidden_layers": st.integers(1, 24)},
    optional={
        "indexer_types": st.none() | st.lists(st.sampled_from(["full", "shared", "other"]), max_size=24),
        "cli_factor": st.none() | st.integers(1, 5),
        "index_topk_pattern": st.none() | st.text("FSX", max_size=24),
        "index_topk_freq": st.none() | st.integers(1, 6),
        "index_skip_topk_offset": st.none() | st.integers(1, 6),
    },
)


@given(keys=INDEX_KEYS)
def test_sglang_keys_mean_what_sglang_makes_of_them(keys):
    config = {"architectures": ["GlmMoeDsaForCausalLM"], "index_topk": 2048, **keys}
    skips = [
        dsa_layer_skips_topk(SimpleNamespace(**config), layer) for layer in range(keys["num_hidden_layers"])
    ]
    if skips[0]:
        # SGLang would run and read an unwritten buffer
        with pytest.raises(PlanError, match="layer 0 would reuse indices"):
            presets.from_sglang_config(config)
        return
    layers = presets.from_sglang_config(config).bind(len(skips), "GlmMoeDsaForCausalLM").layers
    assert [layer.role == "reuse" for layer in layers] == skips
    for layer in layers:
        if layer.role == "reuse":
            assert layer.anchor == max(i for i in range(layer.layer) if not skips[i])


def test_glm_5_2_has_21_full_layers_of_78():
    config = {"num_hidden_layers": 78, "index_topk": 2048, "index_topk_freq": 4, "index_skip_topk_offset": 3}
    pattern = roles(presets.from_sglang_config(config))
    assert pattern.startswith("FFFRRRFRRRF")
    assert (pattern.count("F"), pattern.count("R")) == (21, 57)


@pytest.mark.parametrize(
    ("config", "path"),
    [
        ({"num_hidden_layers": 4}, "index_topk"),
        ({"index_topk": 64}, "num_hidden_layers"),
        ({"num_hidden_layers": 4, "index_topk": 64, "index_topk_freq": 0}, "index_topk_freq"),
        ({"num_hidden_layers": 4, "index_topk": 64, "index_skip_topk_offset": 0}, "index_skip_topk_offset"),
        ({"num_hidden_layers": 4, "index_topk": 64, "index_topk_pattern": "SFFF"}, "index_topk_pattern"),
    ],
)
def test_a_config_that_cannot_be_read_is_refused_by_key(config, path):
    with pytest.raises(PlanError) as caught:
        presets.from_sglang_config(config)
    assert caught.value.path == path
