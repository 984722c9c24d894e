"""Triton twin of `reference.rotate_copy`: every layer in one launch, through tables of pool addresses.

Dims: L layers, S pool slots, N pages, P page size, H KV heads, D, E head dims of K and V, T tokens,
      F rotary_dim / 2, M = T * H rows, one per token and head
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import check_disjoint, check_rotate_copy
from .triton_common import TRITON_DTYPES, narrow, pool_strides, soft_bits

POOL_ALIGNMENT = 16  # bytes; an address from a table carries no alignment, so the kernel is told

_UINT_OF_SIZE = {1: tl.uint8, 2: tl.uint16, 4: tl.uint32}


@dataclass(frozen=True)
class PoolTable:
    """The pools of all layers and their addresses, built once per server: pools never move."""

    pools: tuple[Tensor, ...]  # one per layer, alike in shape, strides and dtype
    pointers_L: Tensor  # int64, on the pools' device

    @classmethod
    def of(cls, pools: Sequence[Tensor]) -> PoolTable:
        """Raises ValueError if the pools differ in more than their address, or begin at an odd one."""
        first = pools[0]
        for layer, pool in enumerate(pools):
            if (pool.shape, pool.stride(), pool.dtype) != (first.shape, first.stride(), first.dtype):
                raise ValueError(
                    f"pool of layer {layer} is {pool.dtype} {tuple(pool.shape)}, "
                    f"layer 0 is {first.dtype} {tuple(first.shape)}; give each kind a table of its own"
                )
        pointers = torch.tensor([pool.data_ptr() for pool in pools], dtype=torch.int64)
        if bool((pointers % POOL_ALIGNMENT).any()):
            raise ValueError(
                f"a pool does not begin at a multiple of {POOL_ALIGNMENT} bytes; copy it to one that does"
            )
        return cls(tuple(pools), pointers.to(first.device))


def rotate_copy(
    k_pools: Tensor | Sequence[Tensor] | PoolTable,
    v_pools: Tensor | Sequence[Tensor] | PoolTable,
    src_slots_T: Tensor,
    dst_slots_T: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    is_neox: bool = True,
    check_slots: bool = False,
) -> None:
    """Copies K (rotated by delta) and V from source to destination slots of every layer, in place.

    Contract of `reference.rotate_copy`; float32 angles; pools float32, float16, bfloat16 or float8. Pass
    `PoolTable`s to build the address tables once. `check_slots` makes overlapping slots a ValueError at the
    price of a synchronisation; without it the caller answers for them.
    """
    k_table, v_table = _table(k_pools), _table(v_pools)
    check_rotate_copy(k_table.pools, v_table.pools, src_slots_T, dst_slots_T, cos_TF, sin_TF)
    if check_slots:
        check_disjoint(src_slots_T, dst_slots_T)
    k_pool, v_pool = k_table.pools[0], v_table.pools[0]
    num_tokens, num_heads, half = src_slots_T.shape[0], k_pool.shape[-2], cos_TF.shape[-1]
    if num_tokens == 0:
        return
    page_size = k_pool.shape[1] if k_pool.dim() == 4 else 1
    num_still = k_pool.shape[-1] - 2 * half
    # a thread holds a few vectors of every row of its tile: wide heads take fewer rows
    block_m = max(8, min(64, 2048 // triton.next_power_of_2(k_pool.shape[-1])))
    grid = (triton.cdiv(num_tokens * num_heads, block_m), len(k_table.pools))
    _rotate_copy_kernel[grid](
        k_table.pointers_L,
        v_table.pointers_L,
        src_slots_T,
        dst_slots_T,
        cos_TF.contiguous(),
        sin_TF.contiguous(),
        num_tokens,
        *pool_strides(k_pool, page_size),
        *pool_strides(v_pool, page_size),
        0 if cos_TF.shape[0] < num_tokens else half,
        H=num_heads,
        F=half,
        BLOCK_F=triton.next_power_of_2(max(half, 1)),
        NUM_STILL=num_still,
        BLOCK_STILL=triton.next_power_of_2(max(num_still, 1)),
        E=v_pool.shape[-1],
        BLOCK_E=triton.next_power_of_2(v_pool.shape[-1]),
        K_DTYPE=TRITON_DTYPES[k_pool.dtype],
        V_BITS=_UINT_OF_SIZE[v_pool.element_size()],
        PAGE_SIZE=page_size,
        IS_NEOX=is_neox,
        SOFT_BITS=soft_bits(k_pool.dtype),
        BLOCK_M=block_m,
        num_warps=4,
    )


def cached_cos_sin(cos_sin_cache: Tensor, old_T: Tensor, new_T: Tensor) -> tuple[Tensor, Tensor]:
    """Triton twin of `reference.cached_cos_sin` for a float32 table [P, 2F]: float32 [T, F] each, in one launch.

    Positions are int64 and lie in the table: the caller answers for that.
    """
    num_tokens, half = old_T.shape[0], cos_sin_cache.shape[-1] // 2
    # each at an address of its own: the copy is compiled for operands that begin at multiples of 16 bytes
    cos_TF, sin_TF = (
        torch.empty((num_tokens, half), dtype=torch.float32, device=old_T.device) for _ in range(2)
    )
    if num_tokens:
        block_f = triton.next_power_of_2(max(half, 1))
        block_t = max(1, 1024 // block_f)
        _cos_sin_kernel[(triton.cdiv(num_tokens, block_t),)](
            cos_sin_cache,
            old_T,
            new_T,
            cos_TF,
            sin_TF,
            num_tokens,
            cos_sin_cache.stride(0),
            F=half,
            BLOCK_F=block_f,
            BLOCK_T=block_t,
        )
    return cos_TF, sin_TF


def warm_up(k_table: PoolTable, v_table: PoolTable, cos_sin_cache: Tensor | None, *, is_neox: bool) -> None:
    """Compile what serving launches, by moving a slot that nobody reads onto itself: slot 0, the host's padding.

    cos_sin_cache: the layers' table of angles [P, 2F]; None for layers whose keys are not rotated.
    """
    slot = torch.zeros(1, dtype=torch.int64, device=k_table.pointers_L.device)
    if cos_sin_cache is None:
        cos, sin = torch.empty((2, 1, 0), device=slot.device)
    else:
        cos, sin = cached_cos_sin(cos_sin_cache, slot, slot)
    # the types that serving has: slots of homes are int64, the host's page table is int32
    rotate_copy(k_table, v_table, slot, slot.int(), cos, sin, is_neox=is_neox)


def _table(pools: Tensor | Sequence[Tensor] | PoolTable) -> PoolTable:
    if isinstance(pools, PoolTable):
        return pools
    return PoolTable.of([pools] if isinstance(pools, Tensor) else pools)


# positions are parts of one upload and begin anywhere in it
@triton.jit(
    do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["old_positions", "new_positions"]
)
def _cos_sin_kernel(
    table,
    old_positions,
    new_positions,
    cos_out,
    sin_out,
    num_tokens,
    stride_position,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    live = token < num_tokens
    old = tl.load(old_positions + token, mask=live, other=0).to(tl.int64) * stride_position
    new = tl.load(new_positions + token, mask=live, other=0).to(tl.int64) * stride_position
    i = tl.arange(0, BLOCK_F)
    inside = live[:, None] & (i < F)[None, :]
    # products of float32 are exact in float64, so a fused multiply-add rounds as the reference does
    co = tl.load(table + old[:, None] + i[None, :], mask=inside, other=1.0).to(tl.float64)
    so = tl.load(table + old[:, None] + F + i[None, :], mask=inside, other=0.0).to(tl.float64)
    cn = tl.load(table + new[:, None] + i[None, :], mask=inside, other=1.0).to(tl.float64)
    sn = tl.load(table + new[:, None] + F + i[None, :], mask=inside, other=0.0).to(tl.float64)
    square = co * co + so * so
    out = token.to(tl.int64)[:, None] * F + i[None, :]
    tl.store(cos_out + out, ((cn * co + sn * so) / square).to(tl.float32), mask=inside)
    tl.store(sin_out + out, ((sn * co - cn * so) / square).to(tl.float32), mask=inside)


# one compiled kernel for any number of tokens: lengths of serving must not reach the compiler
@triton.jit(do_not_specialize=["num_tokens"])
def _rotate_copy_kernel(
    k_pointers,
    v_pointers,
    src_slots,
    dst_slots,
    cos_table,
    sin_table,
    num_tokens,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_angle,
    H: tl.constexpr,
    F: tl.constexpr,
    BLOCK_F: tl.constexpr,
    NUM_STILL: tl.constexpr,
    BLOCK_STILL: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    K_DTYPE: tl.constexpr,
    V_BITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    IS_NEOX: tl.constexpr,
    SOFT_BITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    layer = tl.program_id(1)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    token, head = m // H, (m % H).to(tl.int64)
    live = token < num_tokens
    src = tl.load(src_slots + token, mask=live, other=0).to(tl.int64)
    dst = tl.load(dst_slots + token, mask=live, other=0).to(tl.int64)

    k_pool = tl.multiple_of(tl.load(k_pointers + layer).to(tl.pointer_type(K_DTYPE)), 16)
    k_src = src // PAGE_SIZE * stride_k_page + src % PAGE_SIZE * stride_k_slot + head * stride_k_head
    k_dst = dst // PAGE_SIZE * stride_k_page + dst % PAGE_SIZE * stride_k_slot + head * stride_k_head
    i = tl.arange(0, BLOCK_F)
    if IS_NEOX:
        first, second = i, i + F
    else:
        first, second = 2 * i, 2 * i + 1
    pair = live[:, None] & (i < F)[None, :]
    x_raw = tl.load(k_pool + k_src[:, None] + first[None, :], mask=pair, other=0.0)
    y_raw = tl.load(k_pool + k_src[:, None] + second[None, :], mask=pair, other=0.0)
    angle = token.to(tl.int64)[:, None] * stride_angle + i[None, :]
    cos = tl.load(cos_table + angle, mask=pair, other=1.0)
    sin = tl.load(sin_table + angle, mask=pair, other=0.0)
    x, y = x_raw.to(tl.float32), y_raw.to(tl.float32)
    still = (sin == 0.0) & (cos == 1.0)
    x_new = tl.where(still, x_raw, narrow(x * cos - y * sin, K_DTYPE, SOFT_BITS))
    y_new = tl.where(still, y_raw, narrow(y * cos + x * sin, K_DTYPE, SOFT_BITS))
    tl.store(k_pool + k_dst[:, None] + first[None, :], x_new, mask=pair)
    tl.store(k_pool + k_dst[:, None] + second[None, :], y_new, mask=pair)
    if NUM_STILL > 0:
        rest = tl.arange(0, BLOCK_STILL)
        keep = live[:, None] & (rest < NUM_STILL)[None, :]
        kept = tl.load(k_pool + k_src[:, None] + (2 * F + rest)[None, :], mask=keep, other=0.0)
        tl.store(k_pool + k_dst[:, None] + (2 * F + rest)[None, :], kept, mask=keep)

    v_pool = tl.multiple_of(tl.load(v_pointers + layer).to(tl.pointer_type(V_BITS)), 16)
    v_src = src // PAGE_SIZE * stride_v_page + src % PAGE_SIZE * stride_v_slot + head * stride_v_head
    v_dst = dst // PAGE_SIZE * stride_v_page + dst % PAGE_SIZE * stride_v_slot + head * stride_v_head
    e = tl.arange(0, BLOCK_E)
    inside = live[:, None] & (e < E)[None, :]
    value = tl.load(v_pool + v_src[:, None] + e[None, :], mask=inside, other=0)
    tl.store(v_pool + v_dst[:, None] + e[None, :], value, mask=inside)
