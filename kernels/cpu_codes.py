"""Scores of 4-bit keys on the CPU, compiled: what `cpu_select.score` does for keys of the pool.

Dims as in cpu_select.py, and: E key heads of the copy, Q = E * G queries, C channels, B = C / 2 bytes

Byte i of a key holds channel i in its low half and channel i + B in its high half. A key's own ranges are (step, low)
of the low half and of the high half, float16; keys without ranges stand for their codes as they are. A key is
unpacked once for all query heads of its group.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_numba import REORDER, half_loader
from .cpu_select import CHUNK, Rows, Table, shares_of

NO_RANGES = np.zeros((0, 0, 4), np.uint16)


def score(
    q_RQC: Any, codes_SEB: Any, ranges_SE4: Any, rows: Rows, pool: Table, pooled_R: Any, work_RQW: Any
) -> None:
    """As `cpu_select.score`, over `codes_SEB` (uint8) and `ranges_SE4` (float16 as uint16, or NO_RANGES)."""
    _, num_heads, num_bytes = codes_SEB.shape
    group = q_RQC.shape[1] // num_heads
    _kernel(num_heads, group, num_bytes)(q_RQC, codes_SEB, ranges_SE4, *rows, *pool, pooled_R, work_RQW)
    shares_of(q_RQC.shape[1])(rows.requests_R, rows.lens_R, pool.counts, pooled_R, work_RQW)


def missing(rows: Rows, current_S: Any, phase: int, period: int) -> tuple[Any, Any]:
    """(slots of the rows' histories whose flag is 0, none of them twice; slots of every `period`-th position from
    `phase` on whose flag is 1), int64. `current_S` is scratch of the call and left as it was."""
    return _missing()(rows.requests_R, rows.lens_R, rows.slot_table, current_S, phase, period)


@functools.cache
def _kernel(num_heads: int, group: int, num_bytes: int) -> Callable[..., None]:
    import numba

    to_float = half_loader()

    @numba.njit(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def logits(
        q, codes, ranges, requests, lens, slot_table, tags, bias, positions, slots, counts, pooled, work
    ):
        num_chunks = (work.shape[2] + CHUNK - 1) // CHUNK
        for task in numba.prange(requests.shape[0] * num_chunks):
            r = task // num_chunks
            request = requests[r]
            length = counts[request] if pooled[r] else lens[r]
            first = (task % num_chunks) * CHUNK
            key = np.empty(2 * num_bytes, np.float32)
            for j in range(first, min(first + CHUNK, length)):
                for h in range(num_heads):
                    x = h if positions.shape[1] > 1 else 0
                    slot = slots[request, x, j] if pooled[r] else slot_table[request, j]
                    term = bias[tags[slot]] if tags.shape[0] else np.float32(0)
                    step_0 = step_1 = np.float32(1)
                    low_0 = low_1 = np.float32(0)
                    if ranges.shape[0]:
                        step_0, low_0 = to_float(ranges[slot, h, 0]), to_float(ranges[slot, h, 1])
                        step_1, low_1 = to_float(ranges[slot, h, 2]), to_float(ranges[slot, h, 3])
                    for b in range(num_bytes):
                        # 32-bit integers, or the loop does not vectorise
                        code = np.int32(codes[slot, h, b])
                        key[b] = np.float32(code & np.int32(15)) * step_0 + low_0
                        key[num_bytes + b] = np.float32(code >> np.int32(4)) * step_1 + low_1
                    for g in range(h * group, h * group + group):
                        dot = np.float32(0)
                        for c in range(2 * num_bytes):
                            dot += q[r, g, c] * key[c]
                        work[r, g, j] = dot + term

    return logits


@functools.cache
def _missing() -> Callable[..., Any]:
    import numba

    @numba.njit(nogil=True)
    def found(requests, lens, slot_table, current, phase, period):
        absent, checked = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
        seen = np.uint8(2)  # rows share slots, and one that is absent is nothing to check
        for r in range(requests.shape[0]):
            for j in range(lens[r]):
                slot = slot_table[requests[r], j]
                if current[slot] == 0:
                    current[slot] = seen
                    absent.append(np.int64(slot))
                elif current[slot] != seen and j % period == phase:
                    checked.append(np.int64(slot))
        for slot in absent:
            current[slot] = 0
        return np.array(absent, np.int64), np.array(checked, np.int64)

    return found
