"""Triton twins of `ops_law`'s `seal` and `check`: whose the rows of a table are, in one launch each.

Dims as in ops.py. A program serves one row: it reads the row's entries once for their digest.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .ops import FIELDS, Expected, Lent
from .ops_law import SLOT_FACTOR

NUM_FIELDS: tl.constexpr = tl.constexpr(len(FIELDS))


def seal(expected: Expected, lent: Lent, pointers: tuple[int, int]) -> None:
    """Stamps the rows that select; see `ops.Ops.seal`."""
    table = lent.table
    num_lists, size = table.positions.shape[1:]
    _seal_kernel[(len(expected.requests_R),)](
        expected.requests_R,
        expected.lens_R,
        expected.values_R3,
        table.positions,
        table.slots,
        table.counts,
        lent.stamps_B6,
        *pointers,
        NUM_LISTS=num_lists,
        SIZE=size,
        SLOT_FACTOR=SLOT_FACTOR,
        BLOCK=_block(size),
        num_warps=4,
    )


def check(
    expected: Expected,
    lent: Lent,
    pointers: tuple[int, int],
    stale_F1: Tensor,
    fresh_R: Tensor,
    stale_lens_R: Tensor,
) -> None:
    """Writes which rows are as expected into `fresh_R` (uint8) and the lengths of the others into `stale_lens_R`
    (int32), and counts them; see `ops.Ops.check`."""
    table = lent.table
    num_lists, size = table.positions.shape[1:]
    _check_kernel[(len(expected.requests_R),)](
        expected.requests_R,
        expected.lens_R,
        expected.values_R3,
        table.positions,
        table.slots,
        table.counts,
        lent.stamps_B6,
        *pointers,
        fresh_R,
        stale_lens_R,
        stale_F1,
        NUM_LISTS=num_lists,
        SIZE=size,
        SLOT_FACTOR=SLOT_FACTOR,
        BLOCK=_block(size),
        num_warps=4,
    )


def _block(size: int) -> int:
    return min(1024, max(16, triton.next_power_of_2(size)))


@triton.jit
def _digest(
    request,
    positions_ptr,
    slots_ptr,
    counts_ptr,
    NUM_LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """int64, see `ops_law.digests`."""
    num = tl.load(counts_ptr + request).to(tl.int64)
    counted = tl.minimum(tl.maximum(num, 0), SIZE)
    total = num
    for x in range(NUM_LISTS):
        for start in range(0, SIZE, BLOCK):
            j = start + tl.arange(0, BLOCK)
            live = j < counted
            at = (request * NUM_LISTS + x) * SIZE + j
            position = tl.load(positions_ptr + at, mask=live, other=0).to(tl.int64)
            slot = tl.load(slots_ptr + at, mask=live, other=0).to(tl.int64)
            factor = 2 * (x * SIZE + j).to(tl.int64) + 3
            total += tl.sum(tl.where(live, factor * (position + slot * SLOT_FACTOR), 0), 0)
    return total


@triton.jit
def _seal_kernel(
    requests_ptr,
    lens_ptr,
    expected_ptr,
    positions_ptr,
    slots_ptr,
    counts_ptr,
    stamps_ptr,
    kv_layer,
    key_layer,
    NUM_LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    if tl.load(lens_ptr + row) == 0:
        return
    request = tl.load(requests_ptr + row).to(tl.int64)
    digest = _digest(request, positions_ptr, slots_ptr, counts_ptr, NUM_LISTS, SIZE, SLOT_FACTOR, BLOCK)
    stamp = stamps_ptr + request * NUM_FIELDS
    for field in tl.static_range(3):
        tl.store(stamp + field, tl.load(expected_ptr + row * 3 + field))
    tl.store(stamp + 3, kv_layer)
    tl.store(stamp + 4, key_layer)
    tl.store(stamp + 5, digest)


@triton.jit
def _check_kernel(
    requests_ptr,
    lens_ptr,
    expected_ptr,
    positions_ptr,
    slots_ptr,
    counts_ptr,
    stamps_ptr,
    kv_layer,
    key_layer,
    fresh_ptr,
    stale_lens_ptr,
    stale_ptr,
    NUM_LISTS: tl.constexpr,
    SIZE: tl.constexpr,
    SLOT_FACTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    length = tl.load(lens_ptr + row)
    if length == 0:
        tl.store(fresh_ptr + row, 1)
        tl.store(stale_lens_ptr + row, 0)
        return
    request = tl.load(requests_ptr + row).to(tl.int64)
    digest = _digest(request, positions_ptr, slots_ptr, counts_ptr, NUM_LISTS, SIZE, SLOT_FACTOR, BLOCK)
    stamp = stamps_ptr + request * NUM_FIELDS
    # the first field that differs, or none
    first = tl.full([], NUM_FIELDS, tl.int32)
    if tl.load(stamp + 5) != digest:
        first = tl.full([], 5, tl.int32)
    if tl.load(stamp + 4) != key_layer:
        first = tl.full([], 4, tl.int32)
    if tl.load(stamp + 3) != kv_layer:
        first = tl.full([], 3, tl.int32)
    for back in tl.static_range(3):
        if tl.load(stamp + 2 - back) != tl.load(expected_ptr + row * 3 + 2 - back):
            first = tl.full([], 2 - back, tl.int32)
    is_stale = first < NUM_FIELDS
    tl.store(fresh_ptr + row, tl.where(is_stale, 0, 1))
    tl.store(stale_lens_ptr + row, tl.where(is_stale, length, 0))
    if is_stale:
        tl.atomic_add(stale_ptr + first, tl.full([], 1, tl.int64))
        tl.atomic_add(stale_ptr + NUM_FIELDS, tl.full([], 1, tl.int64))
