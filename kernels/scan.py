"""Triton twin of `reference_select.pooled_scores`: score-only keys, exact, int4, or codes of index keys.

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

from .ops import IndexCodes
from .reference_select import Heads, Int4Keys, Keys, num_kv_heads
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
# of a thread that scores; without it ptxas saves registers for blocks that never come, and spills
SCORE_REGISTERS = 224


def pooled_scores(
    q_RQD: Tensor,
    keys: Keys | IndexCodes,
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
    pool_rows_R: Tensor | None = None,
    pooled_R: Tensor | None = None,
    width: int | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scores float32 [R, X, W]; columns beyond a row's length are left unwritten.

    Contract of `reference_select.pooled_scores`, except that `width` must bound every row on the host; it
    defaults to the pool's width, or to the number of index entries. `out` [R, X, W] is written where it is given, one
    list, or one per KV head.

    With `pooled_R` (uint8) row r scores its pool only where that is set, and its history of kv_lens_R[r] keys where
    it is not; a row of no keys does neither. `pool_rows_R` (int32) says where a row's pool and its length stand.
    """
    num_rows, num_q_heads, head_dim = q_RQD.shape
    num_heads = keys.codes.shape[1] if isinstance(keys, IndexCodes) else num_kv_heads(keys)
    num_lists = 1 if heads == "layer" else num_heads
    if q_RQD.stride(-1) != 1 or num_q_heads % num_heads:
        raise ValueError(
            f"q {tuple(q_RQD.shape)}: [R, H * G, D], contiguous head dim, for {num_heads} KV heads"
        )
    if (pool_RXM is None) != (pool_lens_R is None):
        raise ValueError("pool_RXM and pool_lens_R come together")
    if out is not None:
        num_lists, width = out.shape[1:]
    if width is None:
        width = kv_indices.shape[-1] * page_size if pool_RXM is None else pool_RXM.shape[-1]
    scores = out
    if scores is None:
        scores = torch.empty((num_rows, num_lists, width), dtype=torch.float32, device=q_RQD.device)
    if scores.numel() == 0:
        return scores
    group, device = num_q_heads // num_heads, q_RQD.device
    if num_splits is None:
        num_splits = num_splits_for(num_rows * num_heads, width, MIN_SPLIT_LEN, device)
    # without a head axis in the score grid, the splits alone must fill the device
    num_score_splits = num_splits * (num_heads // num_lists) if device.type == "cuda" else num_splits
    part_lse = torch.empty((num_rows, num_q_heads, num_splits), dtype=torch.float32, device=device)
    packed = not isinstance(keys, Tensor)
    stored = keys if isinstance(keys, Tensor) else keys.codes
    first_half = (head_dim // 2) if packed else head_dim
    operands = (
        q_RQD,
        stored,
        keys.ranges.view(torch.int64) if isinstance(keys, Int4Keys) else None,
        tags_S,
        kv_indices,
        kv_indptr_R1,
        kv_lens_R if pool_lens_R is None or pooled_R is not None else pool_lens_R,
        pool_RXM,
        pool_lens_R,
        pool_rows_R,
        pooled_R,
        scale * LOG2E,
        alpha * LOG2E,
        beta * LOG2E,
        q_RQD.stride(0),
        q_RQD.stride(1),
        *pool_strides(stored, page_size),
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
        "INT4": packed,
        "HAS_RANGES": isinstance(keys, Int4Keys),
        "HAS_TAGS": tags_S is not None,
        "HAS_LENS": kv_lens_R is not None or pool_lens_R is not None,
        "HAS_POOL": pool_RXM is not None,
        "HAS_ROWS": pool_rows_R is not None,
        "HAS_FLAGS": pooled_R is not None,
        "SOFT_BITS": soft_bits(q_RQD.dtype),
    }
    _scan_lse_kernel[(num_rows, num_heads, num_splits)](
        *operands, part_lse, **constants, NUM_SPLITS=num_splits, num_warps=4, num_stages=2
    )
    _scan_score_kernel[(num_rows, num_lists, num_score_splits)](
        *operands,
        part_lse,
        scores,
        scores.stride(0),
        scores.stride(1),
        **constants,
        HEADS_PER_LIST=num_heads // num_lists,
        NUM_SPLITS=num_score_splits,
        NUM_LSE=num_splits,
        num_warps=4,
        num_stages=2,
        maxnreg=SCORE_REGISTERS,
    )
    return scores


def _scan_block(head_dim: int, element_size: int) -> int:
    """Keys per block, as aot_table.json allows without a spill."""
    wide = triton.next_power_of_2(head_dim) * element_size > 256
    return 64 if not wide else 16 if element_size == 4 else 32


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
    HAS_RANGES: tl.constexpr,
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
        high_q = tl.load(q_at + D, mask=q_live, other=0.0)
        low_half = dot(q, (codes & 15).to(tl.float32).to(q.dtype), zero, SOFT_BITS)
        high_half = dot(high_q, (codes >> 4).to(tl.float32).to(q.dtype), zero, SOFT_BITS)
        if HAS_RANGES:
            packed = tl.load(ranges_ptr + (page * PAGE_SIZE + offset) * H + head, mask=live, other=0)
            step, low = _half_range(packed, 0)
            logits = low_half * step[None, :] + tl.sum(q.to(tl.float32), 1)[:, None] * low[None, :]
            step, low = _half_range(packed, 32)
            logits += high_half * step[None, :] + tl.sum(high_q.to(tl.float32), 1)[:, None] * low[None, :]
        else:
            # queries carry the steps of their channels
            logits = low_half + high_half
    else:
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=k_live, other=0.0)
        logits = dot(q, k.to(q.dtype), zero, SOFT_BITS)
    return logits


@triton.jit
def part_lse_merged(part):
    """Log-sum-exp over the splits [BLOCK_G, NUM_LSE] of a row."""
    top = tl.max(part, 1)
    base = tl.where((top == float("-inf")) | (top == float("inf")), 0.0, top)
    total = tl.sum(tl.exp2((part - base[:, None]) * 1.4426950408889634), 1)
    return tl.where(total > 0.0, base + tl.log2(total) * 0.6931471805599453, float("inf"))


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
    pool_lens_ptr,
    pool_rows_ptr,
    pooled_ptr,
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
    HAS_RANGES: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    SOFT_BITS: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
):
    row, head, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, num_keys = row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    pool_row = tl.load(pool_rows_ptr + row).to(tl.int64) if HAS_ROWS else row
    if HAS_FLAGS:
        from_pool = (tl.load(pooled_ptr + row) != 0) & (num_keys > 0)
        num_keys = tl.where(from_pool, tl.load(pool_lens_ptr + pool_row).to(tl.int32), num_keys)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_N)
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        live = j < end
        position = j
        if HAS_POOL:
            listed = pool_ptr + pool_row * stride_pool_row + head * stride_pool_list + j
            if HAS_FLAGS:
                position = tl.where(from_pool, tl.load(listed, mask=live & from_pool, other=0), j)
            else:
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
            HAS_RANGES,
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
    pool_lens_ptr,
    pool_rows_ptr,
    pooled_ptr,
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
    HAS_RANGES: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_POOL: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HAS_FLAGS: tl.constexpr,
    SOFT_BITS: tl.constexpr,
    HEADS_PER_LIST: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    NUM_LSE: tl.constexpr,
):
    row, which, split = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    first, num_keys = row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    pool_row = tl.load(pool_rows_ptr + row).to(tl.int64) if HAS_ROWS else row
    if HAS_FLAGS:
        from_pool = (tl.load(pooled_ptr + row) != 0) & (num_keys > 0)
        num_keys = tl.where(from_pool, tl.load(pool_lens_ptr + pool_row).to(tl.int32), num_keys)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_N)
    g, c = tl.arange(0, BLOCK_G), tl.arange(0, NUM_LSE)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        live = j < end
        position = j
        if HAS_POOL:
            listed = pool_ptr + pool_row * stride_pool_row + which * stride_pool_list + j
            if HAS_FLAGS:
                position = tl.where(from_pool, tl.load(listed, mask=live & from_pool, other=0), j)
            else:
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
                HAS_RANGES,
                SOFT_BITS,
            )
            logits *= scale_log2e
            if HAS_TAGS:
                logits += load_bias(tags_ptr, page, offset, live, alpha_log2e, beta_log2e, PAGE_SIZE)[None, :]
            # the parts of the splits, merged; a query that is none has no weight anywhere
            parts = lse_ptr + ((row * H + head) * G + g)[:, None] * NUM_LSE + c[None, :]
            part = tl.load(parts, mask=(g < G)[:, None], other=float("inf"))
            lse = part_lse_merged(part)
            score += tl.sum(tl.exp2(logits - (lse * 1.4426950408889634)[:, None]), 0)
        tl.store(scores_ptr + row * stride_scores_row + which * stride_scores_list + j, score, mask=live)
