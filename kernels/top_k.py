"""Triton twin of `reference_select.top_k`: exact radix selection with the tie rule, in one or two stages.

Dims: R rows, X lists per row, W score width, K selected positions, Z chunks of a list

A float32 score becomes an unsigned key of the same order. Four passes of 8 bits find the key of the last chosen
score; one more writes the chosen positions in their order, the tied ones from the left. Long lists are cut into
chunks that keep their own best K in parallel, and the candidates of the chunks go through the same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MIN_CHUNK_LEN = 8192  # positions; a shorter chunk does not repay its candidates


def top_k(
    scores_RXW: Tensor,
    lens_R: Tensor,
    k: int,
    *,
    positions_RXW: Tensor | None = None,
    num_sinks: int = 0,
    window: int = 0,
    row_lens_R: Tensor | None = None,
    chunk_len: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The min(k, len) best positions of each list, ascending: int32 [R, X, K] padded by -1, counts int32 [R].

    Contract of `reference_select.top_k`; `scores_RXW` float32 without NaN in its first `lens_R[r]` columns, the
    rest is not read. `chunk_len` is the length from which a list is cut; None chooses it from K.
    """
    if scores_RXW.dtype != torch.float32 or scores_RXW.stride(-1) != 1:
        raise ValueError(
            f"scores {scores_RXW.dtype} of strides {scores_RXW.stride()}: float32, contiguous last dim"
        )
    num_rows, num_lists, width = scores_RXW.shape
    chosen = torch.empty((num_rows, num_lists, k), dtype=torch.int32, device=scores_RXW.device)
    counts = lens_R.clamp(max=k).int()
    if chosen.numel() == 0:
        return chosen, counts
    if chunk_len is None:
        chunk_len = max(MIN_CHUNK_LEN, 4 * triton.next_power_of_2(k))
    row_lens = lens_R if row_lens_R is None else row_lens_R
    num_chunks = triton.cdiv(width, chunk_len)
    if num_chunks <= 1:
        _select(scores_RXW, positions_RXW, lens_R, row_lens, chosen, None, k, num_sinks, window, 0, 0)
        return chosen, counts
    kept = min(k, chunk_len)
    candidates = chosen.new_empty((num_rows, num_lists, num_chunks * kept))
    candidate_scores = torch.empty_like(candidates, dtype=torch.float32)
    _select(
        scores_RXW,
        positions_RXW,
        lens_R,
        row_lens,
        candidates,
        candidate_scores,
        kept,
        num_sinks,
        window,
        chunk_len,
        0,
    )
    _select(candidate_scores, candidates, lens_R, row_lens, chosen, None, k, 0, 0, 0, chunk_len)
    return chosen, counts


def _select(
    scores_RXW: Tensor,
    positions_RXW: Tensor | None,
    lens_R: Tensor,
    row_lens_R: Tensor,
    out_positions: Tensor,
    out_scores: Tensor | None,
    k: int,
    num_sinks: int,
    window: int,
    chunk_len: int,
    merged_chunk_len: int,
) -> None:
    num_rows, num_lists, width = scores_RXW.shape
    num_chunks = triton.cdiv(width, chunk_len) if chunk_len else 1
    block = min(1024, max(16, triton.next_power_of_2(chunk_len or width)))
    _select_kernel[(num_rows, num_lists, num_chunks)](
        scores_RXW,
        positions_RXW,
        lens_R,
        row_lens_R,
        out_positions,
        out_scores,
        k,
        num_sinks,
        window,
        scores_RXW.stride(0),
        scores_RXW.stride(1),
        0 if positions_RXW is None else positions_RXW.stride(0),
        0 if positions_RXW is None else positions_RXW.stride(1),
        out_positions.stride(0),
        out_positions.stride(1),
        CHUNK_LEN=chunk_len,
        MERGED_CHUNK_LEN=merged_chunk_len,
        HAS_POSITIONS=positions_RXW is not None,
        BLOCK=block,
        num_warps=4,
    )


