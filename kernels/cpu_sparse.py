"""Attention of decode rows over selected positions on the CPU, compiled; twin of `reference.decode_attention`.

Dims as in cpu_select.py, K positions of a table row.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from .cpu_numba import REORDER, exponential, loader
from .cpu_select import Geometry, Rows, Table


def attend(
    geometry: Geometry, q_RQD: Any, keys_SHD: Any, values_SHD: Any, rows: Rows, table: Table, out_RQD: Any
) -> None:
    """Writes softmax(q k + bias) v over each row's positions of `table` into `out_RQD` (float32).

    `q_RQD` is float32 and carries the scale. Only slots that the rows' own entries name are read.
    """
    _kernel(geometry)(
        q_RQD,
        keys_SHD,
        values_SHD,
        rows.requests_R,
        rows.tags_S,
        rows.bias_4,
        table.slots,
        table.counts,
        out_RQD,
    )


@functools.cache
def _kernel(geometry: Geometry) -> Callable[..., None]:
    import numba

    num_heads, group, head_dim = geometry[1:]
    load, exp = loader(geometry.dtype), exponential()

    @numba.njit(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def attend(q, keys, values, requests, tags, bias, slots, counts, out):
        for task in numba.prange(requests.shape[0] * num_heads):
            r, h = task // num_heads, task % num_heads
            request = requests[r]
            x = h if slots.shape[1] > 1 else 0
            count = counts[request]
            key = np.empty(head_dim, np.float32)
            weights = np.empty((group, count), np.float32)
            for j in range(count):
                slot = slots[request, x, j]
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
                slot = slots[request, x, j]
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
