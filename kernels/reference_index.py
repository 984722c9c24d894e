"""Index keys in plain PyTorch: a few channels per slot in 4 bits, by ranges that were measured once.

Dims: T tokens, E index heads, C channels of an index head, H KV heads, D head dim, Q query heads, R rows

An index key is a linear map of the keys of one token, all KV heads beside each other, whose C channels are then
quantised: code = clamp(floor((x - low) / step + 0.5), 0, 15). `low` and `step` belong to a channel, not to a key, so
a scorer multiplies its queries by `step` and never adds `low`: that adds the same to every key of a head and a
softmax does not see it. Byte i of an index head holds channel i in its low half and channel i + C / 2 in its high
half, as in reference_select.Int4Keys.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEVELS = 15  # the largest code


class IndexMap(NamedTuple):
    """What makes index keys and index queries of one layer; query head q belongs to index head q // (Q / E)."""

    key_ECM: Tensor  # float32 [E, C, H * D]
    query_QCD: Tensor  # float32 [Q, C, D]
    low_EC: Tensor  # float32
    step_EC: Tensor  # float32, above 0


def index_channels(index: IndexMap, k_THD: Tensor) -> Tensor:
    """float32 [T, E, C] before quantisation."""
    num_heads, num_channels, width = index.key_ECM.shape
    flat = k_THD.float().reshape(-1, width) @ index.key_ECM.reshape(-1, width).T
    return flat.view(-1, num_heads, num_channels)


def index_codes(index: IndexMap, k_THD: Tensor) -> Tensor:
    """The packed codes uint8 [T, E, C / 2] of keys."""
    scaled = (index_channels(index, k_THD) - index.low_EC) / index.step_EC
    low, high = (scaled + 0.5).floor().clamp(0, LEVELS).to(torch.uint8).chunk(2, -1)
    return low | (high << 4)


def index_keys(index: IndexMap, codes_TEB: Tensor) -> Tensor:
    """float32 [T, E, C] that `reference_select.pooled_scores` takes as keys, up to `low`."""
    return torch.cat((codes_TEB & 15, codes_TEB >> 4), -1).float() * index.step_EC


def index_queries(index: IndexMap, q_RQD: Tensor) -> Tensor:
    """float32 [R, Q, C] that go with `index_keys`, at the scale of the full head."""
    return torch.einsum("rqd,qcd->rqc", q_RQD.float(), index.query_QCD)


def measured_ranges(channels_TEC: Tensor, tail: float = 0.001) -> tuple[Tensor, Tensor]:
    """(low, step) float32 [E, C] that cut off a share `tail` of the values on either side."""
    edges = torch.tensor([tail, 1 - tail])
    low, high = channels_TEC.float().quantile(edges, dim=0)
    return low, ((high - low) / LEVELS).clamp_min(1e-6)


def label_map(channels_HC: Tensor, num_q_heads: int, head_dim: int) -> tuple[Tensor, Tensor]:
    """(key [H, C, H * D], query [Q, C, D]) that pick the label channels of every KV head (Double Sparsity)."""
    num_heads, _ = channels_HC.shape
    picks = torch.nn.functional.one_hot(channels_HC, head_dim).float()
    keys = torch.block_diag(*picks).unflatten(0, (num_heads, -1))
    return keys, picks.repeat_interleave(num_q_heads // num_heads, 0)
