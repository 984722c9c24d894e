"""What a list leaves out, in plain PyTorch: one pseudo-key for the rest of every block of a row.

Dims as in reference_select.py, and: N blocks of a row, B positions of a block, U those of a block that are in no list

A block is B consecutive positions of a row; the last one may hold fewer. Of its positions U that a head's list leaves
out there is one pseudo-key, with w_j = exp(bias_j) and W = sum_U w_j:

    logit  scale * q . (sum_U w_j k_j / W) + log W        value  sum_U w_j v_j / W

It joins the softmax of the list as a key does. By Jensen's inequality its weight is no more than that of the keys it
stands for: log sum_U w_j exp(s_j) >= log W + sum_U w_j s_j / W, equal where all s_j are. So a tail underestimates, most
where a block holds a key that should have been listed, and there the mean of the values says least about it. A tail
whose weight was scaled to the true mass of what is left out was measured, and it is worse.

A key whose bias is not above FADED is in no tail: of what is left of a mean when nearly all of its weight is taken out,
rounding would be the largest part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import key_bias, math_dtype, row_slots

FADED = -7.0


def tail_attention(
    q_RQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    positions_RXK: Tensor,
    counts_RX: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    block_size: int,
    scale: float,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> Tensor:
    """Attention [R, Q, D] of each row over its lists, and over the pseudo-keys of what they leave out.

    X is 1 or H; counts_RX[r, x] positions of a list are valid.
    """
    num_heads, num_lists = k_SHD.shape[1], positions_RXK.shape[1]
    out = torch.zeros_like(q_RQD, dtype=math_dtype(q_RQD))
    q_RHGD = q_RQD.to(out.dtype).unflatten(1, (num_heads, -1))
    for r, slots_J in enumerate(row_slots(kv_indices, kv_indptr_R1)):
        bias_J = key_bias(tags_S, slots_J, alpha, beta)
        bias_J = torch.zeros(len(slots_J)) if bias_J is None else bias_J
        k_JHD, v_JHD = k_SHD[slots_J].to(out.dtype), v_SHD[slots_J].to(out.dtype)
        for h in range(num_heads):
            x = h if num_lists > 1 else 0
            listed_J = torch.zeros(len(slots_J), dtype=torch.bool)
            listed_J[positions_RXK[r, x, : counts_RX[r, x]].long()] = True
            rest = pseudo_keys(k_JHD[:, h], v_JHD[:, h], ~listed_J, bias_J.to(out.dtype), block_size)
            keys, values, terms = (
                torch.cat(pair)
                for pair in zip((k_JHD[listed_J, h], v_JHD[listed_J, h], bias_J[listed_J]), rest, strict=True)
            )
            weights = (q_RHGD[r, h] @ keys.T * scale + terms).softmax(-1)
            out[r].unflatten(0, (num_heads, -1))[h] = weights @ values
    return out.to(q_RQD.dtype)


def pseudo_keys(
    k_JD: Tensor, v_JD: Tensor, left_out_J: Tensor, bias_J: Tensor, block_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Keys [n, D], values [n, D] and terms [n] of the blocks in which something is left out."""
    weight_J = bias_J.exp().masked_fill(~left_out_J | (bias_J <= FADED), 0)
    keys, values, terms = [], [], []
    blocks = zip(*(x.split(block_size) for x in (k_JD, v_JD, weight_J)), strict=True)
    for k, v, weight in blocks:
        if (total := weight.sum()) > 0:
            keys.append((weight[:, None] * k).sum(0) / total)
            values.append((weight[:, None] * v).sum(0) / total)
            terms.append(total.log())
    empty = k_JD.new_zeros(0, k_JD.shape[1])
    if not keys:
        return empty, empty, k_JD.new_zeros(0)
    return torch.stack(keys), torch.stack(values), torch.stack(terms)
