"""Attention over lists and over what they leave out, on the CPU, compiled; the law is `reference_tail`.

Dims as in cpu_sparse.py, and: C blocks of an arena, N blocks of a row, B positions of a block

A full block is read once: its means are kept, and what a list holds is taken out of them again. So a row reads two
means for every B positions, and the keys and values of its lists, which attention reads anyway. Of the open block at
the end of a row what is left out is read as it is.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from .cpu_numba import REORDER, exponential, half_loader, loader
from .cpu_select import HIDDEN, Geometry, Rows, Table
from .reference_tail import FADED

# what a mean is kept in, by the pool's dtype: as many bytes as an element of the pool, and more bits than bfloat16 has,
# for a mean is taken apart again
STORED = {torch.float32: torch.float32, torch.bfloat16: torch.float16}
_NOTHING = 2 * HIDDEN  # the logit of a block of which nothing is left: below whatever is hidden


class Blocks(NamedTuple):
    """What is known of every full block beside its means. Arrays are numpy."""

    slots_CP: Any  # int32, the slots whose keys and values the means are of
    tags_CP: Any  # uint8, their tags
    stamp_C: Any  # int64, the clock when they were read; -1: the means are of nothing
    weight_C: Any  # float32, sum of exp(bias) over the keys that are in a tail
    count_C: Any  # int32, how many these are

    @classmethod
    def empty(cls, size: int, block_size: int) -> Blocks:
        slots = np.full((size, block_size), -1, np.int32)
        tags = np.zeros((size, block_size), np.uint8)
        return cls(
            slots, tags, np.full(size, -1, np.int64), np.zeros(size, np.float32), np.zeros(size, np.int32)
        )


def attend(
    geometry: Geometry,
    q_RQD: Any,
    keys_SHD: Any,
    values_SHD: Any,
    rows: Rows,
    table: Table,
    means_CHE: Any,
    block_table_BN: Any,
    blocks: Blocks,
    out_RQD: Any,
) -> None:
    """As `cpu_sparse.attend`, with a pseudo-key for what the lists leave out of each block.

    `means_CHE` has the mean of the keys, then that of the values, in E = 2 D channels (float16 as uint16).
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
        tag_weights(rows.bias_4),
        *table,
        means_CHE,
        block_table_BN,
        blocks.weight_C,
        blocks.count_C,
        blocks.slots_CP.shape[1],
        out_RQD,
    )


def tag_weights(bias_4: Any) -> Any:
    """float32 exp(bias) of each tag, 0 for one that is in no tail."""
    return np.where(bias_4 > FADED, np.exp(np.maximum(bias_4, FADED)), 0).astype(np.float32)


def means(
    geometry: Geometry, keys_SHD: Any, values_SHD: Any, blocks: Blocks, entries_n: Any, rows: Rows
) -> Any:
    """float32 [n, H, 2 D] of these entries' slots, the same bits however many entries are asked for."""
    found = np.zeros((len(entries_n), geometry.num_kv_heads, 2 * geometry.head_dim), np.float32)
    weights = tag_weights(rows.bias_4)
    _summer(geometry)(keys_SHD, values_SHD, blocks.slots_CP, blocks.tags_CP, entries_n, weights, found)
    return found


def missing(
    rows: Rows, block_table_BN: Any, blocks: Blocks, written_S: Any, phase: int, period: int
) -> tuple[Any, Any]:
    """Entries (int64) of the rows' full blocks whose means must be computed, and of every `period`-th block from
    `phase` on those that need not.

    Means hold while the block's slots and their tags are the ones they are of and no slot was written since
    (`written_S`, int64). What is missing gets its slots, tags, weight and count, and the stamp -1.
    """
    return _missing()(*rows, tag_weights(rows.bias_4), block_table_BN, *blocks, written_S, phase, period)


