"""The Hugging Face model in which layers read another layer's keys and values: what a plan with `kv_from` means."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

NAME = "shared kv"  # of the attention function, in the library's table


class SharingTwin:
    """`kv_layers[l]` is the layer whose rotated keys and values layer l attends to, in float32, without a cache."""

    def __init__(self, folder: Path, kv_layers: Sequence[int]) -> None:
        from transformers import AttentionInterface, AutoModelForCausalLM

        AttentionInterface.register(NAME, self._attend)
        self._model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation=NAME
        )
        self.kv_layers = list(kv_layers)
        self._kv: dict[int, tuple[Tensor, Tensor]] = {}

    def _attend(
        self,
        module: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        mask: Tensor | None,
        *args: Any,
        scaling: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        source = self.kv_layers[module.layer_idx]
        if source == module.layer_idx:
            self._kv[source] = k, v
        out = F.scaled_dot_product_attention(
            q, *self._kv[source], is_causal=True, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None

    @torch.no_grad()
    def log_probs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each token but the first, given those before it."""
        tokens = torch.tensor([list(ids)])
        found = self._model(tokens, use_cache=False).logits[0, :-1].log_softmax(-1)
        return found.gather(1, tokens[0, 1:, None])[:, 0].tolist()
