"""Which base a device gets, and what is refused on it before weights are loaded."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from sglang_blockreuse.config import BlocksConfig, Config, ConfigError, LayersConfig
from sglang_blockreuse.layers.bases import Machine, Model, base_of, require_served
from sglang_blockreuse.layers.plan import Scorer
from sglang_blockreuse.layers.plan_loader import load_plan

HOPPER, BLACKWELL = Machine("cuda", is_sm90=True), Machine("cuda", is_sm100=True)
AMPERE, CPU = Machine("cuda"), Machine("cpu")
LLAMA = Model(num_q_heads=32, num_kv_heads=8, head_dims=(128, 128), sliding_window=None, has_sinks=False)
CORRECTED = Config(blocks=BlocksConfig(alpha=-1.0))


@pytest.mark.parametrize(
    ("kernels", "machine", "base"),
    [
        ("auto", HOPPER, "fa3"),
        ("auto", BLACKWELL, "flashinfer"),
        ("auto", AMPERE, "triton"),
        ("triton", HOPPER, "triton"),
        ("triton", BLACKWELL, "triton"),
        ("flashinfer", HOPPER, "flashinfer"),
        ("auto", CPU, "cpu"),
        ("reference", CPU, "cpu"),
    ],
)
def test_auto_follows_the_device_and_a_choice_wins(kernels, machine, base):
    assert base_of(kernels, machine) == base


@pytest.mark.parametrize(
    ("kernels", "machine", "words"),
    [
        ("triton", CPU, "kernels is 'triton', but on the CPU it must be auto or reference"),
        ("reference", AMPERE, "kernels is 'reference', but on CUDA it must be auto, triton or flashinfer"),
        ("auto", Machine("xpu"), "device 'xpu' is not supported; supported: cpu, cuda"),
    ],
)
def test_a_choice_that_no_base_serves_is_refused_by_name(kernels, machine, words):
    with pytest.raises(ConfigError, match=words):
        base_of(kernels, machine)


def test_sglang_says_which_generation_a_device_is():
    pytest.importorskip("sglang")
    from sglang.srt.runtime_context import override_platform

    with override_platform(is_hopper_with_cuda_12_3=True, is_sm100=False):
        assert Machine.of("cuda:1") == HOPPER
    with override_platform(is_hopper_with_cuda_12_3=False, is_sm100=True):
        assert Machine.of("cuda") == BLACKWELL
    assert Machine.of("cpu") == CPU


@pytest.mark.parametrize("base", ["triton", "flashinfer", "fa3"])
def test_every_cuda_base_takes_a_plain_server_and_one_with_alpha_and_beta(base):
    require_served(Config(), None, base, LLAMA)
    require_served(CORRECTED, None, base, LLAMA)


@pytest.mark.parametrize(
    ("base", "changed", "words"),
    [
        ("triton", {"head_dims": (288, 288)}, "head dims up to 256"),
        ("flashinfer", {"head_dims": (80, 80)}, "FlashInfer adds alpha and beta for head dims 64, 128, 256"),
        ("fa3", {"num_q_heads": 128, "num_kv_heads": 1}, "up to 64 query heads per KV head"),
        ("triton", {"sliding_window": 4096}, "not computed within a sliding window"),
        ("fa3", {"has_sinks": True}, "own attention sinks"),
    ],
)
def test_a_model_that_alpha_and_beta_do_not_reach_is_refused_with_them_only(base, changed, words):
    model = dataclasses.replace(LLAMA, **changed)
    require_served(Config(), None, base, model)
    with pytest.raises(ConfigError, match=words):
        require_served(CORRECTED, None, base, model)


def test_flashinfer_with_a_sliding_window_is_refused_in_plain_words():
    model = dataclasses.replace(LLAMA, sliding_window=1024)
    with pytest.raises(ConfigError, match=r"sliding window of 1024.*kernels: triton"):
        require_served(Config(), None, "flashinfer", model)


def test_flashinfer_with_a_model_s_own_sinks_is_refused():
    model = dataclasses.replace(LLAMA, has_sinks=True)
    with pytest.raises(ConfigError, match=r"FlashInfer class ignores.*kernels: triton"):
        require_served(Config(), None, "flashinfer", model)


@pytest.mark.parametrize("base", ["triton", "flashinfer", "fa3"])
def test_a_layer_plan_is_served_and_its_clock_is_refused_before_weights_are_loaded(base):
    plan = load_plan("smollm2-135m-three-role").bind(30, "LlamaForCausalLM")
    require_served(Config(layers=LayersConfig(plan="smollm2-135m-three-role")), plan, base, LLAMA)
    config = Config(layers=LayersConfig(plan="smollm2-135m-three-role", timing=True))
    with pytest.raises(ConfigError, match=r"layers\.timing reads the host's clock"):
        require_served(config, plan, base, LLAMA)


@pytest.mark.parametrize(
    ("changed", "model", "words"),
    [
        ({"scorer": Scorer(kind="page_minmax")}, {}, "pages are handed out to rows on the host"),
        ({"scorer": Scorer(kind="learned")}, {}, "learned needs scorer.weights"),
        ({"scorer": Scorer(scan_heads="routed")}, {}, "routed heads are chosen"),
        ({"prefill": "sparse"}, {}, "set prefill: dense"),
        ({}, {"num_ranks": 2}, "2 tensor-parallel ranks.*set heads and lend_heads to kv_head"),
        ({}, {"sliding_window": 4096}, "a layer plan on CUDA is not computed within a sliding window"),
    ],
    ids=str,
)
def test_what_of_a_plan_only_the_cpu_serves_is_refused_by_name_and_with_the_reason(changed, model, words):
    plan = load_plan("smollm2-135m-three-role").bind(30, "LlamaForCausalLM")
    config = Config(layers=LayersConfig(plan="smollm2-135m-three-role"))
    with pytest.raises(ConfigError, match=words):
        require_served(config, replace(plan, **changed), "triton", dataclasses.replace(LLAMA, **model))


def test_every_reason_is_given_at_once():
    model = dataclasses.replace(LLAMA, head_dims=(288, 288), has_sinks=True)
    with pytest.raises(ConfigError, match=r"head dims.*sinks"):
        require_served(CORRECTED, None, "triton", model)


def test_a_setting_that_sglang_ties_to_names_of_backends_is_refused_in_words_of_ours(model_path):
    """SGLang's own message is a bare list of names that blockreuse does not stand in."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    flags = ("--model-path", str(model_path), "--enable-deterministic-inference")
    with pytest.raises(
        ConfigError, match=r"blockreuse cannot serve this model or setting.*Choose one of those"
    ):
        prepare_server_args([*flags, "--attention-backend", "blockreuse"]).resolve_once()
