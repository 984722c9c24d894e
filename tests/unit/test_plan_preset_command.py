"""`sglang-blockreuse plan preset`: what it writes loads, binds, is served, and computes what the scheme says."""

from __future__ import annotations

import json

import pytest
import torch
from sparse_world import World
from tolerances import KERNEL_OUT

from sglang_blockreuse.cli import main
from sglang_blockreuse.layers.plan import PlanError
from sglang_blockreuse.layers.plan_loader import load_plan, parse_plan
from sglang_blockreuse.layers.plan_support import unsupported_plan
from sglang_blockreuse.layers.preset_names import OPTIONS, PRESETS, UNSAID, Shape, named

NUM_LAYERS = 12
LETTERS = {"dense": "D", "full": "F", "reindex": "X", "reuse": "R"}
# role of each layer, and the layer whose KV it reads
EXPECTED = {
    "indexcache": ("FRRRFRRRFRRR", range(12)),
    "lisa": ("FFFFFFFFFFFF", range(12)),
    "lisa-dagger": ("FXXXFXXXFXXX", range(12)),
    "misa": ("FFFFFFFFFFFF", range(12)),
    "resmisa": ("FFFFFFFFFFFF", range(12)),
    "csa2": ("DDFRRRXRRRXR", (0, 1, *(2,) * 10)),
    "hysparse": ("FRRRFRRRFRRR", (0, 0, 0, 0, 4, 4, 4, 4, 8, 8, 8, 8)),
    "yoco": ("D" * 12, (0, 1, 2, 3, 4, 5, *(5,) * 6)),
    "clsa": ("DDDDDDFRRRRR", (0, 1, 2, 3, 4, 5, *(5,) * 6)),
}


def write(name, *words, capsys):
    status = main(["plan", "preset", name, *words])
    return status, *capsys.readouterr()


def shape_of(name, **choices):
    return Shape(num_layers=NUM_LAYERS, trained=PRESETS[name].trained_for is not None, **choices)


@pytest.mark.parametrize("name", PRESETS)
class TestEveryPreset:
    def test_what_it_writes_loads_and_binds_with_the_roles_of_the_scheme(self, name, tmp_path, capsys):
        words = ["--trained"] if PRESETS[name].trained_for else []
        status, out, _ = write(name, "--layers", str(NUM_LAYERS), *words, capsys=capsys)
        assert status == 0
        (tmp_path / "mine.yaml").write_text(out)
        bound = load_plan(tmp_path / "mine.yaml").bind(NUM_LAYERS, "LlamaForCausalLM")
        roles = "".join(LETTERS[layer.role] for layer in bound.layers)
        assert (roles, bound.kv_layers) == (EXPECTED[name][0], tuple(EXPECTED[name][1]))
        assert bound.warnings == ()
        assert out.startswith(f"# {PRESETS[name].what[:60]}")

    def test_a_server_computes_what_it_writes(self, name):
        bound = named(name, shape_of(name)).bind(NUM_LAYERS, None)
        assert list(unsupported_plan(bound, torch.zeros(4, 3, 64), 9)) == []

    @pytest.mark.parametrize("num_layers", [4, 5, 30, 61])
    def test_models_of_any_size_have_a_plan(self, name, num_layers):
        shape = Shape(num_layers=num_layers, trained=PRESETS[name].trained_for is not None)
        assert named(name, shape).bind(num_layers, None).num_layers == num_layers


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "yoco"])
def test_decode_under_a_preset_is_what_the_law_selects(name):
    """Three roles over shared KV and keys at once, a fused scan with a pool behind it, routed heads, oracles."""
    pool = {"pool_size": 140} if "pool_size" in PRESETS[name].options else {}
    plan = named(name, shape_of(name, final_k=96, **pool)).bind(NUM_LAYERS, None)
    world = World(plan, [300, 131])
    world.k, world.v = ([pools[source] for source in plan.kv_layers] for pools in (world.k, world.v))
    absolute, relative = KERNEL_OUT["cpu_attention", torch.float32]
    for got, expected in zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=absolute, rtol=relative)


def test_a_smaller_pool_is_seen_to_differ():
    """Negative control of the law above."""
    worlds = [
        World(named("lisa-dagger", shape_of("lisa-dagger", final_k=96, pool_size=size)).bind(12, None), [300])
        for size in (140, 97)
    ]
    got = worlds[0].run_all(worlds[0].decoder(strict=True))
    absolute, relative = KERNEL_OUT["cpu_attention", torch.float32]
    apart = [
        layer
        for layer, (one, other) in enumerate(zip(got, worlds[1].expected(), strict=True))
        if not torch.allclose(one.double(), other, atol=absolute, rtol=relative)
    ]
    assert len(apart) == NUM_LAYERS


