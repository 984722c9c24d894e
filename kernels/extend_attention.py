"""Triton twin of `reference.extend_attention`: causal attention of ragged virtual rows over paged KV.

Dims as in reference.py, and: M rows of a query tile. Tile row m is token m // G of the virtual row and query
head m % G of the KV head, so a block of keys is read once for the whole group.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .reference import check_attention
from .triton_common import LOG2E, dot, load_bias, load_entry, narrow, pool_strides, row_bounds, soft_bits

# of a thread; without it ptxas halves the registers for a second block and spills
MAX_REGISTERS = 240


def extend_attention(
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    qo_indptr_R1: Tensor,
    *,
    scale: float,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
    max_q_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of ragged virtual rows; returns out [T, Q, E] in q's dtype and lse float32 [T, Q].

    Contract of `reference.extend_attention`, sums in float32; a row with more queries than keys is not
    detected here. `max_q_len` is the longest row; None reads it from the device and synchronises.
    """
    check_attention(q_TQD, k_SHD, v_SHE, page_size)
    num_tokens, num_q_heads, head_dim = q_TQD.shape
    num_heads, value_dim, num_rows = k_SHD.shape[-2], v_SHE.shape[-1], qo_indptr_R1.shape[0] - 1
    out = torch.empty((num_tokens, num_q_heads, value_dim), dtype=q_TQD.dtype, device=q_TQD.device)
    lse = torch.empty((num_tokens, num_q_heads), dtype=torch.float32, device=q_TQD.device)
    if num_tokens == 0:
        return out, lse
    if max_q_len is None:
        max_q_len = int(qo_indptr_R1.diff().max())
    group = num_q_heads // num_heads
    block_m, block_n, num_warps, num_stages = extend_block(q_TQD)
    _extend_kernel[(triton.cdiv(max_q_len * group, block_m), num_heads, num_rows)](
        q_TQD,
        k_SHD,
        v_SHE,
        tags_S,
        kv_indices,
        kv_indptr_R1,
        kv_lens_R,
        qo_indptr_R1,
        out,
        lse,
        scale * LOG2E,
        alpha * LOG2E,
        beta * LOG2E,
        q_TQD.stride(0),
        q_TQD.stride(1),
        *pool_strides(k_SHD, page_size),
        *pool_strides(v_SHE, page_size),
        num_q_heads,
        G=group,
        D=head_dim,
        BLOCK_D=max(16, triton.next_power_of_2(head_dim)),
        E=value_dim,
        BLOCK_E=max(16, triton.next_power_of_2(value_dim)),
        BLOCK_M=block_m,
        BLOCK_N=block_n,
        PAGE_SIZE=page_size,
        HAS_TAGS=tags_S is not None,
        HAS_LENS=kv_lens_R is not None,
        SOFT_BITS=soft_bits(q_TQD.dtype),
        num_warps=num_warps,
        num_stages=num_stages,
        maxnreg=MAX_REGISTERS,
    )
    return out, lse


def extend_block(q_TQD: Tensor) -> tuple[int, int, int, int]:
    """Tile rows, keys per block, warps, pipeline stages: as aot_table.json allows without a spill."""
    head_dim = triton.next_power_of_2(q_TQD.shape[-1])
    if q_TQD.element_size() == 4:
        return 32, 32 if head_dim <= 64 else 16, 8, 1
    if head_dim <= 128:
        return 128, 64 if head_dim <= 64 else 32, 8, 2
    return 64, 32, 8, 2


@triton.jit
def _extend_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    tags_ptr,
    indices_ptr,
    kv_indptr_ptr,
    lens_ptr,
    qo_indptr_ptr,
    out_ptr,
    lse_ptr,
    scale_log2e,
    alpha_log2e,
    beta_log2e,
    stride_q_token,
    stride_q_head,
    stride_k_page,
    stride_k_slot,
    stride_k_head,
    stride_v_page,
    stride_v_slot,
    stride_v_head,
    num_q_heads,
    G: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    E: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PAGE_SIZE: tl.constexpr,
    HAS_TAGS: tl.constexpr,
    HAS_LENS: tl.constexpr,
    SOFT_BITS: tl.constexpr,
):
    tile = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2)
    q_first = tl.load(qo_indptr_ptr + row).to(tl.int64)
    num_queries = (tl.load(qo_indptr_ptr + row + 1).to(tl.int64) - q_first).to(tl.int32)
    if tile * BLOCK_M >= num_queries * G:
        return
    first, num_keys = row_bounds(kv_indptr_ptr, lens_ptr, row, PAGE_SIZE, HAS_LENS)
    entries = indices_ptr + first

    m, d, e = tile * BLOCK_M + tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_E)
    query, q_live = m // G, m // G < num_queries
    token = q_first + query
    q_head = head * G + m % G
    q = tl.load(
        q_ptr + token[:, None] * stride_q_token + q_head[:, None] * stride_q_head + d[None, :],
        mask=q_live[:, None] & (d < D)[None, :],
        other=0.0,
    )
    # keys:  [ 0 ................ num_keys - num_queries | ............ num_keys )
    #          seen by every query of the row              query i sees up to its own position
    position = num_keys - num_queries + query
    last_query = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // G, num_queries - 1)
    end = num_keys - num_queries + last_query + 1

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    for start in range(0, end, BLOCK_N):
        j = start + tl.arange(0, BLOCK_N)
        live = j < end
        page, offset = load_entry(entries, j, live, PAGE_SIZE)
        k_at = page * stride_k_page + offset * stride_k_slot + head * stride_k_head
        k = tl.load(k_ptr + k_at[None, :] + d[:, None], mask=live[None, :] & (d < D)[:, None], other=0.0)
        logits = dot(q, k.to(q.dtype), tl.zeros([BLOCK_M, BLOCK_N], tl.float32), SOFT_BITS) * scale_log2e
        if HAS_TAGS:
            logits += load_bias(tags_ptr, page, offset, live, alpha_log2e, beta_log2e, PAGE_SIZE)[None, :]
        seen = live[None, :] & (j[None, :] <= position[:, None])
        logits = tl.where(seen, logits, float("-inf"))

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

    out = narrow(acc / tl.where(total > 0.0, total, 1.0)[:, None], q.dtype, SOFT_BITS)
    lse = tl.where(total > 0.0, (top + tl.log2(total)) * 0.6931471805599453, float("-inf"))
    at = token * num_q_heads + q_head
    tl.store(out_ptr + at[:, None] * E + e[None, :], out, mask=q_live[:, None] & (e < E)[None, :])
    tl.store(lse_ptr + at, lse, mask=q_live)
