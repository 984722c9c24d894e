"""Triton twin of `reference_select.write_int4` in a decode step: what a row's keys lack of their 4-bit copy is written.

Dims: S pool slots, H KV heads, D head dim, R rows of the step
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .ops import Rows
from .reference_select import Int4Keys
from .triton_common import num_splits_for, split_bounds

MIN_SPLIT_LEN = 1024  # positions whose flags one program looks at


def refresh_int4(
    keys: Int4Keys,
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
    """Writes the copies that the rows' keys lack, by `current_S` (uint8), which a last layer's call then sets.

    Of every `period`-th position from step_1 % period (int64) on the copy is made anew too; what differed from what
    stood there is counted in `stale_1` (int64). Nothing is read of rows whose copies are all there but their flags.
    """
    _, num_heads, head_dim = k_SHD.shape
    num_rows, block_m = len(rows.requests_R), 32 if head_dim <= 128 else 16
    num_splits = num_splits_for(num_rows, max_len, MIN_SPLIT_LEN, k_SHD.device)
    _refresh_int4_kernel[(num_rows, num_splits)](
        k_SHD,
        keys.codes,
        keys.ranges,
        rows.requests_R,
        rows.lens_R,
        rows.slot_table,
        current_S,
        step_1,
        stale_1,
        period,
        rows.slot_table.stride(0),
        k_SHD.stride(0),
        k_SHD.stride(1),
        H=num_heads,
        HALF=head_dim // 2,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        BLOCK_M=block_m,
        NUM_SPLITS=num_splits,
        IS_LAST=is_last,
        num_warps=4,
    )


@triton.jit
def _refresh_int4_kernel(
    k_ptr,
    codes_ptr,
    ranges_ptr,
    requests_ptr,
    lens_ptr,
    slot_table_ptr,
    current_ptr,
    step_ptr,
    stale_ptr,
    period,
    stride_slot_table,
    stride_k_slot,
    stride_k_head,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    IS_LAST: tl.constexpr,
):
    row, split = tl.program_id(0), tl.program_id(1)
    num_keys = tl.load(lens_ptr + row)
    slots_ptr = slot_table_ptr + tl.load(requests_ptr + row).to(tl.int64) * stride_slot_table
    phase = (tl.load(step_ptr) % period).to(tl.int32)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_M)
    i = tl.arange(0, BLOCK_HALF)
    for start in range(begin, end, BLOCK_M):
        j = start + tl.arange(0, BLOCK_M)
        live = j < end
        slot = tl.load(slots_ptr + j, mask=live, other=0).to(tl.int64)
        is_current = tl.load(current_ptr + slot, mask=live, other=1) != 0
        absent = live & (is_current == 0)
        checked = live & is_current & (j % period == phase)
        written = absent | checked
        if tl.max(written.to(tl.int32), 0) > 0:
            inside = written[:, None] & (i < HALF)[None, :]
            differs = tl.zeros([BLOCK_M], tl.int32)
            for h in range(H):
                source = k_ptr + (slot * stride_k_slot + h * stride_k_head)[:, None] + i[None, :]
                x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
                y = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
                x_step, x_low = _range_of(x, written, inside)
                y_step, y_low = _range_of(y, written, inside)
                codes = (_code_of(x, x_step, x_low) | (_code_of(y, y_step, y_low) << 4)).to(tl.uint8)
                at = slot * H + h
                code_at, range_at = codes_ptr + at[:, None] * HALF + i[None, :], ranges_ptr + at * 4
                held = tl.load(code_at, mask=inside, other=0)
                changed = inside & (held != codes)
                differs |= tl.max(changed.to(tl.int32), 1)
                differs |= _differs(range_at, x_step, written) | _differs(range_at + 1, x_low, written)
                differs |= _differs(range_at + 2, y_step, written) | _differs(range_at + 3, y_low, written)
                tl.store(code_at, codes, mask=inside)
                tl.store(range_at, x_step, mask=written)
                tl.store(range_at + 1, x_low, mask=written)
                tl.store(range_at + 2, y_step, mask=written)
                tl.store(range_at + 3, y_low, mask=written)
            num_stale = tl.sum(tl.where(checked, differs, 0), 0)
            if num_stale > 0:
                tl.atomic_add(stale_ptr, num_stale.to(tl.int64))
            if IS_LAST:
                tl.store(current_ptr + slot, tl.full([BLOCK_M], 1, tl.uint8), mask=absent)


@triton.jit
def _differs(held_ptr, value, mask):
    return (mask & (tl.load(held_ptr, mask=mask, other=0.0) != value)).to(tl.int32)


@triton.jit
def _range_of(x, live, HALF_MASK):
    low = tl.min(tl.where(HALF_MASK, x, float("inf")), 1).to(tl.float16)
    high = tl.max(tl.where(HALF_MASK, x, float("-inf")), 1)
    low, high = tl.where(live, low, 0.0).to(tl.float16), tl.where(live, high, 0.0)
    step = tl.div_rn(high - low.to(tl.float32), tl.full(high.shape, 15.0, tl.float32)).to(tl.float16)
    return step, low


@triton.jit
def _code_of(x, step, low):
    divisor = tl.where(step == 0.0, 1.0, step.to(tl.float32))
    scaled = tl.div_rn(x - low.to(tl.float32)[:, None], tl.broadcast_to(divisor[:, None], x.shape))
    return tl.minimum(tl.maximum(tl.floor(scaled + 0.5), 0.0), 15.0).to(tl.int32)
