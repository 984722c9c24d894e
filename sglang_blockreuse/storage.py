"""What names KV in storage (`--hicache-storage-backend`): everything that decides its values but the tokens.

The host's keys name a model as it is served. Another checkpoint under that name, another dtype, another host layout or
other rotary settings would be answered with KV of somebody else, without an error. The host has a place in its keys
for such a mark, `storage_format_tag`; it stands behind the model's name for every backend.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MIN_FETCH = (
    "prefetch_threshold"  # key of --hicache-storage-backend-extra-config: fewer tokens are not fetched
)

_DOMAIN = b"sglang-blockreuse/1 storage\0"
_CHUNK = 1 << 22  # elements summed at once: their 64-bit copies must fit beside a full KV pool
# of a configuration, what says where a checkpoint was found and by whom it is read
_NOT_OF_THE_MODEL = frozenset(
    {"_name_or_path", "name_or_path", "transformers_version", "dtype", "torch_dtype"}
)


def identity(model: torch.nn.Module, config: Any, *, kv_dtype: torch.dtype, layout: str) -> str:
    """Digest of weights, model configuration, rotary tables, KV dtype and host layout; 32 hexadecimal digits.

    Every element of every parameter counts. Two ranks of a model differ, and two servers of the same agree.
    """
    digest = hashlib.sha256(_DOMAIN)
    settings = {name: value for name, value in config.to_dict().items() if name not in _NOT_OF_THE_MODEL}
    digest.update(json.dumps([settings, str(kv_dtype), layout], sort_keys=True, default=str).encode())
    for name, tensor in _tensors(model):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(repr(_checksum(tensor)).encode())
    return digest.hexdigest()[:32]


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from sorted(model.named_parameters())
    # other buffers may hold what a step leaves in them
    yield from sorted((n, b) for n, b in model.named_buffers() if n.endswith(("cos_sin_cache", "inv_freq")))


def _checksum(tensor: Tensor) -> tuple[int, int]:
    """Of a tensor's bits and their places; integers, so the order of summation does not matter."""
    size = tensor.element_size()
    as_integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size]
    flat = tensor.detach().contiguous().flatten().view(as_integers)
    total = placed = 0
    for start in range(0, flat.numel(), _CHUNK):
        bits_N = flat[start : start + _CHUNK].long()
        # odd weights lose no bit modulo 2**64
        weights_N = torch.arange(start, start + len(bits_N), device=flat.device) * 2 + 1
        total += int(bits_N.sum())
        placed += int((bits_N * weights_N).sum())
    return total, placed


def names_min_fetch(extra_config: str | None) -> bool:
    """Whether the user's configuration of the backend says from how many tokens on storage is asked."""
    if extra_config and extra_config.startswith("@"):
        extra_config = Path(extra_config[1:]).read_text()
    return MIN_FETCH in (extra_config or "")
