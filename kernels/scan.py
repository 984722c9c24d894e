"""Triton twins of `reference_select.pooled_scores` and `scan`: score-only keys, exact or int4, then top-M.

Dims as in reference_select.py, and: C splits of a row

Two passes over the keys: the log-sum-exp of every query head, then the softmax summed over the heads of a list.
What is written is one float per list and position; the scores per head ([R, Q, W], Q times as much) never are.
Lengths are read on the device and nothing synchronises.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference_select import Heads, Int4Keys, Keys, num_kv_heads, row_lens
from .top_k import top_k
from .triton_common import (
    LOG2E,
    dot,
    load_bias,
    load_entry,
    num_splits_for,
    pool_strides,
    row_bounds,
    soft_bits,
    split_bounds,
)

MIN_SPLIT_LEN = 256  # keys


def pooled_scores(
    q_RQD: Tensor,
    keys: Keys,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    scale: float,
    heads: Heads = "layer",
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
    pool_RXM: Tensor | None = None,
    pool_lens_R: Tensor | None = None,
    width: int | None = None,
    num_splits: int | None = None,
) -> Tensor:
    """Scores float32 [R, X, W]; columns beyond a row's length are left unwritten.

    Contract of `reference_select.pooled_scores`, except that `width` must bound every row on the host; it
    defaults to the pool's width, or to the number of index entries.
    """
    num_rows, num_q_heads, head_dim = q_RQD.shape
    num_heads = num_kv_heads(keys)
    num_lists = 1 if heads == "layer" else num_heads
    if q_RQD.stride(-1) != 1 or num_q_heads % num_heads:
        raise ValueError(
            f"q {tuple(q_RQD.shape)}: [R, H * G, D], contiguous head dim, for {num_heads} KV heads"
        )
    if (pool_RXM is None) != (pool_lens_R is None):
        raise ValueError("pool_RXM and pool_lens_R come together")
    if width is None:
        width = kv_indices.shape[-1] * page_size if pool_RXM is None else pool_RXM.shape[-1]
    scores = torch.empty((num_rows, num_lists, width), dtype=torch.float32, device=q_RQD.device)
    if scores.numel() == 0:
        return scores
    group, device = num_q_heads // num_heads, q_RQD.device
    if num_splits is None:
        num_splits = num_splits_for(num_rows * num_heads, width, MIN_SPLIT_LEN, device)
    # without a head axis in the score grid, the splits alone must fill the device
    num_score_splits = num_splits * (num_heads // num_lists) if device.type == "cuda" else num_splits
    part_lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=device)
    int4 = isinstance(keys, Int4Keys)
    first_half = (head_dim // 2) if int4 else head_dim
    operands = (
        q_RQD,
        keys.codes if isinstance(keys, Int4Keys) else keys,
        keys.ranges.view(torch.int64) if isinstance(keys, Int4Keys) else None,
        tags_S,
        kv_indices,
        kv_indptr_R1,
        kv_lens_R if pool_lens_R is None else pool_lens_R,
        pool_RXM,
        scale * LOG2E,
        alpha * LOG2E,
        beta * LOG2E,
        q_RQD.stride(0),
        q_RQD.stride(1),
        *pool_strides(keys.codes if isinstance(keys, Int4Keys) else keys, page_size),
        0 if pool_RXM is None else pool_RXM.stride(0),
        0 if pool_RXM is None or pool_RXM.shape[1] == 1 else pool_RXM.stride(1),
    )
    constants = {
        "H": num_heads,
        "G": group,
        "BLOCK_G": max(16, triton.next_power_of_2(group)),
        "D": first_half,
        "BLOCK_D": max(16, triton.next_power_of_2(first_half)),
        "BLOCK_N": _scan_block(head_dim, q_RQD.element_size()),
        "PAGE_SIZE": page_size,
        "INT4": int4,
        "HAS_TAGS": tags_S is not None,
        "HAS_LENS": kv_lens_R is not None or pool_lens_R is not None,
        "HAS_POOL": pool_RXM is not None,
        "SOFT_BITS": soft_bits(q_RQD.dtype),
    }
    _scan_lse_kernel[(num_rows, num_heads, num_splits)](
        *operands, part_lse, **constants, NUM_SPLITS=num_splits, num_warps=4, num_stages=2
    )
    lse = part_lse.logsumexp(-1)
    _scan_score_kernel[(num_rows, num_lists, num_score_splits)](
        *operands,
        lse,
        scores,
        scores.stride(0),
        scores.stride(1),
        **constants,
        HEADS_PER_LIST=num_heads // num_lists,
        NUM_SPLITS=num_score_splits,
        num_warps=4,
        num_stages=2,
    )
    return scores


def _scan_block(head_dim: int, element_size: int) -> int:
    """Keys per block, as aot_table.json allows without a spill."""
    wide = triton.next_power_of_2(head_dim) * element_size > 256
    return 64 if not wide else 16 if element_size == 4 else 32


def scan(
    q_RQD: Tensor,
    keys: Keys,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    size: int,
    scale: float,
    heads: Heads = "layer",
    num_sinks: int = 0,
    window: int = 0,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
    max_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The best `size` positions of each row's history: int32 [R, X, size] and counts int32 [R].

    Contract of `reference_select.scan`; `max_len` bounds the rows on the host.
    """
    scores = pooled_scores(
        q_RQD,
        keys,
        kv_indices,
        kv_indptr_R1,
        scale=scale,
        heads=heads,
        tags_S=tags_S,
        alpha=alpha,
        beta=beta,
        page_size=page_size,
        kv_lens_R=kv_lens_R,
        width=max_len,
    )
    return top_k(scores, row_lens(kv_indptr_R1, kv_lens_R), size, num_sinks=num_sinks, window=window)


