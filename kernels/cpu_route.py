"""Head routing on the CPU; the law is `reference_route`.

Dims as in cpu_scan.py, and: n chosen query heads of a row, S sampled columns
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_scan import Mix
from .cpu_select import Rows, Table
from .reference_route import STRIDE


def sample(rows: Rows, pool: Table, pooled_R: Any, sinks: int, window: int) -> tuple[Rows, Table, Any]:
    """What heads are measured on: rows that are numbered, a table of the columns of row r at r, and which of them
    count (float32 [R, X, S], 0 where a column is forced or none)."""
    num_rows, num_lists = len(rows.requests_R), pool.positions.shape[1]
    lens_R = np.where(pooled_R, pool.counts[rows.requests_R].max(1), rows.lens_R)
    size = sinks + window + -(-int(lens_R.max(initial=0)) // STRIDE)
    table = Table.empty(num_rows, num_lists, size)
    counting = np.zeros((num_rows, num_lists, size), np.float32)
    _sampler()(
        rows.requests_R, rows.lens_R, rows.slot_table, *pool, pooled_R, sinks, window, *table, counting
    )
    return rows._replace(requests_R=np.arange(num_rows, dtype=np.int32)), table, counting


def choose(shares_RQS: Any, counting_RXS: Any, num_lists: int, num_chosen: int) -> Any:
    """bool [R, Q]: the `num_chosen` heads of every list that are worth most; a sample of one list serves all."""
    num_rows, num_queries, size = shares_RQS.shape
    shares = shares_RQS.reshape(num_rows, num_lists, -1, size)
    worth = np.where(counting_RXS[:, :, None] > 0, shares, np.float32(0)).sum(-1)
    best = np.argsort(-worth, axis=-1, kind="stable")[..., :num_chosen]
    chosen = np.zeros(worth.shape, bool)
    np.put_along_axis(chosen, best, True, axis=-1)
    return chosen.reshape(num_rows, num_queries)


def mix(q_RQC: Any, chosen_RQ: Any, num_heads: int, *, residual: bool) -> tuple[Any, Mix]:
    """The chosen queries by key head, behind those of a head the mean of its others where `residual`; and their Mix.

    Every row has as many chosen queries. A residual of no query is zero and counts for nothing.
    """
    num_rows, num_queries, _ = q_RQC.shape
    group = num_queries // num_heads
    at = np.nonzero(chosen_RQ)[1].reshape(num_rows, -1)
    mixed, heads = np.take_along_axis(q_RQC, at[..., None], 1), at // group
    weights = np.ones(at.shape, np.float32)
    if residual:
        left = ~chosen_RQ.reshape(num_rows, num_heads, group)
        num_left = left.sum(2).astype(np.float32)
        sums = np.where(left[..., None], q_RQC.reshape(*left.shape, -1), np.float32(0)).sum(2)
        mixed = np.concatenate((mixed, sums / np.maximum(num_left, 1)[..., None]), 1)
        weights = np.concatenate((weights, num_left), 1)
        heads = np.concatenate((heads, np.broadcast_to(np.arange(num_heads), num_left.shape)), 1)
        order = np.argsort(heads, axis=1, kind="stable")
        mixed, weights, heads = (
            np.take_along_axis(mixed, order[..., None], 1),
            np.take_along_axis(weights, order, 1),
            np.take_along_axis(heads, order, 1),
        )
    first = (heads[:, None] < np.arange(num_heads + 1)[:, None]).sum(-1).astype(np.int32)
    return np.ascontiguousarray(mixed, np.float32), Mix(first, weights)


@functools.cache
def _sampler() -> Callable[..., None]:
    import numba

    @numba.njit(nogil=True)
    def sampled(
        requests,
        lens,
        slot_table,
        positions,
        slots,
        counts,
        pooled,
        sinks,
        window,
        out,
        out_slots,
        out_counts,
        counting,
    ):
        for r in range(requests.shape[0]):
            request = requests[r]
            for x in range(positions.shape[1]):
                length = counts[request, x] if pooled[r] else lens[r]
                n, rank = 0, 0
                for j in range(length):
                    position = positions[request, x, j] if pooled[r] else j
                    forced = position < sinks or position >= lens[r] - window
                    if not forced:
                        rank += 1
                    if forced or (rank - 1) % STRIDE == 0:
                        out[r, x, n] = position
                        out_slots[r, x, n] = slot_table[request, position]
                        counting[r, x, n] = not forced
                        n += 1
                out_counts[r, x] = n

    return sampled