@triton.jit
def _load_keys(scores_ptr, positions_ptr, j, live, row_len, num_sinks, window, HAS_POSITIONS: tl.constexpr):
    """Position, score and unsigned sort key of the columns `j`; forced positions score +inf."""
    position = tl.load(positions_ptr + j, mask=live, other=0).to(tl.int32) if HAS_POSITIONS else j
    score = tl.load(scores_ptr + j, mask=live, other=0.0)
    forced = (position < num_sinks) | (position >= row_len - window)
    # adding +0 turns -0 into +0, which must tie with it
    score = tl.where(forced, float("inf"), score) + 0.0
    bits = score.to(tl.int32, bitcast=True)
    key = (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)
    return position, score, key


@triton.jit
def _select_kernel(
    scores_ptr,
    positions_ptr,
    lens_ptr,
    row_lens_ptr,
    out_positions_ptr,
    out_scores_ptr,
    k,
    num_sinks,
    window,
    stride_scores_row,
    stride_scores_list,
    stride_positions_row,
    stride_positions_list,
    stride_out_row,
    stride_out_list,
    CHUNK_LEN: tl.constexpr,
    MERGED_CHUNK_LEN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, which, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_columns = tl.load(lens_ptr + row).to(tl.int32)
    row_len = tl.load(row_lens_ptr + row).to(tl.int32)
    if MERGED_CHUNK_LEN > 0:
        # every full chunk kept the same number, so the candidates of a row stand without gaps
        kept = tl.minimum(k, MERGED_CHUNK_LEN)
        num_columns = num_columns // MERGED_CHUNK_LEN * kept + tl.minimum(
            num_columns % MERGED_CHUNK_LEN, kept
        )
    begin = chunk * CHUNK_LEN
    end = num_columns
    if CHUNK_LEN > 0:
        end = tl.minimum(begin + CHUNK_LEN, num_columns)
    if begin > 0 and begin >= end:
        return
    wanted = tl.minimum(k, tl.maximum(end - begin, 0))
    scores_ptr += row * stride_scores_row + which * stride_scores_list
    if HAS_POSITIONS:
        positions_ptr += row * stride_positions_row + which * stride_positions_list
    out_at = row * stride_out_row + which * stride_out_list + chunk.to(tl.int64) * k

    # the key of the last chosen score, digit by digit; `remaining` of the scores with that key are chosen
    bins = tl.arange(0, 256)
    last = tl.full([], 0, tl.uint32)
    remaining = wanted
    for digit in tl.static_range(4):
        count = tl.zeros([256], tl.int32)
        for start in range(begin, end, BLOCK):
            j = start + tl.arange(0, BLOCK)
            live = j < end
            _, _, key = _load_keys(
                scores_ptr, positions_ptr, j, live, row_len, num_sinks, window, HAS_POSITIONS
            )
            if digit > 0:
                live = live & ((key >> (32 - 8 * digit)) == last)
            count += tl.histogram(((key >> (24 - 8 * digit)) & 255).to(tl.int32), 256, mask=live)
        at_least = tl.cumsum(count, 0, reverse=True)
        chosen_bin = tl.maximum(tl.sum((at_least >= remaining).to(tl.int32), 0) - 1, 0)
        remaining -= tl.sum(tl.where(bins > chosen_bin, count, 0), 0)
        last = (last << 8) | chosen_bin.to(tl.uint32)

    num_chosen = tl.full([], 0, tl.int32)
    num_tied = tl.full([], 0, tl.int32)
    for start in range(begin, end, BLOCK):
        j = start + tl.arange(0, BLOCK)
        live = j < end
        position, score, key = _load_keys(
            scores_ptr, positions_ptr, j, live, row_len, num_sinks, window, HAS_POSITIONS
        )
        tied = live & (key == last)
        tie_rank = num_tied + tl.cumsum(tied.to(tl.int32), 0)
        take = (live & (key > last)) | (tied & (tie_rank <= remaining))
        rank = num_chosen + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out_positions_ptr + out_at + rank, position, mask=take)
        if CHUNK_LEN > 0:
            tl.store(out_scores_ptr + out_at + rank, score, mask=take)
        num_chosen += tl.sum(take.to(tl.int32), 0)
        num_tied += tl.sum(tied.to(tl.int32), 0)
    if CHUNK_LEN == 0:
        for start in range(wanted, k, BLOCK):
            j = start + tl.arange(0, BLOCK)
            tl.store(out_positions_ptr + out_at + j, tl.full([BLOCK], -1, tl.int32), mask=j < k)
