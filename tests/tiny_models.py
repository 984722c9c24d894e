"""Tiny models with random weights, one family and one rotary scaling each, written as checkpoints.

Small enough that a server's start is all that a test of a family costs. Weights are scaled so that every
projection keeps unit variance: attention then depends on its keys, and an error shows in the logits.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from sglang_blockreuse.model import ensure_model

VOCAB = 512
NUM_LAYERS = 3
HEAD_DIM, NUM_HEADS, NUM_KV_HEADS = 32, 4, 2
# The scaled ropes begin at a context this long; tests move blocks across it.
ORIGINAL_CONTEXT = 256
CONTEXT = 1024

_GQA = {
    "vocab_size": VOCAB,
    "hidden_size": HEAD_DIM * NUM_HEADS,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": NUM_HEADS,
    "num_key_value_heads": NUM_KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class TinyModel:
    """A family by its Hugging Face name and what its configuration says beyond the common part."""

    family: str  # Hugging Face model_type
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)  # rope_parameters; empty: the family's default

    @property
    def wrong_rope_base(self) -> float:
        """What a rotation that knows no scaling would use; another base where there is no scaling to forget."""
        return 10_000.0 if "factor" in self.rope else 5_000.0

    def write(self, folder: Path, *, only_layer: int | None = None, seed: int = 0) -> Path:
        """Write configuration and float32 weights; no tokenizer, servers run with --skip-tokenizer-init.

        only_layer: attention adds something in this layer alone. Its keys and values then depend on token and
        position and on nothing else, and those of the other layers do not matter.
        """
        from transformers import AutoConfig, AutoModelForCausalLM

        common = dict(_GQA)
        if self.rope:
            common["rope_parameters"] = self.rope
        config = AutoConfig.for_model(self.family, **{**common, **self.config})
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config).float()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                _fill(name, weight, generator)
                if only_layer is not None and _is_output_projection(name) and f".{only_layer}." not in name:
                    weight.zero_()
        model.save_pretrained(folder)
        return folder


# The model of most servers in tests: SmolLM2's tokenizer and chat template, so that texts and chats work, and random
# weights, so that a prompt of 500 tokens costs milliseconds.
TALKING = TinyModel(
    "llama",
    {"vocab_size": 49_152, "num_hidden_layers": 6, "max_position_embeddings": 8192, "intermediate_size": 256},
)
TALKING_LAYERS = TALKING.config["num_hidden_layers"]


@functools.cache
def talking_model() -> Path:
    """Folder of TALKING, made once in a test run."""
    folder = Path(tempfile.mkdtemp(prefix="blockreuse-tiny-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    TALKING.write(folder)
    for file in ensure_model().iterdir():
        if "token" in file.name or file.suffix == ".jinja":
            shutil.copy(file, folder)
    return folder


def _fill(name: str, weight: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(weight.shape, generator=generator)
    if weight.dim() == 2:
        weight.copy_(noise * (1.0 if "embed" in name or "wte" in name else weight.shape[1] ** -0.5))
    else:
        weight.copy_(0.2 * noise + (0.0 if name.endswith("bias") else 1.0))


def _is_output_projection(name: str) -> bool:
    """Of attention, by the names that the families give it; its bias stays, which no token depends on."""
    return any(
        name.endswith(f"{projection}.weight")
        for projection in ("self_attn.o_proj", "self_attn.dense", "attn.out_proj")
    )


_PHI = {
    "partial_rotary_factor": 0.5,
    "num_key_value_heads": NUM_HEADS,
    "intermediate_size": 4 * HEAD_DIM * NUM_HEADS,
}
_GPTJ = {
    "n_embd": HEAD_DIM * NUM_HEADS,
    "n_layer": NUM_LAYERS,
    "n_head": NUM_HEADS,
    "n_positions": CONTEXT,
    "rotary_dim": HEAD_DIM // 2,
    "n_inner": None,
    "num_key_value_heads": NUM_HEADS,
}
_MISTRAL = {"max_position_embeddings": ORIGINAL_CONTEXT, "sliding_window": None, "head_dim": HEAD_DIM}
_GPT2 = {"n_embd": HEAD_DIM * NUM_HEADS, "n_layer": 2, "n_head": NUM_HEADS, "n_positions": CONTEXT}
_GEMMA3 = {"head_dim": HEAD_DIM, "sliding_window": 64, "num_hidden_layers": 2}
_MLA = {
    "num_key_value_heads": NUM_HEADS,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "first_k_dense_replace": NUM_LAYERS,
}


def _scaled(kind: str, **more: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10_000.0, "factor": 4.0, **more}


_ORIGINAL = {"original_max_position_embeddings": ORIGINAL_CONTEXT}
_MROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
_LONGROPE = (
    {"pad_token_id": 0, "original_max_position_embeddings": ORIGINAL_CONTEXT},
    {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "short_factor": [1.0] * (HEAD_DIM // 2),
        "long_factor": [2.0] * (HEAD_DIM // 2),
        **_ORIGINAL,
    },
)
_LLAMA3 = {**_ORIGINAL, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

# id -> model. Every family and every rope kind stands here once; the default Llama is the small real model
# of the other tests.
SUPPORTED: dict[str, TinyModel] = {
    "llama linear": TinyModel("llama", {"max_position_embeddings": ORIGINAL_CONTEXT}, _scaled("linear")),
    "llama llama3": TinyModel("llama", {}, _scaled("llama3", **_LLAMA3)),
    "mistral dynamic": TinyModel("mistral", _MISTRAL, _scaled("dynamic")),
    "qwen2 yarn": TinyModel("qwen2", {}, _scaled("yarn", **_ORIGINAL)),
    "qwen3 norms": TinyModel("qwen3", {"head_dim": HEAD_DIM}),
    "phi partial": TinyModel("phi", _PHI),
    "gptj layout": TinyModel("gptj", _GPTJ),
}

# id -> (model, what the server says as it stops)
REFUSED: dict[str, tuple[TinyModel, str]] = {
    "longrope": (TinyModel("phi3", _LONGROPE[0], _LONGROPE[1]), "Phi3LongRoPEScaledRotaryEmbedding"),
    "mrope": (TinyModel("llama", {}, _MROPE), "rotary embedding MRotaryEmbedding"),
    "learned positions": (TinyModel("gpt2", _GPT2), "GPT2LMHeadModel has no rotary embedding"),
    "sliding window": (TinyModel("gemma3_text", _GEMMA3), "a layer has a sliding window of 63"),
    "mla": (TinyModel("deepseek_v2", _MLA), "uses MLA attention"),
}
