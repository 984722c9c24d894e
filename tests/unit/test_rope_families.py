"""The rotary self-test on layers of the host's own families, in this process: what each does with its keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import sglang  # noqa: F401  settles the platform before its layers are imported
import torch
from transformers import AutoConfig

from sglang_blockreuse.blocks.rope import UnsupportedRope, find_ropes
from sglang_blockreuse.server_process import HOST, free_port

GQA = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
}
HYBRID = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16}
SIZES = {"hidden_size": 64, "num_heads": 4, "num_kv_heads": 2}


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    """What the host's layers ask for when they are built."""
    from sglang.srt.distributed import parallel_state
    from sglang.srt.runtime_context import reset_context
    from sglang.test.test_utils import publish_build_topology

    publish_build_topology(device="cpu")
    parallel_state.init_distributed_environment(
        world_size=1,
        rank=0,
        local_rank=0,
        distributed_init_method=f"tcp://{HOST}:{free_port()}",
        backend="gloo",
    )
    parallel_state.initialize_model_parallel()
    with torch.no_grad():
        yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    reset_context()


def model_of(*layers) -> torch.nn.Module:
    model = torch.nn.ModuleList(layers)
    generator = torch.Generator().manual_seed(0)
    for weight in model.parameters():
        weight.copy_(torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5)
    return model


def cohere2(at):
    from sglang.srt.models.commandr import CohereAttention

    return CohereAttention(AutoConfig.for_model("cohere2", **GQA, **HYBRID), layer_id=at)


def exaone4(at):
    from sglang.srt.models.exaone4 import Exaone4Attention

    config = AutoConfig.for_model("exaone4", **GQA, **HYBRID, sliding_window_pattern="LG")
    return Exaone4Attention(config, **SIZES, layer_id=at)


def llama(at):
    from sglang.srt.models.llama import LlamaAttention

    return LlamaAttention(AutoConfig.for_model("llama", **GQA), **SIZES, layer_id=at)


def qwen3_moe(at):
    from sglang.srt.models.qwen3_moe import Qwen3MoeAttention

    return Qwen3MoeAttention(**SIZES, layer_id=at, head_dim=16, max_position_embeddings=512)


def gemma3(at):
    from sglang.srt.models.gemma3_causal import Gemma3Attention

    config = AutoConfig.for_model("gemma3_text", **GQA, **HYBRID, head_dim=16)
    return Gemma3Attention(at, config, max_position_embeddings=512)


@pytest.mark.parametrize("layer", [cohere2, exaone4])
def test_layers_that_own_a_rotary_embedding_and_do_not_use_it_keep_their_keys(layer):
    turned, still = find_ropes(model_of(layer(0), layer(1)), 2)
    assert (turned.layers, still.layers, still.name) == ((0,), (1,), "none")
    assert still.table is None


@pytest.mark.parametrize("layer", [llama, qwen3_moe])
def test_layers_that_turn_their_keys_are_served_and_a_wrong_table_is_detected(layer):
    """The second reads the pool of the server around it."""
    backend = SimpleNamespace(token_to_kv_pool=SimpleNamespace(dtype=torch.float32))
    model = model_of(layer(0), layer(1))
    (group,) = find_ropes(model, 2, attn_backend=backend)
    assert group.layers == (0, 1)
    forward = type(model[1]).forward
    model[1].forward = lambda positions, hidden_states, forward_batch: forward(
        model[1], positions // 8, hidden_states, forward_batch
    )
    with pytest.raises(UnsupportedRope, match=r"layer 1 .* encodes positions in another way"):
        find_ropes(model, 2, attn_backend=backend)


def test_a_layer_that_takes_cos_and_sin_from_the_model_is_refused_by_name():
    """Its own rotary embedding need not be the one: in Gemma 3 the model's may carry a factor."""
    with pytest.raises(
        UnsupportedRope, match=r"layer 0 \(Gemma3Attention\) could not be run alone .*position_embeddings"
    ):
        find_ropes(model_of(gemma3(0), gemma3(1)), 2)
