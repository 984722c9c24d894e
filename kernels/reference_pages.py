"""Selection by pages in plain PyTorch: consecutive keys of a row stand or fall together (Quest).

Dims as in reference_select.py, and: N pages of a row, P tokens of a page

A page is P consecutive positions of a row, whatever slots they have; the last one may hold fewer. A page scores
what no key of it can exceed, sum_d max(q_d low_d, q_d high_d) with its keys' channel-wise range, plus the largest
bias of its keys. The softmax runs over the row's pages and every position has the share of its page, so equal scores
are the rule inside a page and the lower position wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .reference import key_bias, math_dtype, row_slots
from .reference_select import Heads, PageBounds, page_bounds


def row_bounds(k_SHD: Tensor, slots_J: Tensor, page_size: int) -> PageBounds:
    """Ranges [N, H, D] of a row's pages."""
    pages = [page_bounds(k_SHD[slots.long()][None]) for slots in slots_J.split(page_size)]
    return PageBounds(*(torch.cat(parts) for parts in zip(*pages, strict=True)))


def page_token_scores(
    q_RQD: Tensor,
    k_SHD: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    page_size: int,
    scale: float,
    heads: Heads = "layer",
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
) -> Tensor:
    """Scores [R, X, W] of positions by their pages, -inf beyond a row's length."""
    rows = list(row_slots(kv_indices, kv_indptr_R1))
    num_heads = k_SHD.shape[1]
    num_lists = 1 if heads == "layer" else num_heads
    shape = (len(rows), num_lists, max((slots.numel() for slots in rows), default=0))
    scores = torch.full(shape, -torch.inf, dtype=math_dtype(q_RQD), device=q_RQD.device)
    for r, slots_J in enumerate(rows):
        q_HG1D = q_RQD[r].to(scores.dtype).unflatten(0, (num_heads, -1))[:, :, None]
        low, high = (
            x.to(scores.dtype).transpose(0, 1)[:, None] for x in row_bounds(k_SHD, slots_J, page_size)
        )
        logits_HGN = torch.maximum(q_HG1D * low, q_HG1D * high).sum(-1) * scale
        bias_J = key_bias(tags_S, slots_J, alpha, beta)
        if bias_J is not None:
            logits_HGN += torch.stack([part.amax() for part in bias_J.split(page_size)]).to(scores.dtype)
        mass_HGN = logits_HGN.softmax(-1)
        mass_XN = mass_HGN.sum((0, 1))[None] if num_lists == 1 else mass_HGN.sum(1)
        scores[r, :, : slots_J.numel()] = mass_XN.repeat_interleave(page_size, -1)[:, : slots_J.numel()]
    return scores
