"""Attention of decode rows over selected positions on the CPU, compiled; twin of `reference.decode_attention`.

Dims as in cpu_select.py, K positions of a table row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_cache import compiled
from .cpu_numba import REORDER, exponential, loader
from .cpu_scan import CHUNK
from .cpu_select import Geometry, Rows, Table

NO_FLAGS, NO_LENS = np.zeros(0, np.uint8), np.zeros(0, np.int32)
NO_TABLE = Table(np.zeros((0, 0, 0), np.int32), np.zeros((0, 0, 0), np.int32), NO_LENS)


def attend(
    geometry: Geometry,
    q_RQD: Any,
    keys_SHD: Any,
    values_SHD: Any,
    rows: Rows,
    table: Table,
    out_RQD: Any,
    *,
    own: Table = NO_TABLE,
    fresh_R: Any = None,
    dense_lens_R: Any = None,
) -> None:
    """Writes softmax(q k + bias) v over each row's positions of `table` into `out_RQD` (float32).

    `q_RQD` is float32 and carries the scale. Only slots that the rows' own entries name are read. Rows with
    fresh_R[r] = 0 (uint8) take `own` in place of `table`. Rows of length 0 attend to their first dense_lens_R[r]
    (int32) keys, or are left out.
    """
    _kernel(geometry)(
        q_RQD,
        keys_SHD,
        values_SHD,
        rows.requests_R,
        rows.lens_R,
        rows.slot_table,
        rows.tags_S,
        rows.bias_4,
        table.slots,
        table.counts,
        own.slots,
        own.counts,
        NO_FLAGS if fresh_R is None else fresh_R,
        NO_LENS if dense_lens_R is None else dense_lens_R,
        out_RQD,
    )


def attend_shares(geometry: Geometry, shares_RQW: Any, values_SHD: Any, rows: Rows, out_RQD: Any) -> None:
    """Writes the mean of each row's values, weighted by the shares of its whole history, into `out_RQD` (float32).

    `shares_RQW` is what `cpu_select.score` left for rows that scored their history: attention over everything, for
    one more pass over the values.
    """
    _shares_kernel(geometry)(shares_RQW, values_SHD, rows.requests_R, rows.lens_R, rows.slot_table, out_RQD)


@functools.cache
def _shares_kernel(geometry: Geometry) -> Callable[..., None]:
    import numba

    num_heads, group, head_dim = geometry[1:]
    load = loader(geometry.dtype)

    @compiled(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def attend(shares, values, requests, lens, slot_table, out):
        num_rows = requests.shape[0]
        num_chunks = (shares.shape[2] + CHUNK - 1) // CHUNK
        parts = np.zeros((num_rows, num_chunks, num_heads * group, head_dim), np.float32)
        for task in numba.prange(num_rows * num_chunks):
            r, c = task // num_chunks, task % num_chunks
            sums, value = parts[r, c], np.empty(head_dim, np.float32)
            for j in range(c * CHUNK, min(c * CHUNK + CHUNK, lens[r])):
                slot = slot_table[requests[r], j]
                for h in range(num_heads):
                    for d in range(head_dim):
                        value[d] = load(values[slot, h, d])
                    for q in range(h * group, h * group + group):
                        share = shares[r, q, j]
                        for d in range(head_dim):
                            sums[q, d] += share * value[d]
        for r in numba.prange(num_rows):
            for q in range(num_heads * group):
                for d in range(head_dim):
                    total = np.float32(0)
                    for c in range(num_chunks):
                        total += parts[r, c, q, d]
                    out[r, q, d] = total

    return attend


@functools.cache
def _kernel(geometry: Geometry) -> Callable[..., None]:
    import numba

    num_heads, group, head_dim = geometry[1:]
    load, exp = loader(geometry.dtype), exponential()

    @compiled(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def attend(
        q,
        keys,
        values,
        requests,
        lens,
        slot_table,
        tags,
        bias,
        shared_slots,
        shared_counts,
        own_slots,
        own_counts,
        fresh,
        dense_lens,
        out,
    ):
        for task in numba.prange(requests.shape[0] * num_heads):
            r, h = task // num_heads, task % num_heads
            request = requests[r]
            listed = lens[r] > 0
            shared = fresh.shape[0] == 0 or fresh[r] != 0
            slots = shared_slots if shared else own_slots
            x = h if slots.shape[1] > 1 else 0
            if listed:
                count = shared_counts[request] if shared else own_counts[request]
                entries = slots[request, x]
            else:
                count = dense_lens[r] if dense_lens.shape[0] else np.int32(0)
                entries = slot_table[request]
            if count == 0:
                continue
            key = np.empty(head_dim, np.float32)
            weights = np.empty((group, count), np.float32)
            for j in range(count):
                slot = entries[j]
                term = bias[tags[slot]] if tags.shape[0] else np.float32(0)
                for d in range(head_dim):
                    key[d] = load(keys[slot, h, d])
                for g in range(group):
                    dot = np.float32(0)
                    for d in range(head_dim):
                        dot += q[r, h * group + g, d] * key[d]
                    weights[g, j] = dot + term
            for g in range(group):
                weight = weights[g]
                highest = np.float32(-np.inf)
                for j in range(count):
                    highest = max(highest, weight[j])
                total = np.float32(0)
                for j in range(count):
                    weight[j] = exp(weight[j] - highest)
                    total += weight[j]
                share = np.float32(1) / total
                for j in range(count):
                    weight[j] *= share
            sums = np.zeros((group, head_dim), np.float32)
            for j in range(count):
                slot = entries[j]
                for d in range(head_dim):
                    key[d] = load(values[slot, h, d])
                for g in range(group):
                    w = weights[g, j]
                    for d in range(head_dim):
                        sums[g, d] += w * key[d]
            for g in range(group):
                for d in range(head_dim):
                    out[r, h * group + g, d] = sums[g, d]

    return attend
