"""The scan that every scorer on the CPU shares, compiled: logits of queries over keys in whatever form, then shares.

Dims as in cpu_select.py, and: E key heads, C channels of a key as a query sees it, Q' queries of a row

A kind of key brings the loop that unpacks one of them; a key is unpacked once for all queries of its head. Usually the
queries of key head e are the G queries e * G to e * G + G. A `Mix` says otherwise row by row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from .cpu_cache import compiled
from .cpu_numba import REORDER, exponential

CHUNK = 512  # keys that one task scores


class Mix(NamedTuple):
    """Which queries score with which key head, and what a query's shares count for. Arrays are numpy."""

    # int32 [R, E + 1]: row r scores key head e with its queries first[r, e] to first[r, e + 1]
    first_RE1: Any
    weights_RQ: Any  # float32 [R, Q'], not negative


PLAIN = Mix(np.zeros((0, 0), np.int32), np.zeros((0, 0), np.float32))


def run(
    fill: Any,
    sizes: tuple[int, int, int],
    keys: tuple[Any, Any],
    q_RQC: Any,
    rows: Any,
    pool: Any,
    pooled_R: Any,
    work_RQW: Any,
    mix: Mix,
) -> None:
    """As `cpu_select.score`. `fill(keys, ranges, slot, e, key)` unpacks a key; `sizes` are E, G and C."""
    first_RE1, weights_RQ = mix
    num_heads, group, num_channels = sizes
    mixed = len(first_RE1) > 0
    kernel = _logits(fill, num_heads, 0 if mixed else group, num_channels, mixed)
    kernel(q_RQC, first_RE1, *keys, *rows, *pool, pooled_R, work_RQW)
    _shares()(rows.requests_R, rows.lens_R, pool.counts, pooled_R, weights_RQ, work_RQW)


@functools.cache
def _logits(fill: Any, num_heads: int, group: int, num_channels: int, mixed: bool) -> Callable[..., None]:
    import numba

    if mixed:

        @numba.njit(inline="always")
        def queries(first, r, e):
            return first[r, e], first[r, e + 1]

    else:

        @numba.njit(inline="always")
        def queries(first, r, e):
            return e * group, e * group + group

    @compiled(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def logits(
        q, first, keys, ranges, requests, lens, slot_table, tags, bias, positions, slots, counts, pooled, work
    ):
        num_chunks = (work.shape[2] + CHUNK - 1) // CHUNK
        for task in numba.prange(requests.shape[0] * num_chunks):
            r = task // num_chunks
            request = requests[r]
            length = counts[request] if pooled[r] and lens[r] > 0 else lens[r]
            begin = (task % num_chunks) * CHUNK
            key = np.empty(num_channels, np.float32)
            for j in range(begin, min(begin + CHUNK, length)):
                for e in range(num_heads):
                    start, end = queries(first, r, e)
                    if start == end:
                        continue
                    x = e if positions.shape[1] > 1 else 0
                    slot = slots[request, x, j] if pooled[r] else slot_table[request, j]
                    term = bias[tags[slot]] if tags.shape[0] else np.float32(0)
                    fill(keys, ranges, slot, e, key)
                    for g in range(start, end):
                        dot = np.float32(0)
                        for c in range(num_channels):
                            dot += q[r, g, c] * key[c]
                        work[r, g, j] = dot + term

    return logits


@functools.cache
def _shares() -> Callable[..., None]:
    """Turns the logits of every query into its shares of the softmax, in place."""
    import numba

    exp = exponential()

    @compiled(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def shares(requests, lens, counts, pooled, weights, work):
        num_queries = work.shape[1]
        for task in numba.prange(requests.shape[0] * num_queries):
            r, g = task // num_queries, task % num_queries
            length = counts[requests[r]] if pooled[r] and lens[r] > 0 else lens[r]
            logit = work[r, g]
            highest = np.float32(-np.inf)
            for j in range(length):
                highest = max(highest, logit[j])
            total = np.float32(0)
            for j in range(length):
                weight = exp(logit[j] - highest)
                logit[j] = weight
                total += weight
            share = (weights[r, g] if weights.shape[0] else np.float32(1)) / total
            for j in range(length):
                logit[j] *= share

    return shares
