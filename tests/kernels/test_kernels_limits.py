"""The limits calculator gives the numbers of a hand calculation for Llama-3.1-8B, k = 2048."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from places import ROOT


@pytest.fixture(scope="module")
def limits():
    spec = importlib.util.spec_from_file_location("limits", ROOT / "bench" / "limits.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["limits"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def llama(limits):
    return limits.Model(32, 8, 32, 128, weight_bytes=16.06e9)


# MB per row and step at 8K, 32K, 128K, 512K
EXPECTED = {
    "dense": (1074, 4295, 17180, 68719),
    "selected KV only": (268, 268, 268, 268),
    "exact keys, every layer full": (671, 2282, 8724, 34494),
    "exact keys, 1/4 full + reuse": (369, 772, 2382, 8825),
    "int4 keys, every layer full": (419, 872, 2684, 9932),
    "int4 keys, 1/4 full + reuse": (306, 419, 872, 2684),
    "int4 keys, 1/4 full + pool 8192": (419, 533, 986, 2798),
}


@pytest.mark.parametrize("name", EXPECTED)
def test_bytes_of_a_step(limits, llama, name):
    plan = next(plan for plan in limits.sample_plans(llama, 2048, 8192) if plan.name == name)
    contexts = (8192, 32768, 131072, 524288)
    assert tuple(round(limits.attention_bytes(llama, plan, c) / 1e6) for c in contexts) == EXPECTED[name]


def test_weights_bound_a_single_row(limits, llama):
    plan = next(p for p in limits.sample_plans(llama, 2048, 8192) if p.name == "int4 keys, 1/4 full + reuse")
    assert round(limits.speedup(llama, plan, 131072), 1) == 19.7
    assert round(limits.speedup(llama, plan, 131072, 1), 2) == 1.96
    assert round(limits.speedup(llama, plan, 131072, 16), 1) == 9.7


def test_a_scan_and_its_selection_cost_the_same_at_the_crossover(limits, llama):
    plan = next(p for p in limits.sample_plans(llama, 2048, 8192) if p.name == "exact keys, every layer full")
    assert limits.crossover(llama, plan) == 4096
    assert limits.int4_key_bytes(llama) == 576


def test_a_row_shorter_than_k_is_dense(limits, llama):
    for plan in limits.sample_plans(llama, 2048, 8192):
        assert limits.speedup(llama, plan, 2048) == 1.0


def test_a_plan_file_and_a_model_config_are_counted(limits, tmp_path):
    (tmp_path / "config.json").write_text(
        json.dumps(
            {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "num_hidden_layers": 12}
        )
    )
    model = limits.Model.from_config(tmp_path, 0.0)
    assert model == limits.Model(12, 3, 9, 64)
    file = tmp_path / "plan.yaml"
    file.write_text(
        "version: 1\nname: p\nselection: {final_k: 256, pool_size: 1024}\nscorer: {kind: int4_keys}\n"
        "layers: [{layers: 0-1, role: dense}, {layers: 2, role: full}, {layers: 3-6, role: reindex, anchor: 2},"
        " {layers: 7-11, role: reuse, anchor: 2}]\n"
    )
    assert limits.plan_from_file(str(file), model) == limits.Plan("p", 2, 1, 4, 5, 256, 1024, 120)
    file.write_text(file.read_text().replace("int4_keys", "label_channels"))
    with pytest.raises(ValueError, match=r"scorer\.kind: label_channels"):
        limits.plan_from_file(str(file), model)
    assert limits.plan_from_file("full", model) == limits.Plan("full", 12, 0, 0, 0, 0)


def test_the_plot_is_written(limits, llama, tmp_path):
    limits.plot(llama, limits.sample_plans(llama, 2048, 8192), tmp_path / "limits.png", 16)
    assert (tmp_path / "limits.png").stat().st_size > 10000
