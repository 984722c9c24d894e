"""Triton twin of `reference_select.top_k`: exact radix selection with the tie rule, in one or two stages.

Dims: R rows, X lists per row, W score width, K selected positions, Z chunks of a list

A float32 score becomes an unsigned key of the same order. Four passes of 8 bits find the key of the last chosen
score; one more writes the chosen positions in their order, the tied ones from the left. Long lists are cut into
chunks that keep their own best K in parallel, and the candidates of the chunks go through the same kernel.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .triton_common import MAX_REGISTERS

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
        forced: dict[str, Any] = {"num_sinks": num_sinks, "window": window}
        _select(scores_RXW, positions_RXW, lens_R, row_lens, chosen, None, k, **forced)
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
        num_sinks=num_sinks,
        window=window,
        chunk_len=chunk_len,
    )
    _select(candidate_scores, candidates, lens_R, row_lens, chosen, None, k, merged_chunk_len=chunk_len)
    return chosen, counts


class TableOut(NamedTuple):
    """Where selected positions of a row go: to the place of its request slot, with their slots and their number."""

    rows_R: Tensor  # int32 [R], the request slot of each row; also where its pool stands
    positions: Tensor  # int32 [B, X, K]
    slots: Tensor
    counts: Tensor  # int32 [B]
    slot_table: Tensor  # int32 [B, positions]


def keep(
    worth_RXW: Tensor,
    lens_R: Tensor,
    out: TableOut,
    *,
    pool_BXM: Tensor,
    pool_lens_B: Tensor,
    pooled_R: Tensor,
    num_sinks: int,
    window: int | Tensor,
    chunk_len: int | None = None,
) -> None:
    """`ops.Ops.keep` for rows on a device: the best columns into tables, slots translated, in one launch or two.

    `worth_RXW` has the lists of `out`, or several of one list, which are summed. Rows of length 0 are left as they
    are. `window` is one number, or int32 [R].
    """
    num_rows, _, width = worth_RXW.shape
    num_lists, size = out.positions.shape[1:]
    if chunk_len is None:
        chunk_len = max(MIN_CHUNK_LEN, 4 * triton.next_power_of_2(size))
    words: dict[str, Any] = {
        "num_sinks": num_sinks,
        "window": window,
        "pool_lens": pool_lens_B,
        "pooled": pooled_R,
        "table": out,
    }
    num_chunks = triton.cdiv(width, chunk_len)
    if num_chunks <= 1:
        _select(worth_RXW, pool_BXM, lens_R, lens_R, out.positions, None, size, **words, num_lists=num_lists)
        return
    kept = min(size, chunk_len)
    shape = (num_rows, num_lists, num_chunks * kept)
    candidates = torch.empty(shape, dtype=torch.int32, device=worth_RXW.device)
    scores = torch.empty(shape, dtype=torch.float32, device=worth_RXW.device)
    _select(
        worth_RXW,
        pool_BXM,
        lens_R,
        lens_R,
        candidates,
        scores,
        kept,
        **words,
        num_lists=num_lists,
        chunk_len=chunk_len,
    )
    words |= {"num_sinks": 0, "window": 0}
    _select(
        scores,
        candidates,
        lens_R,
        lens_R,
        out.positions,
        None,
        size,
        **words,
        num_lists=num_lists,
        merged_chunk_len=chunk_len,
    )


def _select(
    scores_RXW: Tensor,
    positions: Tensor | None,
    lens_R: Tensor,
    row_lens_R: Tensor,
    out_positions: Tensor,
    out_scores: Tensor | None,
    k: int,
    *,
    num_sinks: int = 0,
    window: int | Tensor = 0,
    chunk_len: int = 0,
    merged_chunk_len: int = 0,
    num_lists: int | None = None,
    pool_lens: Tensor | None = None,
    pooled: Tensor | None = None,
    table: TableOut | None = None,
) -> None:
    num_rows, num_scores, width = scores_RXW.shape
    num_lists = num_scores if num_lists is None else num_lists
    num_chunks = triton.cdiv(width, chunk_len) if chunk_len else 1
    block = min(1024, max(16, triton.next_power_of_2(chunk_len or width)))
    _select_kernel[(num_rows, num_lists, num_chunks)](
        scores_RXW,
        positions,
        lens_R,
        row_lens_R,
        out_positions,
        out_scores,
        None if table is None else table.rows_R,
        pool_lens,
        pooled,
        None if table is None else table.slots,
        None if table is None else table.counts,
        None if table is None else table.slot_table,
        k,
        num_sinks,
        window,
        scores_RXW.stride(0),
        scores_RXW.stride(1),
        0 if positions is None else positions.stride(0),
        0 if positions is None or positions.shape[1] == 1 else positions.stride(1),
        out_positions.stride(0),
        out_positions.stride(1),
        0 if table is None else table.slot_table.stride(0),
        CHUNK_LEN=chunk_len,
        MERGED_CHUNK_LEN=merged_chunk_len,
        HAS_POSITIONS=positions is not None,
        HAS_TABLE=table is not None,
        HAS_WINDOWS=isinstance(window, Tensor),
        NUM_SUMMED=num_scores // num_lists,
        BLOCK=block,
        num_warps=4,
        maxnreg=MAX_REGISTERS,
    )


@triton.jit
def _load_keys(
    scores_ptr,
    stride_scores_list,
    positions_ptr,
    j,
    live,
    from_list,
    row_len,
    num_sinks,
    window,
    HAS_POSITIONS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    NUM_SUMMED: tl.constexpr,
):
    """Position, score and unsigned sort key of the columns `j`; forced positions score +inf."""
    position = j
    if HAS_POSITIONS:
        if HAS_TABLE:
            listed = tl.load(positions_ptr + j, mask=live & from_list, other=0).to(tl.int32)
            position = tl.where(from_list, listed, j)
        else:
            position = tl.load(positions_ptr + j, mask=live, other=0).to(tl.int32)
    score = tl.load(scores_ptr + j, mask=live, other=0.0)
    for at in tl.static_range(1, NUM_SUMMED):
        score += tl.load(scores_ptr + at * stride_scores_list + j, mask=live, other=0.0)
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
    rows_ptr,
    pool_lens_ptr,
    pooled_ptr,
    out_slots_ptr,
    out_counts_ptr,
    slot_table_ptr,
    k,
    num_sinks,
    window,
    stride_scores_row,
    stride_scores_list,
    stride_positions_row,
    stride_positions_list,
    stride_out_row,
    stride_out_list,
    stride_slot_table,
    CHUNK_LEN: tl.constexpr,
    MERGED_CHUNK_LEN: tl.constexpr,
    HAS_POSITIONS: tl.constexpr,
    HAS_TABLE: tl.constexpr,
    HAS_WINDOWS: tl.constexpr,
    NUM_SUMMED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, which, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64), tl.program_id(2)
    num_columns = tl.load(lens_ptr + row).to(tl.int32)
    row_len = tl.load(row_lens_ptr + row).to(tl.int32)
    at_row = row
    from_list = True
    if HAS_WINDOWS:
        window = tl.load(window + row)
    if HAS_TABLE:
        if num_columns == 0:
            return
        at_row = tl.load(rows_ptr + row).to(tl.int64)
        from_pool = tl.load(pooled_ptr + row) != 0
        num_columns = tl.where(from_pool, tl.load(pool_lens_ptr + at_row).to(tl.int32), num_columns)
        from_list = from_pool if MERGED_CHUNK_LEN == 0 else num_columns >= 0
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
    scores_ptr += row * stride_scores_row + which * NUM_SUMMED * stride_scores_list
    if HAS_POSITIONS:
        listed_row = at_row if MERGED_CHUNK_LEN == 0 else row
        positions_ptr += listed_row * stride_positions_row + which * stride_positions_list
    # chunks keep their candidates by row; what is selected in the end goes where the row's table is
    out_row = at_row if CHUNK_LEN == 0 else row
    out_at = out_row * stride_out_row + which * stride_out_list + chunk.to(tl.int64) * k

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
                scores_ptr,
                stride_scores_list,
                positions_ptr,
                j,
                live,
                from_list,
                row_len,
                num_sinks,
                window,
                HAS_POSITIONS,
                HAS_TABLE,
                NUM_SUMMED,
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
            scores_ptr,
            stride_scores_list,
            positions_ptr,
            j,
            live,
            from_list,
            row_len,
            num_sinks,
            window,
            HAS_POSITIONS,
            HAS_TABLE,
            NUM_SUMMED,
        )
        tied = live & (key == last)
        tie_rank = num_tied + tl.cumsum(tied.to(tl.int32), 0)
        take = (live & (key > last)) | (tied & (tie_rank <= remaining))
        rank = num_chosen + tl.cumsum(take.to(tl.int32), 0) - 1
        tl.store(out_positions_ptr + out_at + rank, position, mask=take)
        if CHUNK_LEN > 0:
            tl.store(out_scores_ptr + out_at + rank, score, mask=take)
        elif HAS_TABLE:
            slots = slot_table_ptr + at_row * stride_slot_table + position
            tl.store(out_slots_ptr + out_at + rank, tl.load(slots, mask=take, other=0), mask=take)
        num_chosen += tl.sum(take.to(tl.int32), 0)
        num_tied += tl.sum(tied.to(tl.int32), 0)
    if CHUNK_LEN == 0 and HAS_TABLE:
        if which == 0:
            tl.store(out_counts_ptr + at_row, wanted)
    elif CHUNK_LEN == 0:
        for start in range(wanted, k, BLOCK):
            j = start + tl.arange(0, BLOCK)
            tl.store(out_positions_ptr + out_at + j, tl.full([BLOCK], -1, tl.int32), mask=j < k)