@triton.jit
def _half_range(packed, SHIFT: tl.constexpr):
    """Step and low of one half of the channels from the eight bytes of a key's ranges."""
    step = ((packed >> SHIFT) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    low = ((packed >> (SHIFT + 16)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True)
    return step.to(tl.float32), low.to(tl.float32)


@triton.jit
def _logits(
    q_ptr,
    k_ptr,
    ranges_ptr,
    page,
    offset,
    live,
    head,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INT4: tl.constexpr,
    SOFT_BITS: tl.constexpr,
):
    """q . k [BLOCK_G, BLOCK_N] of one KV head; `q_ptr` is the row's. D is the head dim, or its half for int4."""
    g, d = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    q_at = q_ptr + (head * G + g)[:, None] * stride_q_head + d[None, :]
    q_live = (g < G)[:, None] & (d < D)[None, :]
    k_at = page * stride_k_page + offset * stride_k_slot + head * stride_k_head
    k_live = live[None, :] & (d < D)[:, None]
    q = tl.load(q_at, mask=q_live, other=0.0)
    zero = tl.zeros([BLOCK_G, page.shape[0]], tl.float32)
    if INT4:
        # codes are small integers, exact in every float type; step and low are applied to the dot
        codes = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=k_live, other=0)
        packed = tl.load(ranges_ptr + (page * PAGE_SIZE + offset) * H + head, mask=live, other=0)
        step, low = _half_range(packed, 0)
        logits = dot(q, (codes & 15).to(tl.float32).to(q.dtype), zero, SOFT_BITS) * step[None, :]
        logits += tl.sum(q.to(tl.float32), 1)[:, None] * low[None, :]
        q = tl.load(q_at + D, mask=q_live, other=0.0)
        step, low = _half_range(packed, 32)
        logits += dot(q, (codes >> 4).to(tl.float32).to(q.dtype), zero, SOFT_BITS) * step[None, :]
        logits += tl.sum(q.to(tl.float32), 1)[:, None] * low[None, :]
    else:
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=k_live, other=0.0)
        logits = dot(q, k.to(q.dtype), zero, SOFT_BITS)
    return logits


