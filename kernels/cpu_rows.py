"""Rows of one forward on the CPU, and what the two ways of computing them share.

A row is one run of a request: queries at positions prefix_len ... prefix_len + extend_len - 1, keys from position
0 to its last query. Rows of one request that follow each other in position order share one load of its keys.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .reference import key_bias

# (q [B, H, N, D], k [B, H, J, D], v, dropout, is_causal, attn_mask, scale) -> out like q, lse float32 [B, H, N].
# Any strides, stride 0 included; is_causal and attn_mask add up; the mask broadcasts.
flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default

# Stands for -inf in a bias: for a query whose keys are all at -inf the kernel returns the log-sum-exp 0.
HIDDEN = -1e30


class Workspace:
    """Buffers that outlive a layer: a fresh allocation of some MB costs more page faults than its copy."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor; the next one of the same name and dtype takes its memory."""
        size = math.prod(shape)
        buffer = self._buffers.get((name, dtype))
        if buffer is None or buffer.numel() < size:
            buffer = self._buffers[name, dtype] = torch.empty(size, dtype=dtype)
        return buffer[:size].view(shape)


class Row(NamedTuple):
    request: int  # row of the slot table
    first: int  # its first token in the forward
    prefix_len: int
    end: int  # number of its keys

    @property
    def num_queries(self) -> int:
        return self.end - self.prefix_len


class KeyBias(NamedTuple):
    """The correction: alpha on keys whose tag has TAG_LOCAL, beta on keys whose tag has TAG_FALSE_SINK."""

    tags_S: Tensor  # uint8
    alpha: float
    beta: float

    def at(self, slots: Tensor) -> Tensor | None:
        """float32 logit terms shaped like `slots`, or None where all are zero."""
        bias = key_bias(self.tags_S, slots, self.alpha, self.beta)
        return bias.float().clamp_min(HIDDEN) if bias is not None and bool(bias.any()) else None


def rows_of(
    requests: Sequence[int], prefix_lens: Sequence[int], extend_lens: Sequence[int], width: int
) -> Iterator[Row]:
    """The rows that have queries. Raises ValueError for lengths that disagree or exceed the slot table."""
    if not len(requests) == len(prefix_lens) == len(extend_lens):
        raise ValueError(
            f"{len(requests)} requests, {len(prefix_lens)} prefix lengths, {len(extend_lens)} extend lengths: "
            "give one of each per row"
        )
    first = 0
    for request, prefix_len, extend_len in zip(requests, prefix_lens, extend_lens, strict=True):
        end = prefix_len + extend_len
        if prefix_len < 0 or extend_len < 0 or end > width:
            raise ValueError(
                f"row of request {request}: prefix length {prefix_len} and extend length {extend_len} must be "
                f">= 0 and their sum at most {width}, the width of the slot table"
            )
        if extend_len:
            yield Row(request, first, prefix_len, end)
        first += extend_len


def nested(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Adjacent rows of one request in position order: the keys of the last contain those of the others."""
    group: list[Row] = []
    for row in rows:
        if group and (row.request != group[-1].request or row.prefix_len < group[-1].end):
            yield group
            group = []
        group.append(row)
    if group:
        yield group
