"""Triton twin of `reference_select.write_int4`: the 4-bit key copy that a scan reads instead of the keys.

Dims: S pool slots, T tokens, H KV heads, D head dim, M = T * H rows, one per token and head
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .reference_select import Int4Keys


def write_int4(keys: Int4Keys, slots_T: Tensor, k_THD: Tensor) -> None:
    """Quantises `k_THD` into the slots of the copy, in place. Raises ValueError if the heads do not fit."""
    num_tokens, num_heads, head_dim = k_THD.shape
    half = head_dim // 2
    if keys.codes.shape[1:] != (num_heads, half) or k_THD.stride(-1) != 1:
        raise ValueError(
            f"keys {tuple(k_THD.shape)} do not fit an int4 copy of codes {tuple(keys.codes.shape)}: "
            "[T, H, D] with a contiguous head dim for codes [S, H, D / 2]"
        )
    if num_tokens == 0:
        return
    block_m = 32
    _write_int4_kernel[(triton.cdiv(num_tokens * num_heads, block_m),)](
        k_THD,
        slots_T,
        keys.codes,
        keys.ranges,
        num_tokens * num_heads,
        k_THD.stride(0),
        k_THD.stride(1),
        H=num_heads,
        HALF=half,
        BLOCK_HALF=triton.next_power_of_2(half),
        BLOCK_M=block_m,
        num_warps=4,
    )


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


@triton.jit
def _write_int4_kernel(
    k_ptr,
    slots_ptr,
    codes_ptr,
    ranges_ptr,
    num_rows,
    stride_k_token,
    stride_k_head,
    H: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    live = m < num_rows
    token, head = (m // H).to(tl.int64), m % H
    i = tl.arange(0, BLOCK_HALF)
    inside = live[:, None] & (i < HALF)[None, :]
    source = k_ptr + (token * stride_k_token + head * stride_k_head)[:, None] + i[None, :]
    x = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(source + HALF, mask=inside, other=0.0).to(tl.float32)
    x_step, x_low = _range_of(x, live, inside)
    y_step, y_low = _range_of(y, live, inside)
    codes = _code_of(x, x_step, x_low) | (_code_of(y, y_step, y_low) << 4)

    slot = tl.load(slots_ptr + token, mask=live, other=0).to(tl.int64)
    at = slot * H + head
    tl.store(codes_ptr + at[:, None] * HALF + i[None, :], codes.to(tl.uint8), mask=inside)
    tl.store(ranges_ptr + at * 4, x_step, mask=live)
    tl.store(ranges_ptr + at * 4 + 1, x_low, mask=live)
    tl.store(ranges_ptr + at * 4 + 2, y_step, mask=live)
    tl.store(ranges_ptr + at * 4 + 3, y_low, mask=live)
