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

from .cpu_cache import compiled
from .cpu_numba import half_loader
from .cpu_scan import PLAIN, Mix, run
from .cpu_select import Rows, Table

NO_RANGES = np.zeros((0, 0, 4), np.uint16)


def score(
    q_RQC: Any,
    codes_SEB: Any,
    ranges_SE4: Any,
    rows: Rows,
    pool: Table,
    pooled_R: Any,
    work_RQW: Any,
    mix: Mix = PLAIN,
) -> None:
    """As `cpu_select.score`, over `codes_SEB` (uint8) and `ranges_SE4` (float16 as uint16, or NO_RANGES)."""
    _, num_heads, num_bytes = codes_SEB.shape
    sizes = (num_heads, q_RQC.shape[1] // num_heads, 2 * num_bytes)
    keys = (codes_SEB, ranges_SE4)
    run(_fill(num_bytes), sizes, keys, q_RQC, rows, pool, pooled_R, work_RQW, mix)


def missing(rows: Rows, current_S: Any, phase: int, period: int) -> tuple[Any, Any]:
    """(slots of the rows' histories whose flag is 0, none of them twice; slots of every `period`-th position from
    `phase` on whose flag is 1), int64. `current_S` is scratch of the call and left as it was."""
    return _missing()(rows.requests_R, rows.lens_R, rows.slot_table, current_S, phase, period)


@functools.cache
def _fill(num_bytes: int) -> Any:
    """Unpacks a key of `num_bytes` bytes."""
    import numba

    to_float = half_loader()

    @numba.njit(inline="always")
    def fill(codes, ranges, slot, e, key):
        step_0 = step_1 = np.float32(1)
        low_0 = low_1 = np.float32(0)
        if ranges.shape[0]:
            step_0, low_0 = to_float(ranges[slot, e, 0]), to_float(ranges[slot, e, 1])
            step_1, low_1 = to_float(ranges[slot, e, 2]), to_float(ranges[slot, e, 3])
        for b in range(num_bytes):
            # 32-bit integers, or the loop does not vectorise
            code = np.int32(codes[slot, e, b])
            key[b] = np.float32(code & np.int32(15)) * step_0 + low_0
            key[num_bytes + b] = np.float32(code >> np.int32(4)) * step_1 + low_1

    return fill


@functools.cache
def _missing() -> Callable[..., Any]:
    @compiled(nogil=True)
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
