"""A Llama model as plain matrices in float32: what calibration needs, nothing else.

Dims: N tokens, Q query heads, H KV heads, D head dim, C hidden size, L layers
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class UnsupportedModel(ValueError):
    """The folder holds a model that calibration would compute wrongly."""


class Llama:
    """Weights of a folder with config.json and *.safetensors. Raises UnsupportedModel."""

    def __init__(self, folder: Path) -> None:
        if not (folder / "config.json").is_file():
            raise UnsupportedModel(
                f"{folder}: there is no config.json. Give the folder of a model, see `sglang-blockreuse model --path`."
            )
        config = json.loads((folder / "config.json").read_text())
        _check(config, folder)
        self.config = config
        self.architecture: str = config["architectures"][0]
        self.num_layers: int = config["num_hidden_layers"]
        self.num_q_heads: int = config["num_attention_heads"]
        self.num_kv_heads: int = config["num_key_value_heads"]
        self.head_dim: int = config.get("head_dim") or config["hidden_size"] // self.num_q_heads
        self._epsilon: float = config["rms_norm_eps"]
        self._weights = _load(folder)
        embedding = self._weights["model.embed_tokens.weight"]
        self._head = self._weights.get("lm_head.weight", embedding)
        half = torch.arange(0, self.head_dim, 2, dtype=torch.float64) / self.head_dim
        self._frequencies = _rope(config)["rope_theta"] ** -half

    def embed(self, ids_N: Tensor) -> Tensor:
        """[N, C]"""
        return self._weights["model.embed_tokens.weight"][ids_N]

    def qkv(self, layer: int, hidden_NC: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries [Q, N, D], rotated keys [H, N, D] and values [H, N, D]."""
        x = self._norm(hidden_NC, layer, "input_layernorm")
        q, k, v = (
            F.linear(x, self._of(layer, f"self_attn.{name}_proj"))
            .unflatten(-1, (-1, self.head_dim))
            .transpose(0, 1)
            for name in "qkv"
        )
        angles = positions_N.double()[:, None] * self._frequencies
        cos, sin = angles.cos().float(), angles.sin().float()
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, layer: int, hidden_NC: Tensor, attention_QND: Tensor) -> Tensor:
        """The layer's output from its input and the attention of its heads."""
        mixed = attention_QND.transpose(0, 1).flatten(1)
        hidden_NC = hidden_NC + F.linear(mixed, self._of(layer, "self_attn.o_proj"))
        x = self._norm(hidden_NC, layer, "post_attention_layernorm")
        gate = F.silu(F.linear(x, self._of(layer, "mlp.gate_proj")))
        up = F.linear(x, self._of(layer, "mlp.up_proj"))
        return hidden_NC + F.linear(gate * up, self._of(layer, "mlp.down_proj"))

    def log_probs(self, hidden_NC: Tensor) -> Tensor:
        """[N, vocabulary] of the next token."""
        x = F.rms_norm(hidden_NC, hidden_NC.shape[-1:], self._weights["model.norm.weight"], self._epsilon)
        return F.linear(x, self._head).log_softmax(-1)

    def prefill(
        self, ids_N: Tensor, num_rows: int, kv_layers: Sequence[int] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Dense K and V [L, H, N + num_rows, D] of a prompt, with room for rows that follow it.

        kv_layers: the layer whose K and V each layer reads; what layers that read another's would have is left out.
        """
        num_tokens = ids_N.numel()
        shape = (self.num_layers, self.num_kv_heads, num_tokens + num_rows, self.head_dim)
        keys, values = torch.zeros(shape), torch.zeros(shape)
        hidden, positions = self.embed(ids_N), torch.arange(num_tokens)
        for layer in range(self.num_layers):
            q, k, v = self.qkv(layer, hidden, positions)
            source = layer if kv_layers is None else kv_layers[layer]
            if source == layer:
                keys[layer, :, :num_tokens], values[layer, :, :num_tokens] = k, v
            k, v = keys[source, :, :num_tokens], values[source, :, :num_tokens]
            out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[
                0
            ]
            hidden = self.finish(layer, hidden, out)
        return keys, values

    def _norm(self, hidden: Tensor, layer: int, name: str) -> Tensor:
        return F.rms_norm(hidden, hidden.shape[-1:], self._of(layer, name), self._epsilon)

    def _of(self, layer: int, name: str) -> Tensor:
        return self._weights[f"model.layers.{layer}.{name}.weight"]


def _rotate(x_HND: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x_HND.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _load(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: weight.float() for file in files for name, weight in load_file(str(file)).items()}


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return {"rope_type": "default", "rope_theta": config.get("rope_theta", 10000.0), **found}


def _check(config: dict[str, Any], folder: Path) -> None:
    wanted = {
        "architectures": (config.get("architectures"), ["LlamaForCausalLM"]),
        "rope_type": (_rope(config)["rope_type"], "default"),
        "hidden_act": (config.get("hidden_act"), "silu"),
        "attention_bias": (bool(config.get("attention_bias")), False),
        "mlp_bias": (bool(config.get("mlp_bias")), False),
        "quantization_config": (config.get("quantization_config"), None),
    }
    for key, (found, allowed) in wanted.items():
        if found != allowed:
            raise UnsupportedModel(
                f"{folder / 'config.json'}: {key} is {found!r}, but calibration computes {allowed!r} only. "
                "Calibrate a model of that kind, or write the plan by hand and mark it unproven."
            )
    if not any(folder.glob("*.safetensors")):
        raise UnsupportedModel(
            f"{folder}: there is no *.safetensors file. Give the folder of a converted model."
        )
