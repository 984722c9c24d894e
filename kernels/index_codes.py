"""Triton twin of `reference_index.index_codes` in a decode step: what a row's keys lack of their index keys is written.

Dims as in reference_index.py, and: S pool slots, B = C / 2 bytes of an index head, K channels of a token's keys, H * D
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .int4_keys import MIN_SPLIT_LEN
from .ops import Rows
from .reference_index import IndexMap
from .triton_common import num_splits_for, split_bounds

BLOCK_K = 64


def refresh_codes(
    index: IndexMap,
    codes_SEB: Tensor,
    rows: Rows,
    k_SHD: Tensor,
    current_S: Tensor,
    step_1: Tensor,
    stale_1: Tensor,
    *,
    period: int,
    is_last: bool,
    max_len: int,
) -> None:
    """As `int4_keys.refresh_int4`, for the codes that a linear map makes of a token's keys.

    A channel at the border of two codes may be rounded either way: only other codes than these count as stale.
    """
    num_heads, num_channels, width = index.key_ECM.shape
    num_rows = len(rows.requests_R)
    num_splits = num_splits_for(num_rows, max_len, MIN_SPLIT_LEN, k_SHD.device)
    _refresh_codes_kernel[(num_rows, num_splits)](
        k_SHD,
        index.key_ECM,
        index.low_EC,
        index.step_EC,
        codes_SEB,
        rows.requests_R,
        rows.lens_R,
        rows.slot_table,
        current_S,
        step_1,
        stale_1,
        period,
        rows.slot_table.stride(0),
        k_SHD.stride(0),
        E=num_heads,
        C=num_channels,
        HALF=num_channels // 2,
        BLOCK_HALF=max(16, triton.next_power_of_2(num_channels // 2)),
        WIDTH=width,
        BLOCK_K=BLOCK_K,
        BLOCK_M=32,
        NUM_SPLITS=num_splits,
        IS_LAST=is_last,
        num_warps=4,
    )


@triton.jit
def _codes_of(
    k_ptr,
    slot,
    written,
    map_ptr,
    low_ptr,
    step_ptr,
    stride_k_slot,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Codes int32 [BLOCK_M, BLOCK_HALF] of half of the channels, whose maps and ranges begin at the pointers."""
    c = tl.arange(0, BLOCK_HALF)
    x = tl.zeros([BLOCK_M, BLOCK_HALF], tl.float32)
    for start in range(0, WIDTH, BLOCK_K):
        at = start + tl.arange(0, BLOCK_K)
        k_at = k_ptr + slot[:, None] * stride_k_slot + at[None, :]
        k = tl.load(k_at, mask=written[:, None] & (at < WIDTH)[None, :], other=0.0).to(tl.float32)
        m_at = map_ptr + c[None, :] * WIDTH + at[:, None]
        m = tl.load(m_at, mask=(c < HALF)[None, :] & (at < WIDTH)[:, None], other=0.0)
        x = tl.dot(k, m, acc=x, input_precision="ieee")
    low = tl.load(low_ptr + c, mask=c < HALF, other=0.0)
    step = tl.load(step_ptr + c, mask=c < HALF, other=1.0)
    scaled = tl.div_rn(x - low[None, :], tl.broadcast_to(step[None, :], x.shape))
    return tl.minimum(tl.maximum(tl.floor(scaled + 0.5), 0.0), 15.0).to(tl.int32)


@triton.jit
def _refresh_codes_kernel(
    k_ptr,
    map_ptr,
    low_ptr,
    ranges_ptr,
    codes_ptr,
    requests_ptr,
    lens_ptr,
    slot_table_ptr,
    current_ptr,
    step_ptr,
    stale_ptr,
    period,
    stride_slot_table,
    stride_k_slot,
    E: tl.constexpr,
    C: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    num_keys = tl.load(lens_ptr + row)
    slots_ptr = slot_table_ptr + tl.load(requests_ptr + row).to(tl.int64) * stride_slot_table
    phase = (tl.load(step_ptr) % period).to(tl.int32)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_M)
    c = tl.arange(0, BLOCK_HALF)
    for start in range(begin, end, BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        live = j < end
        slot = tl.load(slots_ptr + j, mask=live, other=0).to(tl.int64)
        is_current = tl.load(current_ptr + slot, mask=live, other=1) != 0
        absent = live & (is_current == 0)
        checked = live & is_current & (j % period == phase)
        written = absent | checked
        if tl.max(written.to(tl.int32), 0) > 0:
            inside = written[:, None] & (c < HALF)[None, :]
            differs = tl.zeros([BLOCK_M], tl.int32)
            for e in range(E):
                first = e * C
                low_half = _codes_of(
                    k_ptr,
                    slot,
                    written,
                    map_ptr + first * WIDTH,
                    low_ptr + first,
                    ranges_ptr + first,
                    stride_k_slot,
                    HALF,
                    BLOCK_HALF,
                    WIDTH,
                    BLOCK_K,
                    BLOCK_M,
                )
                high_half = _codes_of(
                    k_ptr,
                    slot,
                    written,
                    map_ptr + (first + HALF) * WIDTH,
                    low_ptr + first + HALF,
                    ranges_ptr + first + HALF,
                    stride_k_slot,
                    HALF,
                    BLOCK_HALF,
                    WIDTH,
                    BLOCK_K,
                    BLOCK_M,
                )
                code_at = codes_ptr + (slot * E + e)[:, None] * HALF + c[None, :]
                held = tl.load(code_at, mask=inside, other=0).to(tl.int32)
                away = tl.maximum(tl.abs((held & 15) - low_half), tl.abs((held >> 4) - high_half))
                differs |= tl.max((inside & (away > 1)).to(tl.int32), 1)
                tl.store(code_at, (low_half | (high_half << 4)).to(tl.uint8), mask=inside)
            num_stale = tl.sum(tl.where(checked, differs, 0), 0)
            if num_stale > 0:
                tl.atomic_add(stale_ptr, num_stale.to(tl.int64))
            if IS_LAST:
                tl.store(current_ptr + slot, tl.full([BLOCK_M], 1, tl.uint8), mask=absent)