class TestRefused:
    @pytest.mark.parametrize("name", [name for name in PRESETS if PRESETS[name].trained_for])
    def test_a_scheme_that_shares_kv_says_what_a_checkpoint_must_have_learned(self, name, capsys):
        status, out, err = write(name, "--layers", "12", capsys=capsys)
        assert (status, out) == (1, "")
        assert PRESETS[name].trained_for in err
        assert "--trained" in err
        assert "KV" in PRESETS[name].trained_for

    @pytest.mark.parametrize("name", [name for name in PRESETS if not PRESETS[name].trained_for])
    def test_the_others_share_no_kv_and_ask_for_nothing(self, name):
        bound = named(name, Shape(num_layers=NUM_LAYERS)).bind(NUM_LAYERS, None)
        assert bound.shared_layers == ()
        assert all(layer.key_from is None for layer in bound.layers)

    @pytest.mark.parametrize("name", UNSAID)
    def test_a_scheme_that_no_plan_can_say_is_refused_with_the_reason(self, name, capsys):
        assert UNSAID[name] in write(name, "--layers", "12", capsys=capsys)[2]

    @pytest.mark.parametrize("name", PRESETS)
    @pytest.mark.parametrize("option", OPTIONS)
    def test_a_choice_that_a_scheme_does_not_have(self, name, option):
        value = {"full": (0, 4), "kv": (0, 4), "pool_size": 500, "self_layers": 4, "routed_heads": 2}[option]
        shape = shape_of(name, **{option: value})
        if option in PRESETS[name].options:
            assert named(name, shape).fingerprint != named(name, shape_of(name)).fingerprint or value == (
                0,
                4,
            )
            return
        with pytest.raises(PlanError, match=f"--{option.replace('_', '-')}.*has no such choice"):
            named(name, shape)

    @pytest.mark.parametrize(
        ("words", "says"),
        [
            (["indexcach", "--layers", "12"], "Did you mean indexcache"),
            (["--layers", "12"], "one name of indexcache"),
            (["indexcache"], "--layers N or --model DIR"),
            (["indexcache", "--layers", "3"], "fewer than 4"),
            (
                ["indexcache", "--layers", "12", "--full", "0", "12"],
                "--full: got 12, but the model has 12 layers",
            ),
            (["yoco", "--trained", "--layers", "12", "--self-layers", "0"], "--self-layers: got 0"),
            (["csa2", "--trained", "--layers", "12", "--kv", "2", "40"], "--kv: got 40"),
            (["lisa-dagger", "--layers", "12", "--pool-size", "9"], "pool_size: got 9, but a pool smaller"),
            (["lisa-dagger", "--layers", "12", "--pool-size", "0"], "pool_size: got 0"),
            (["misa", "--layers", "12", "--routed-heads", "0"], "num_routed_heads: got 0"),
            (["lisa", "--layers", "12", "--trained"], "--trained: got True, but lisa asks nothing"),
        ],
    )
    def test_what_cannot_be_meant_is_a_message(self, words, says, capsys):
        assert main(["plan", "preset", *words]) == 1
        assert says in capsys.readouterr().err


class TestModel:
    @pytest.fixture
    def folder(self, tmp_path):
        config = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 16}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    def test_its_size_and_architecture_are_written(self, folder, capsys):
        plan = parse_plan(write("indexcache", "--model", folder, capsys=capsys)[1], "written.yaml")
        assert plan.spec.model.architecture == "LlamaForCausalLM"
        assert plan.spec.model.num_layers == 16

    def test_another_size_is_refused(self, folder, capsys):
        assert "--layers is 12" in write("indexcache", "--model", folder, "--layers", "12", capsys=capsys)[2]


def test_forty_layers_are_laid_out_as_deepseek_v4_1_is():
    """KV at 2, 8, 14 and 20, indices at those and at 24, 28, 32 and 36, pools of layer 20."""
    layers = named("csa2", Shape(num_layers=40, trained=True)).bind(40, None).layers
    assert [layer.layer for layer in layers[2:] if layer.kv_from is None] == [2, 8, 14, 20]
    assert [layer.layer for layer in layers if layer.role == "full"] == [2, 8, 14, 20]
    assert {layer.layer: layer.anchor for layer in layers if layer.role == "reindex"} == dict.fromkeys(
        (24, 28, 32, 36), 20
    )