@functools.cache
def _missing() -> Callable[..., Any]:
    import numba

    @numba.njit(nogil=True)
    def found(
        requests,
        lens,
        slot_table,
        tags,
        bias,
        weights,
        block_table,
        entry_slots,
        entry_tags,
        stamp,
        weight,
        count,
        written,
        phase,
        period,
    ):
        absent, checked = [np.int64(0) for _ in range(0)], [np.int64(0) for _ in range(0)]
        size = entry_slots.shape[1]
        for r in range(requests.shape[0]):
            slots = slot_table[requests[r]]
            for n in range(lens[r] // size):
                entry, fresh = block_table[requests[r], n], True
                for i in range(size):
                    slot = slots[n * size + i]
                    tag = tags[slot] if tags.shape[0] else np.uint8(0)
                    fresh &= entry_slots[entry, i] == slot and entry_tags[entry, i] == tag
                    fresh &= written[slot] <= stamp[entry]
                if fresh:
                    if n % period == phase:
                        checked.append(np.int64(entry))
                    continue
                total, num = np.float32(0), 0
                for i in range(size):
                    slot = slots[n * size + i]
                    tag = tags[slot] if tags.shape[0] else np.uint8(0)
                    entry_slots[entry, i], entry_tags[entry, i] = slot, tag
                    total += weights[tag]
                    num += weights[tag] > 0
                stamp[entry], weight[entry], count[entry] = -1, total, num
                absent.append(np.int64(entry))
        return np.array(absent, np.int64), np.array(checked, np.int64)

    return found


@functools.cache
def _summer(geometry: Geometry) -> Callable[..., None]:
    import numba

    num_heads, _, head_dim = geometry[1:]
    load = loader(geometry.dtype)

    @numba.njit(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def sums(keys, values, entry_slots, entry_tags, entries, weights, out):
        for n in numba.prange(entries.shape[0]):
            total = np.float32(0)
            for i in range(entry_slots.shape[1]):
                slot, w = entry_slots[entries[n], i], weights[entry_tags[entries[n], i]]
                total += w
                for h in range(num_heads):
                    for d in range(head_dim):
                        out[n, h, d] += w * load(keys[slot, h, d])
                        out[n, h, head_dim + d] += w * load(values[slot, h, d])
            if total > 0:
                for h in range(num_heads):
                    for d in range(2 * head_dim):
                        out[n, h, d] /= total

    return sums


@functools.cache
def _kernel(geometry: Geometry) -> Callable[..., None]:
    import numba

    num_heads, group, head_dim = geometry[1:]
    load, exp = loader(geometry.dtype), exponential()
    load_mean = half_loader() if STORED[geometry.dtype] == torch.float16 else loader(torch.float32)

    @numba.njit(parallel=True, nogil=True, error_model="numpy", fastmath=REORDER)
    def attend(
        q,
        keys,
        values,
        requests,
        lens,
        slot_table,
        tags,
        bias,
        tag_weights,
        positions,
        slots,
        counts,
        means,
        block_table,
        block_weights,
        block_counts,
        size,
        out,
    ):
        for task in numba.prange(requests.shape[0] * num_heads):
            r, h = task // num_heads, task % num_heads
            request, length = requests[r], lens[r]
            x = h if slots.shape[1] > 1 else 0
            count = counts[request, x]
            num_full, num_blocks = length // size, (length + size - 1) // size
            vector, rest = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
            weights = np.empty((group, count + num_blocks), np.float32)
            left = np.empty(
                num_blocks, np.float32
            )  # weight of what the list leaves out of a block, 0: nothing
            sums = np.zeros((group, head_dim), np.float32)
            # once for the logits, by the keys, and once for the values; `rest` sums up what is left out of a block
            for values_now in range(2):
                source = values if values_now else keys
                first = head_dim if values_now else 0
                p = 0
                for b in range(num_blocks):
                    end = min((b + 1) * size, length)
                    total, num = np.float32(0), 0
                    if b < num_full:
                        entry = block_table[request, b]
                        total, num = block_weights[entry], block_counts[entry]
                        for d in range(head_dim):
                            rest[d] = load_mean(means[entry, h, first + d]) * total
                    else:
                        rest[:] = np.float32(0)
                    position = b * size
                    while position < end:
                        is_listed = p < count and positions[request, x, p] < end
                        if b < num_full:
                            # from one listed position to the next
                            if not is_listed:
                                break
                            position = positions[request, x, p]
                        else:
                            is_listed = is_listed and positions[request, x, p] == position
                        slot = slot_table[request, position]
                        tag = tags[slot] if tags.shape[0] else np.uint8(0)
                        weight = tag_weights[tag]
                        position += 1
                        if not is_listed and weight == 0:
                            continue
                        for d in range(head_dim):
                            vector[d] = load(source[slot, h, d])
                        sign = np.float32(0)
                        if b < num_full:
                            sign = -weight
                        elif not is_listed:
                            sign = weight
                        if sign != 0:
                            total += sign
                            num += 1 if sign > 0 else -1
                            for d in range(head_dim):
                                rest[d] += sign * vector[d]
                        if is_listed:
                            for g in range(group):
                                if values_now:
                                    w = weights[g, p]
                                    for d in range(head_dim):
                                        sums[g, d] += w * vector[d]
                                else:
                                    dot = np.float32(0)
                                    for d in range(head_dim):
                                        dot += q[r, h * group + g, d] * vector[d]
                                    weights[g, p] = dot + bias[tag]
                            p += 1
                    if values_now:
                        if left[b] > 0:
                            for g in range(group):
                                w = weights[g, count + b] / left[b]
                                for d in range(head_dim):
                                    sums[g, d] += w * rest[d]
                        continue
                    left[b] = total if num > 0 else np.float32(0)
                    for g in range(group):
                        dot = np.float32(_NOTHING)
                        if num > 0:
                            dot = np.float32(0)
                            for d in range(head_dim):
                                dot += q[r, h * group + g, d] * rest[d]
                            dot = dot / total + np.log(total)
                        weights[g, count + b] = dot
                if values_now:
                    continue
                for g in range(group):
                    weight_g = weights[g]
                    highest = np.float32(-np.inf)
                    for j in range(count + num_blocks):
                        highest = max(highest, weight_g[j])
                    mass = np.float32(0)
                    for j in range(count + num_blocks):
                        weight_g[j] = exp(weight_g[j] - highest)
                        mass += weight_g[j]
                    for j in range(count + num_blocks):
                        weight_g[j] /= mass
            for g in range(group):
                for d in range(head_dim):
                    out[r, h * group + g, d] = sums[g, d]

    return attend
