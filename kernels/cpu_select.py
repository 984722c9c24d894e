"""Selection on the CPU: score keys in a token pool, keep the best positions. Compiled, one pass over the keys.

Dims: R rows, Q = H * G query heads, H KV heads, G query heads per KV head, D head dim, S pool slots, X lists per row
      (1, or one per KV head), W longest row, M positions of a table row, B requests of the host's slot table

The law is `reference_select`: p_qj = softmax_j(q . k_j + bias_j) over the keys a row may see, summed over the query
heads of a list; ties go to the lower position; sinks and window come before all others. Sums run in float32.

A table row belongs to a request slot, not to a row of the batch, so rows may move between steps:

    positions int32 [B, X, M]   ascending; what lies beyond the row's count is undefined
    slots     int32 [B, X, M]   the same entries in the pool, translated once
    counts    int32 [B]
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .cpu_cache import compiled
from .cpu_numba import REORDER, bit_casts, loader
from .cpu_scan import PLAIN, Mix, run

_NO_RANGES = np.zeros((0, 0, 4), np.uint16)  # keys of the pool are what they are
# what a dot product stands for where a slot's tag hides it; -inf would leave a softmax of hidden keys undefined
HIDDEN = -1e30


class Rows(NamedTuple):
    """The rows of one decode step, ready for the kernels. Arrays are numpy."""

    requests_R: Any  # int32, rows of the slot table and of every table
    lens_R: Any  # int32, keys of each row, its own token among them
    slot_table: Any  # int32 [B, positions]
    tags_S: Any  # uint8 [S], or [0] where no key is biased
    bias_4: Any  # float32, the logit term of a tag


class Table(NamedTuple):
    """Positions by request slot, see above. Arrays are numpy."""

    positions: Any
    slots: Any
    counts: Any

    @classmethod
    def empty(cls, num_requests: int, num_lists: int, size: int) -> Table:
        """A table for `num_requests` request slots; its content is undefined."""
        shape = (num_requests, num_lists, size)
        return cls(np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(num_requests, np.int32))


class Geometry(NamedTuple):
    """The sizes a kernel is compiled for."""

    dtype: torch.dtype
    num_kv_heads: int
    group: int
    head_dim: int


def score(
    geometry: Geometry,
    q_RQD: Any,
    keys_SHD: Any,
    rows: Rows,
    pool: Table,
    pooled_R: Any,
    work_RQW: Any,
    mix: Mix = PLAIN,
) -> None:
    """Fills `work_RQW` (float32) with every query's share of the softmax, at [r, q, j].

    `q_RQD` is float32 and carries the scale. Row r scores its pool (column j is pool position j) where pooled_R[r]
    (uint8) is set, else its whole history (column j is position j).
    """
    sizes = (geometry.num_kv_heads, geometry.group, geometry.head_dim)
    keys = (keys_SHD, _NO_RANGES)
    run(_fill(geometry.dtype), sizes, keys, q_RQD, rows, pool, pooled_R, work_RQW, mix)


def keep(
    rows: Rows,
    pool: Table,
    pooled_R: Any,
    work_RQW: Any,
    sinks: int,
    window: Any,
    out: Table,
    *,
    page_size: int = 1,
) -> None:
    """Writes the best positions of every row into `out`, as many as its rows hold or the row has.

    The first `sinks` positions and the last `window` (one number, or int32 [R]) come before all others. `out` has one
    list, or one per KV head; `pool` has as many, or one for all of them.

    With a `page_size` above 1 a row that scored its history scored its pages: column c stands for the positions
    from c * page_size on, which all have its score.
    """
    window_R = np.full(len(rows.requests_R), window, np.int32) if np.isscalar(window) else window
    _keeper(page_size)(
        rows.requests_R, rows.lens_R, rows.slot_table, *pool, pooled_R, work_RQW, sinks, window_R, *out
    )


def extend(rows: Rows, pool: Table, seen_R: Any, out: Table) -> None:
    """Writes each row's pool of an earlier step and the positions [seen_R[r], len) behind it into `out`.

    Slots are translated anew. Rows with seen_R[r] = 0 (int64) are left out. `out` must hold what is written.
    """
    _extender()(rows.requests_R, rows.lens_R, rows.slot_table, pool.positions, pool.counts, seen_R, *out)


@functools.cache
def _extender() -> Callable[..., None]:
    @compiled(nogil=True)
    def extend(requests, lens, slot_table, positions, counts, seen, out, out_slots, out_counts):
        for r in range(requests.shape[0]):
            if seen[r] == 0 or lens[r] == 0:
                continue
            request, n = requests[r], counts[requests[r]]
            for x in range(positions.shape[1]):
                for j in range(n + lens[r] - seen[r]):
                    position = positions[request, x, j] if j < n else seen[r] + j - n
                    out[request, x, j] = position
                    out_slots[request, x, j] = slot_table[request, position]
            out_counts[request] = n + lens[r] - seen[r]

    return extend


@functools.cache
def _fill(dtype: torch.dtype) -> Any:
    """Unpacks a key of the pool."""
    import numba

    load = loader(dtype)

    @numba.njit(inline="always")
    def fill(keys, ranges, slot, e, key):
        for c in range(key.shape[0]):
            key[c] = load(keys[slot, e, c])

    return fill


@functools.cache
def _keeper(page_size: int) -> Callable[..., None]:
    import numba

    _, to_bits = bit_casts()
    threshold_of = numba.njit(nogil=True, error_model="numpy")(_threshold)

    @compiled(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def keep(
        requests,
        lens,
        slot_table,
        positions,
        slots,
        counts,
        pooled,
        work,
        sinks,
        window,
        out,
        out_slots,
        out_counts,
    ):
        num_lists = out.shape[1]
        heads_per_list = work.shape[1] // num_lists
        for task in numba.prange(requests.shape[0] * num_lists):
            r, x = task // num_lists, task % num_lists
            # candidates of one list serve every list
            c = x if positions.shape[1] > 1 else 0
            request = requests[r]
            if lens[r] == 0:
                continue
            length = counts[request] if pooled[r] else lens[r]
            num_columns = length if pooled[r] else (length + page_size - 1) // page_size
            score = np.zeros(num_columns, np.float32)
            for g in range(x * heads_per_list, (x + 1) * heads_per_list):
                for j in range(num_columns):
                    score[j] += work[r, g, j]
            # scores are not negative, so their bits are in their order
            bits = np.empty(length, np.uint32)
            for j in range(length):
                bits[j] = to_bits(score[j if pooled[r] else j // page_size])
            for j in range(length):
                position = positions[request, c, j] if pooled[r] else j
                if position < sinks or position >= lens[r] - window[r]:
                    bits[j] = np.uint32(0xFFFFFFFF)
            size = min(out.shape[2], length)
            threshold, num_equal = threshold_of(bits, size)
            n = 0
            for j in range(length):
                if bits[j] >= threshold:
                    if bits[j] == threshold:
                        if num_equal == 0:
                            continue
                        num_equal -= 1
                    position = positions[request, c, j] if pooled[r] else j
                    out[request, x, n] = position
                    out_slots[request, x, n] = slot_table[request, position]
                    n += 1
            if x == 0:
                out_counts[request] = size

    return keep


def _threshold(bits: Any, size: Any) -> Any:
    """The `size`-th largest value, and how many equal to it belong to the largest `size`: radix selection."""
    wanted = size
    prefix = np.uint32(0)
    for level in range(4):
        shift = np.uint32(24 - 8 * level)
        histogram = np.zeros(256, np.int32)
        for j in range(bits.shape[0]):
            if level == 0 or bits[j] >> (shift + np.uint32(8)) == prefix:
                histogram[(bits[j] >> shift) & np.uint32(255)] += 1
        digit = 255
        while digit > 0 and histogram[digit] < wanted:
            wanted -= histogram[digit]
            digit -= 1
        prefix = (prefix << np.uint32(8)) | np.uint32(digit)
    return prefix, wanted
