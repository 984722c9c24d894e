"""Pages of rows on the CPU: which of them lack bounds, and their scores. The law is `reference_pages`.

Dims as in cpu_select.py, and: N pages of a row, P tokens of a page, C entries of an arena of pages

The bound sum_d max(q_d low_d, q_d high_d) is the product of (min(q, 0), max(q, 0)) and (low, high), so a page is
scored as a key of 2 D channels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import cpu_select
from .cpu_cache import compiled
from .cpu_scan import Mix
from .cpu_select import Geometry, Rows, Table


class Arena(NamedTuple):
    """What is known of every page beside its bounds. Arrays are numpy."""

    slots_CP: Any  # int32, the slots whose keys the bounds are of; a short page repeats its first
    stamp_C: Any  # int64, the clock when they were read; -1: the bounds are of nothing
    tags_C: Any  # uint8, the tag of the page's largest bias


def score(
    geometry: Geometry,
    q_RQD: Any,
    bounds_CED: Any,
    rows: Rows,
    page_table_BN: Any,
    arena: Arena,
    pooled_R: Any,
    work_RQW: Any,
    mix: Mix,
) -> None:
    """As `cpu_select.score` for the rows with pooled_R[r] = 0: column n is page n. `bounds_CED` has 2 D channels."""
    page_size = arena.slots_CP.shape[1]
    pages_R = np.where(pooled_R, 0, -(-rows.lens_R // page_size)).astype(np.int32)
    tags = arena.tags_C if rows.tags_S.shape[0] else rows.tags_S
    pages = Rows(rows.requests_R, pages_R, page_table_BN, tags, rows.bias_4)
    halves = np.concatenate((np.minimum(q_RQD, 0), np.maximum(q_RQD, 0)), -1)
    wide = geometry._replace(head_dim=2 * geometry.head_dim)
    unused, history_R = Table.empty(1, 1, 0), np.zeros_like(pooled_R)
    # counts are not read where nothing is pooled
    cpu_select.score(wide, halves, bounds_CED, pages, unused, history_R, work_RQW, mix)


def missing(
    rows: Rows, page_table_BN: Any, arena: Arena, written_S: Any, phase: int, period: int
) -> tuple[Any, Any, Any]:
    """Entries (int64) of the rows' pages whose bounds must be computed, those of them that are complete, and of every
    `period`-th page from `phase` on those that need not.

    Bounds hold while the page's slots are the ones they are of and none was written since (`written_S`, int64). What
    is missing gets its slots and the stamp -1; an incomplete page is always missing. Tags are set for all.
    """
    return _missing()(*rows, page_table_BN, *arena, written_S, phase, period)


@functools.cache
def _missing() -> Callable[..., Any]:
    @compiled(nogil=True)
    def found(
        requests,
        lens,
        slot_table,
        tags,
        bias,
        page_table,
        entry_slots,
        stamp,
        entry_tags,
        written,
        phase,
        period,
    ):
        absent, complete, checked = (
            [np.int64(0) for _ in range(0)],
            [np.int64(0) for _ in range(0)],
            [np.int64(0) for _ in range(0)],
        )
        page_size = entry_slots.shape[1]
        for r in range(requests.shape[0]):
            slots = slot_table[requests[r]]
            for n in range((lens[r] + page_size - 1) // page_size):
                begin, end = n * page_size, min((n + 1) * page_size, lens[r])
                entry = page_table[requests[r], n]
                is_complete = end - begin == page_size
                fresh = is_complete
                for j in range(begin, end):
                    fresh &= entry_slots[entry, j - begin] == slots[j] and written[slots[j]] <= stamp[entry]
                if tags.shape[0]:
                    highest = tags[slots[begin]]
                    for j in range(begin, end):
                        if bias[tags[slots[j]]] > bias[highest]:
                            highest = tags[slots[j]]
                    entry_tags[entry] = highest
                if fresh:
                    if n % period == phase:
                        checked.append(np.int64(entry))
                    continue
                for i in range(page_size):
                    entry_slots[entry, i] = slots[begin + i] if begin + i < end else slots[begin]
                stamp[entry] = -1
                absent.append(np.int64(entry))
                if is_complete:
                    complete.append(np.int64(entry))
        return np.array(absent, np.int64), np.array(complete, np.int64), np.array(checked, np.int64)

    return found
