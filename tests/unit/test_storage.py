"""What names KV in storage: equal for equal models, another one for everything that changes a value."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from sglang_blockreuse.features_tiers import TIERS
from sglang_blockreuse.storage import identity, names_min_fetch


class Model(torch.nn.Module):
    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(64, 33).to(dtype))
        self.second = torch.nn.Parameter(torch.randn(7).to(dtype))
        self.register_buffer("cos_sin_cache", torch.randn(16, 8), persistent=False)
        self.register_buffer("workspace", torch.zeros(4), persistent=False)


def name_of(model: Model, *, dtype=torch.float32, layout="layer_first", **config) -> str:
    return identity(model, LlamaConfig(**config), kv_dtype=dtype, layout=layout)


def test_two_servers_of_one_model_share_a_name_wherever_its_files_lie():
    found = name_of(Model(), name_or_path="/a/folder")
    assert found == name_of(Model(), name_or_path="elsewhere")
    assert len(found) == 32
    assert int(found, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_one_bit_of_one_weight_changes_the_name(dtype):
    model = Model(dtype=dtype)
    before = name_of(model)
    bits = model.first.data.view(torch.int32 if dtype == torch.float32 else torch.int16)
    bits[41, 17] ^= 1
    assert name_of(model) != before


def test_two_weights_that_change_places_change_the_name():
    model = Model()
    before = name_of(model)
    first, second = model.first.data[3, 3].item(), model.first.data[50, 20].item()
    model.first.data[3, 3], model.first.data[50, 20] = second, first
    assert name_of(model) != before


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.bfloat16},
        {"layout": "page_first"},
        {"rms_norm_eps": 1e-5},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
    ],
    ids=lambda change: next(iter(change)),
)
def test_what_else_decides_values_changes_the_name(change):
    assert name_of(Model(), **change) != name_of(Model())


def test_another_rotary_table_changes_the_name_and_what_a_step_leaves_behind_does_not():
    model = Model()
    before = name_of(model)
    model.workspace += 1
    assert name_of(model) == before
    model.cos_sin_cache += 1e-3
    assert name_of(model) != before


def test_other_weights_of_the_same_shapes_have_another_name():
    assert name_of(Model(seed=0)) != name_of(Model(seed=1))


@pytest.mark.parametrize(
    ("config", "says"),
    [(None, False), ("", False), ('{"a": 1}', False), ('{"prefetch_threshold": 300}', True)],
)
def test_what_the_user_says_of_when_to_ask_storage_is_seen(config, says):
    assert names_min_fetch(config) is says


def test_it_is_seen_in_a_file_too(tmp_path):
    path = tmp_path / "store.toml"
    path.write_text("prefetch_threshold = 300\n")
    assert names_min_fetch(f"@{path}")


@pytest.mark.parametrize("backend", ["mooncake", "hf3fs", "dynamic"])
def test_a_backend_that_was_never_run_with_homes_is_not_attached(backend):
    from sglang_blockreuse.tiered_cache import TieredCache

    cache = object.__new__(TieredCache)  # nothing of it may be touched
    attached, why = cache.attach_storage_backend(backend)
    assert not attached
    assert f"--hicache-storage-backend {backend} was never run with document blocks" in why


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        ({"hicache_storage_backend": "mooncake"}, "never run with document blocks"),
        ({"hicache_host_memory_mode": "buffer_only"}, "no home is found in it"),
        ({}, None),
    ],
    ids=["backend", "buffer", "control"],
)
def test_a_server_of_tiers_that_cannot_work_does_not_start(monkeypatch, memory, why):
    from sglang.srt import runtime_context

    settings = {"hicache_storage_backend": "file", "hicache_host_memory_mode": "cache", **memory}
    monkeypatch.setattr(runtime_context, "get_memory", lambda: SimpleNamespace(**settings))
    ctx = SimpleNamespace(enable_hierarchical_cache=True)
    problems = [found(ctx) for name, found, _ in TIERS if "kv_from" not in name]
    assert [p for p in problems if p] == [] if why is None else why in " ".join(p or "" for p in problems)


def test_host_memory_is_refused_where_layers_share_kv():
    plan = SimpleNamespace(name="halves", shared_layers=(3,))
    backend = SimpleNamespace(layer_plan=plan)
    ctx = SimpleNamespace(
        enable_hierarchical_cache=True,
        tp_worker=SimpleNamespace(model_runner=SimpleNamespace(attn_backend=backend)),
    )
    (found,) = [found for name, found, _ in TIERS if "kv_from" in name]
    assert "halves" in found(ctx)
    plan.shared_layers = ()
    assert found(ctx) is None
