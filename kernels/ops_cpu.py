"""The operations of `ops` on the CPU: compiled kernels on views of the records' tensors.

Dims as in ops.py. A view is made once per record: tables live as long as the server, rows as long as a step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import cpu_cache, cpu_codes, cpu_route, cpu_select, cpu_sparse
from .cpu_numba import as_array
from .cpu_rows import KeyBias
from .cpu_scan import PLAIN, Mix
from .ops import FIELDS, Checked, Chosen, Expected, IndexCodes, Keys, Lent, Queries, Routing, Rows, Table
from .ops_law import SLOT_FACTOR
from .reference_select import Int4Keys

_NO_TAGS, _NO_BIAS = np.zeros(0, np.uint8), np.zeros(4, np.float32)


def rows_arrays(rows: Rows) -> cpu_select.Rows:
    """The rows as the compiled kernels take them."""
    tags, terms = bias_terms(rows.bias)
    return cpu_select.Rows(rows.requests_R.numpy(), rows.lens_R.numpy(), rows.slot_table.numpy(), tags, terms)


def bias_terms(bias: KeyBias | None) -> tuple[Any, Any]:
    """Tags and the logit term of each of the four tags; no tags where both terms are 0."""
    if bias is None or (bias.alpha == 0 and bias.beta == 0):
        return _NO_TAGS, _NO_BIAS
    terms = [0.0, bias.alpha, bias.beta, bias.alpha + bias.beta]
    return bias.tags_S.numpy(), np.array(terms, np.float32).clip(min=cpu_select.HIDDEN)


class CpuOps:
    """Sums in float32."""

    gives_shares = True

    def queries(self, q_RQD: Tensor, scale: float) -> Queries:
        return Queries(q_RQD.float() * scale, 1.0)

    def num_worths(self, num_queries: int) -> int:
        return num_queries

    def scratch(self, num_rows: int, num_queries: int, width: int) -> Tensor:
        return torch.empty((num_rows, num_queries, width), dtype=torch.float32)

    def score(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, work: Tensor, mix: Mix | None
    ) -> None:
        arrays = (rows.arrays, pool.arrays, pooled_R.numpy(), work.numpy())
        _score(q.values.numpy(), keys, *arrays, mix or PLAIN)

    def route(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, heads: Routing
    ) -> tuple[Queries, Mix]:
        q_RQC = q.values.numpy()
        sampled, table, counting = cpu_route.sample(
            rows.arrays, pool.arrays, pooled_R.numpy(), heads.sinks, heads.window
        )
        shares = np.empty((*q_RQC.shape[:2], counting.shape[2]), np.float32)
        _score(q_RQC, keys, sampled, table, np.ones(len(q_RQC), np.uint8), shares, PLAIN)
        chosen = cpu_route.choose(shares, counting, heads.num_lists, heads.num_chosen)
        mixed, mix = cpu_route.mix(q_RQC, chosen, heads.num_heads, residual=heads.residual)
        return Queries(torch.from_numpy(mixed), q.scale), mix

    def keep(
        self,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        work: Tensor,
        sinks: int,
        window: int | Tensor,
        out: Table,
        page_size: int = 1,
    ) -> None:
        newest = window.numpy() if isinstance(window, Tensor) else window
        arrays = (rows.arrays, pool.arrays, pooled_R.numpy(), work.numpy())
        cpu_select.keep(*arrays, sinks, newest, out.arrays, page_size=page_size)

    def attend(
        self, q: Queries, k_SHD: Tensor, v_SHD: Tensor, rows: Rows, chosen: Chosen, out_RQD: Tensor
    ) -> None:
        out, own, fresh_R = out_RQD.numpy(), cpu_sparse.NO_TABLE, None
        if chosen.own is not None and chosen.fresh_R is not None:
            own, fresh_R = chosen.own.arrays, chosen.fresh_R.numpy()
        cpu_sparse.attend(
            geometry_of(q, k_SHD),
            q.values.numpy(),
            as_array(k_SHD),
            as_array(v_SHD),
            rows.arrays,
            chosen.shared.arrays,
            out,
            own=own,
            fresh_R=fresh_R,
            dense_lens_R=None if rows.dense_lens_R is None else rows.dense_lens_R.numpy(),
        )

    def attend_shares(self, work: Tensor, v_SHD: Tensor, rows: Rows, out_RQD: Tensor) -> None:
        num_heads, head_dim = v_SHD.shape[1:]
        geometry = cpu_select.Geometry(v_SHD.dtype, num_heads, out_RQD.shape[1] // num_heads, head_dim)
        cpu_sparse.attend_shares(geometry, work.numpy(), as_array(v_SHD), rows.arrays, out_RQD.numpy())

    # -- shared state ------------------------------------------------------------------------

    def all_fresh(self, checked: Checked) -> bool:
        return bool(checked.fresh_R.numpy().all())

    def extend(self, rows: Rows, pool: Table, seen_R: Tensor, out: Table) -> None:
        cpu_select.extend(rows.arrays, pool.arrays, seen_R.numpy(), out.arrays)

    def seal(self, expected: Expected, lent: Lent, pointers: tuple[int, int]) -> None:
        (requests_R, values_R3), stamps_B6 = expected.live_arrays, lent.stamps
        stamps_B6[requests_R, :3] = values_R3
        stamps_B6[requests_R, 3:5] = pointers
        stamps_B6[requests_R, 5] = digest()(requests_R, *lent.table.arrays)

    def check(self, expected: Expected, lent: Lent, pointers: tuple[int, int], stale_F1: Tensor) -> Checked:
        requests_R, values_R3 = expected.arrays
        wanted_R6 = np.empty((len(requests_R), len(FIELDS)), np.int64)
        wanted_R6[:, :3] = values_R3
        wanted_R6[:, 3:5] = pointers
        wanted_R6[:, 5] = digest()(requests_R, *lent.table.arrays)
        good_RF = lent.stamps[requests_R] == wanted_R6
        fresh_R = good_RF.all(1)
        if not fresh_R.all():
            idle_R = expected.lens_R.numpy() == 0
            good_RF[idle_R], fresh_R[idle_R] = True, True
            stale = np.flatnonzero(~fresh_R)
            counts = stale_F1.numpy()
            np.add.at(counts, good_RF[stale].argmin(1), 1)
            counts[-1] += len(stale)
        stale_lens_R = np.where(fresh_R, np.int32(0), expected.lens_R.numpy())
        return Checked(*map(torch.from_numpy, (fresh_R.view(np.uint8), stale_lens_R, good_RF)))

    def resume(
        self,
        expected: Expected,
        lent: Lent,
        pointers: tuple[int, int],
        scanned_B: Tensor,
        refresh_every: int,
        stale_F1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        requests_R, values_R3 = expected.arrays
        stamp_R6, scanned_R = lent.stamps[requests_R], scanned_B.numpy()[requests_R]
        seen_R, lens_R = stamp_R6[:, 2], values_R3[:, 2]
        age_R = lens_R - scanned_R
        good_R = (stamp_R6[:, 0] == values_R3[:, 0]) & (stamp_R6[:, 1] < values_R3[:, 1])
        good_R &= (stamp_R6[:, 3:5] == pointers).all(1)
        good_R &= (scanned_R > 0) & (scanned_R <= seen_R) & (seen_R < lens_R) & (age_R < refresh_every)
        if good_R.any():
            intact_R = digest()(requests_R, *lent.table.arrays) == stamp_R6[:, 5]
            stale_F1.numpy()[len(FIELDS) - 1] += int((good_R & ~intact_R).sum())
            good_R &= intact_R
        return torch.from_numpy(np.where(good_R, seen_R, 0)), torch.from_numpy(np.where(good_R, age_R, 0))


@functools.cache
def _geometry(dtype: torch.dtype, num_heads: int, group: int, head_dim: int) -> cpu_select.Geometry:
    return cpu_select.Geometry(dtype, num_heads, group, head_dim)


def geometry_of(q: Queries, k_SHD: Tensor) -> cpu_select.Geometry:
    _, num_heads, head_dim = k_SHD.shape
    return _geometry(k_SHD.dtype, num_heads, q.values.shape[1] // num_heads, head_dim)


def _score(
    q_RQC: Any,
    keys: Keys,
    rows: cpu_select.Rows,
    pool: cpu_select.Table,
    pooled_R: Any,
    work_RQW: Any,
    mix: Mix,
) -> None:
    if isinstance(keys, Tensor):
        _, num_heads, head_dim = keys.shape
        geometry = _geometry(keys.dtype, num_heads, q_RQC.shape[1] // num_heads, head_dim)
        cpu_select.score(geometry, q_RQC, as_array(keys), rows, pool, pooled_R, work_RQW, mix)
        return
    ranges = cpu_codes.NO_RANGES
    if isinstance(keys, Int4Keys):
        ranges = keys.ranges.view(torch.uint16).numpy()
    else:
        assert isinstance(keys, IndexCodes)
    cpu_codes.score(q_RQC, keys.codes.numpy(), ranges, rows, pool, pooled_R, work_RQW, mix)


@functools.cache
def digest() -> Callable[..., Any]:
    """int64 [R], see `ops_law.digests`."""
    slot_factor = np.int64(SLOT_FACTOR)

    @cpu_cache.compiled(nogil=True)
    def compiled(requests_R, positions, slots, counts):
        digests = np.empty(requests_R.shape[0], np.int64)
        for r in range(requests_R.shape[0]):
            request = requests_R[r]
            count = max(0, min(counts[request], positions.shape[2]))
            total = np.int64(counts[request])
            for x in range(positions.shape[1]):
                for j in range(count):
                    # odd factors: a changed value never vanishes modulo 2 ** 64, nor does an exchange of two
                    factor = np.int64(2 * (x * positions.shape[2] + j) + 3)
                    total += factor * (positions[request, x, j] + slot_factor * slots[request, x, j])
            digests[r] = total
        return digests

    return compiled