@triton.jit
def _scan_lse_kernel(
    q_ptr,
    k_ptr,
    ranges_ptr,
    tags_ptr,
    indices_ptr,
    indptr_ptr,
    lens_ptr,
    pool_ptr,
    scale_log2e,
    alpha_log2e,
    beta_log2e,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_pool_row,
    stride_pool_list,
    lse_ptr,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INT4: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    SOFT_BITS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, num_keys = row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_N)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(begin, end, BLOCK_N):
        position = start + tl.arange(0, BLOCK_N)
        live = position < end
        if HAS_POOL:
            listed = pool_ptr + row * stride_pool_row + head * stride_pool_list + position
            position = tl.load(listed, mask=live, other=0)
        page, offset = load_entry(indices_ptr + first, position, live, PAGE_SIZE)
        logits = _logits(
            q_ptr + row * stride_q_row,
            k_ptr,
            ranges_ptr,
            page,
            offset,
            live,
            head,
            stride_q_head,
            stride_k_page,
            stride_k_slot,
            stride_k_head,
            H,
            G,
            BLOCK_G,
            D,
            BLOCK_D,
            PAGE_SIZE,
            INT4,
            SOFT_BITS,
        )
        logits *= scale_log2e
        if HAS_TAGS:
            logits += load_bias(tags_ptr, page, offset, live, alpha_log2e, beta_log2e, PAGE_SIZE)[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))
        new_top = tl.maximum(top, tl.max(logits, 1))
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        total = total * tl.exp2(top - base) + tl.sum(tl.exp2(logits - base[:, None]), 1)
        top = new_top
    g = tl.arange(0, BLOCK_G)
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + (row * H * G + head * G + g) * NUM_SPLITS + split, lse, mask=g < G)


@triton.jit
def _scan_score_kernel(
    q_ptr,
    k_ptr,
    ranges_ptr,
    tags_ptr,
    indices_ptr,
    indptr_ptr,
    lens_ptr,
    pool_ptr,
    scale_log2e,
    alpha_log2e,
    beta_log2e,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_pool_row,
    stride_pool_list,
    lse_ptr,
    scores_ptr,
    stride_scores_row,
    stride_scores_list,
    H: tl.constexpr,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    INT4: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    SOFT_BITS: tl.constexpr,
    HEADS_PER_LIST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row, which, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, num_keys = row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_N)
    g = tl.arange(0, BLOCK_G)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        live = j < end
        position = j
        if HAS_POOL:
            listed = pool_ptr + row * stride_pool_row + which * stride_pool_list + j
            position = tl.load(listed, mask=live, other=0)
        page, offset = load_entry(indices_ptr + first, position, live, PAGE_SIZE)
        score = tl.zeros([BLOCK_N], tl.float32)
        for h in range(HEADS_PER_LIST):
            head = which * HEADS_PER_LIST + h
            logits = _logits(
                q_ptr + row * stride_q_row,
                k_ptr,
                ranges_ptr,
                page,
                offset,
                live,
                head,
                stride_q_head,
                stride_k_page,
                stride_k_slot,
                stride_k_head,
                H,
                G,
                BLOCK_G,
                D,
                BLOCK_D,
                PAGE_SIZE,
                INT4,
                SOFT_BITS,
            )
            logits *= scale_log2e
            if HAS_TAGS:
                logits += load_bias(tags_ptr, page, offset, live, alpha_log2e, beta_log2e, PAGE_SIZE)[None, :]
            lse = tl.load(lse_ptr + row * H * G + head * G + g, mask=g < G, other=float("inf"))
            score += tl.sum(tl.exp2(logits - (lse * 1.4426950408889634)[:, None]), 0)
        tl.store(scores_ptr + row * stride_scores_row + which * stride_scores_list + j, score, mask=live)
