"""Triton twin of `reference.decode_attention`: split rows, packed query groups, a merge of partial states.

Dims as in reference.py, and: C splits of a row. A program serves one row, one KV head and one split, so a key
is read once for its whole query group. Lengths are read on the device and nothing synchronises: a captured
graph replays with other rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import check_attention
from .triton_common import (
    LOG2E,
    dot,
    load_bias,
    load_entry,
    narrow,
    num_splits_for,
    pool_strides,
    row_bounds,
    soft_bits,
    split_bounds,
)

MIN_SPLIT_LEN = 256  # keys; a shorter split does not repay its partial state


@dataclass(frozen=True)
class Listed:
    """Rows that read entries of tables by request slot in place of their whole list. Pages of one slot.

    Row r does where lens_R[r] > 0: entries of `shared`, or of `own` where that is given and fresh_R[r] (uint8) is 0.
    """

    requests_R: Tensor  # int32
    lens_R: Tensor  # int32
    shared_slots: Tensor  # int32 [B, X, M], X one or the number of KV heads
    shared_counts: Tensor  # int32 [B]
    own_slots: Tensor | None = None
    own_counts: Tensor | None = None
    fresh_R: Tensor | None = None

    NONE: ClassVar[tuple[Any, ...]] = (*(None,) * 7, *(0,) * 4)

    def operands(self) -> tuple[Any, ...]:
        """As `_decode_split_kernel` takes them."""
        return (
            self.requests_R,
            self.lens_R,
            self.shared_slots,
            self.shared_counts,
            self.own_slots,
            self.own_counts,
            self.fresh_R,
            *_list_strides(self.shared_slots),
            *((0, 0) if self.own_slots is None else _list_strides(self.own_slots)),
        )


def _list_strides(slots: Tensor) -> tuple[int, int]:
    """Elements between request slots, and between the lists of KV heads."""
    return slots.stride(0), 0 if slots.shape[1] == 1 else slots.stride(1)


def decode_attention(
    q_RQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    scale: float,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
    max_len: int | None = None,
    num_splits: int | None = None,
    listed: Listed | None = None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row; returns out [R, Q, E] in q's dtype and lse float32 [R, Q].

    With `listed`, rows of which it knows take their entries from a table, and the others as without.

    Contract of `reference.decode_attention`, sums in float32. `max_len` bounds the rows on the host and only
    chooses the number of splits; it defaults to the number of entries. A captured graph keeps that number.
    """
    check_attention(q_RQD, k_SHD, v_SHE, page_size)
    num_rows, num_q_heads, head_dim = q_RQD.shape
    num_heads, value_dim = k_SHD.shape[-2], v_SHE.shape[-1]
    if max_len is None:
        max_len = kv_indices.shape[-1] * page_size
    if num_splits is None:
        num_splits = num_splits_for(num_rows * num_heads, max_len, MIN_SPLIT_LEN, q_RQD.device)
    if out is None:
        out = torch.empty((num_rows, num_q_heads, value_dim), dtype=q_RQD.dtype, device=q_RQD.device)
    lse = torch.empty((num_rows, num_q_heads), dtype=torch.float32, device=q_RQD.device)
    if num_rows == 0:
        return out, lse
    part_out, part_lse = out[:, :, None], lse[:, :, None]
    if num_splits > 1:
        part_out = out.new_empty((num_rows, num_q_heads, num_splits, value_dim), dtype=torch.float32)
        part_lse = lse.new_empty((num_rows, num_q_heads, num_splits))
    group = num_q_heads // num_heads
    block_n, num_warps, num_stages = decode_block(k_SHD)
    _decode_split_kernel[(num_rows, num_heads, num_splits)](
        q_RQD,
        k_SHD,
        v_SHE,
        tags_S,
        kv_indices,
        kv_indptr_R1,
        kv_lens_R,
        *(Listed.NONE if listed is None else listed.operands()),
        part_out,
        part_lse,
        scale * LOG2E,
        alpha * LOG2E,
        beta * LOG2E,
        q_RQD.stride(0),
        q_RQD.stride(1),
        *pool_strides(k_SHD, page_size),
        *pool_strides(v_SHE, page_size),
        kv_indices.stride(0) if kv_indices.dim() == 2 else 0,
        part_out.stride(0),
        part_out.stride(1),
        part_lse.stride(0),
        part_lse.stride(1),
        G=group,
        BLOCK_G=max(16, triton.next_power_of_2(group)),
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        E=value_dim,
        BLOCK_E=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_N=block_n,
        NUM_SPLITS=num_splits,
        PAGE_SIZE=page_size,
        HAS_TAGS=tags_S is not None,
        HAS_LENS=kv_lens_R is not None,
        HAS_LIST=listed is not None,
        HAS_OWN=listed is not None and listed.own_slots is not None,
        SOFT_BITS=soft_bits(q_RQD.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
    )
    if num_splits > 1:
        _merge_splits_kernel[(num_rows, num_q_heads)](
            part_out,
            part_lse,
            out,
            lse,
            num_q_heads,
            E=value_dim,
            BLOCK_E=triton.next_power_of_2(value_dim),
            NUM_SPLITS=num_splits,
            SOFT_BITS=soft_bits(q_RQD.dtype),
            num_warps=2,
        )
    return out, lse


def decode_block(k_SHD: Tensor) -> tuple[int, int, int]:
    """Keys per block, warps, pipeline stages: as aot_table.json allows without a spill."""
    head_dim = triton.next_power_of_2(k_SHD.shape[-1])
    if k_SHD.element_size() == 4:
        return (32, 4, 2) if head_dim <= 64 else (32, 8, 1) if head_dim <= 128 else (16, 8, 1)
    return (64, 4, 2) if head_dim <= 128 else (32, 8, 2)


@triton.jit
def _decode_split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tags_ptr,
    indices_ptr,
    indptr_ptr,
    lens_ptr,
    requests_ptr,
    listed_lens_ptr,
    shared_ptr,
    shared_counts_ptr,
    own_ptr,
    own_counts_ptr,
    fresh_ptr,
    stride_shared_row,
    stride_shared_list,
    stride_own_row,
    stride_own_list,
    out_ptr,
    lse_ptr,
    scale_log2e,
    alpha_log2e,
    beta_log2e,
    stride_q_row,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    stride_indices_head,
    stride_out_row,
    stride_out_head,
    stride_lse_row,
    stride_lse_head,
    G: tl.constexpr,
    BLOCK_G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_N: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    HAS_LIST: tl.constexpr,
    HAS_OWN: tl.constexpr,
    SOFT_BITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first, num_keys = row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    if HAS_LIST:
        request = tl.load(requests_ptr + row).to(tl.int64)
        is_whole = tl.load(listed_lens_ptr + row) == 0
        is_shared = tl.load(listed_lens_ptr + row) > 0
        shared = shared_ptr + request * stride_shared_row + head * stride_shared_list
        num_listed = tl.load(shared_counts_ptr + request)
        if HAS_OWN:
            is_own = is_shared & (tl.load(fresh_ptr + row) == 0)
            is_shared = is_shared & (tl.load(fresh_ptr + row) != 0)
            own = own_ptr + request * stride_own_row + head * stride_own_list
            num_listed = tl.where(is_own, tl.load(own_counts_ptr + request), num_listed)
        num_keys = tl.where(is_whole, num_keys, num_listed)
    begin, end = split_bounds(num_keys, split, NUM_SPLITS, BLOCK_N)
    entries = indices_ptr + head * stride_indices_head + first

    g, d, e = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    q_head = head * G + g
    q_live = (g < G)[:, None]
    q = tl.load(
        q_ptr + row * stride_q_row + q_head[:, None] * stride_q_head + d[None, :],
        mask=q_live & (d < D)[None, :],
        other=0.0,
    )
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_E], tl.float32)
    for start in range(begin, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        live = j < end
        if HAS_LIST:
            page, offset = load_entry(entries, j, live & is_whole, PAGE_SIZE)
            page += tl.load(shared + j, mask=live & is_shared, other=0).to(tl.int64)
            if HAS_OWN:
                page += tl.load(own + j, mask=live & is_own, other=0).to(tl.int64)
        else:
            page, offset = load_entry(entries, j, live, PAGE_SIZE)
        k_at = page * stride_k_page + offset * stride_k_slot + head * stride_k_head
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
        logits = dot(q, k.to(q.dtype), tl.zeros([BLOCK_G, BLOCK_N], tl.float32), SOFT_BITS) * scale_log2e
        if HAS_TAGS:
            logits += load_bias(tags_ptr, page, offset, live, alpha_log2e, beta_log2e, PAGE_SIZE)[None, :]
        logits = tl.where(live[None, :], logits, float("-inf"))

        new_top = tl.maximum(top, tl.max(logits, 1))
        # -inf - -inf is NaN: a bias may hide every key so far
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
        p = tl.exp2(logits - base[:, None])
        shrink = tl.exp2(top - base)
        v_at = page * stride_v_page + offset * stride_v_slot + head * stride_v_head
        v = tl.load(v_ptr + v_at[:, None] + e[None, :], mask=live[:, None] & (e < E)[None, :], other=0.0)
        acc = dot(narrow(p, q.dtype, SOFT_BITS), v.to(q.dtype), acc * shrink[:, None], SOFT_BITS)
        total = total * shrink + tl.sum(p, 1)
        top = new_top

    out = acc / tl.where(total > 0.0, total, 1.0)[:, None]
    if NUM_SPLITS == 1:
        out = narrow(out, q.dtype, SOFT_BITS)
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    out_at = row * stride_out_row + q_head * stride_out_head + split * E
    tl.store(out_ptr + out_at[:, None] + e[None, :], out, mask=q_live & (e < E)[None, :])
    tl.store(lse_ptr + row * stride_lse_row + q_head * stride_lse_head + split, lse, mask=g < G)


@triton.jit
def _merge_splits_kernel(
    part_out_ptr,
    part_lse_ptr,
    out_ptr,
    lse_ptr,
    num_q_heads,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    SOFT_BITS: tl.constexpr,
):
    """`reference.merge_states` over the splits of one row and query head."""
    at = tl.program_id(0).to(tl.int64) * num_q_heads + tl.program_id(1)
    c, e = tl.arange(0, NUM_SPLITS), tl.arange(0, BLOCK_E)
    lse = tl.load(part_lse_ptr + at * NUM_SPLITS + c)
    top = tl.max(lse, 0)
    weight = tl.exp2((lse - tl.where(top == float("-inf"), 0.0, top)) * 1.4426950408889634)
    total = tl.sum(weight, 0)
    part = tl.load(
        part_out_ptr + (at * NUM_SPLITS + c)[:, None] * E + e[None, :], mask=(e < E)[None, :], other=0.0
    )
    out = tl.sum(part * weight[:, None], 0) / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + at * E + e, narrow(out, out_ptr.dtype.element_ty, SOFT_BITS), mask=e < E)
    tl.store(lse_ptr + at, tl.where(total > 0.0, top + tl.log(total), float("-inf")))
