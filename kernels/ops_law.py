"""The law of `ops` in plain PyTorch: what every other implementation must equal.

Dims as in ops.py, and: E key heads of what is scored, C channels of a key, Q' queries of a row

The verbs of shared state are single expressions without a loop over rows, which any device runs as they stand.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from .cpu_scan import Mix
from .ops import FIELDS, Checked, Chosen, Expected, IndexCodes, Keys, Lent, Queries, Routing, Rows, Table
from .reference import key_bias
from .reference_select import Int4Keys, dequantise_int4

SLOT_FACTOR = 0x9E3779B97F4A7C


class LawOps:
    """float64 where operands are no doubles yet."""

    gives_shares = True

    def queries(self, q_RQD: Tensor, scale: float) -> Queries:
        return Queries(q_RQD.double() * scale, 1.0)

    def route(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, heads: Routing
    ) -> tuple[Queries, Mix]:
        raise NotImplementedError(
            "routed heads are chosen by the compiled CPU kernels only; see plan_support.py"
        )

    def num_worths(self, num_queries: int) -> int:
        return num_queries

    def scratch(self, num_rows: int, num_queries: int, width: int) -> Tensor:
        return torch.empty((num_rows, num_queries, width), dtype=torch.float64)

    def score(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, work: Tensor, mix: Mix | None
    ) -> None:
        for r, request in _live(rows):
            pooled, num_keys = bool(pooled_R[r]), int(rows.lens_R[r])
            for e, (start, end) in enumerate(_queries_of_heads(q.values[r], keys, mix, r)):
                x = e if pool.positions.shape[1] > 1 else 0
                if pooled:
                    slots_J = pool.slots[request, x, : int(pool.counts[request])].long()
                else:
                    slots_J = rows.slot_table[request, :num_keys].long()
                logits = q.values[r, start:end] @ _gathered(keys, slots_J)[:, e].T
                shares = (logits + _bias(rows, slots_J)).softmax(-1)
                if mix is not None:
                    shares = shares * torch.as_tensor(mix.weights_RQ)[r, start:end, None]
                work[r, start:end, : len(slots_J)] = shares.to(work.dtype)

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
        num_lists, size = out.positions.shape[1:]
        for r, request in _live(rows):
            num_keys, pooled = int(rows.lens_R[r]), bool(pooled_R[r])
            num_columns = int(pool.counts[request]) if pooled else num_keys
            newest = num_keys - int(window[r] if isinstance(window, Tensor) else window)
            for x, worth_W in enumerate(work[r].unflatten(0, (num_lists, -1)).sum(1)):
                position = torch.arange(num_columns, device=worth_W.device)
                worth = worth_W[position if pooled else position // page_size]
                if pooled:
                    position = pool.positions[request, x if pool.positions.shape[1] > 1 else 0, :num_columns]
                forced = (position < sinks) | (position >= newest)
                order = worth.masked_fill(forced, torch.inf).argsort(descending=True, stable=True)
                best = position[order[:size]].sort().values.long()
                out.positions[request, x, : len(best)] = best.int()
                out.slots[request, x, : len(best)] = rows.slot_table[request, best]
            out.counts[request] = min(size, num_columns)

    def attend(
        self, q: Queries, k_SHD: Tensor, v_SHD: Tensor, rows: Rows, chosen: Chosen, out_RQD: Tensor
    ) -> None:
        num_heads = k_SHD.shape[1]
        for r, request in enumerate(rows.requests_R.tolist()):
            if rows.lens_R[r] > 0:
                fresh = chosen.fresh_R is None or bool(chosen.fresh_R[r])
                table = chosen.shared if fresh or chosen.own is None else chosen.own
                slots_XJ = table.slots[request, :, : int(table.counts[request])].long()
            elif rows.dense_lens_R is not None and rows.dense_lens_R[r] > 0:
                slots_XJ = rows.slot_table[request, : int(rows.dense_lens_R[r])].long()[None]
            else:
                continue
            q_HGD = q.values[r].unflatten(0, (num_heads, -1))
            for h, slots_J in enumerate(slots_XJ.expand(num_heads, -1)):
                logits = q_HGD[h] @ k_SHD[slots_J, h].to(q.values.dtype).T * q.scale + _bias(rows, slots_J)
                out = logits.softmax(-1) @ v_SHD[slots_J, h].to(q.values.dtype)
                out_RQD[r].unflatten(0, (num_heads, -1))[h] = out.to(out_RQD.dtype)

    def attend_shares(self, work: Tensor, v_SHD: Tensor, rows: Rows, out_RQD: Tensor) -> None:
        num_heads = v_SHD.shape[1]
        for r, request in _live(rows):
            slots_J = rows.slot_table[request, : int(rows.lens_R[r])].long()
            shares_HGJ = work[r, :, : len(slots_J)].unflatten(0, (num_heads, -1))
            out = torch.einsum("hgj,jhd->hgd", shares_HGJ, v_SHD[slots_J].to(work.dtype))
            out_RQD[r] = out.flatten(0, 1).to(out_RQD.dtype)

    # -- shared state ------------------------------------------------------------------------

    def all_fresh(self, checked: Checked) -> bool:
        return bool(checked.fresh_R.all())

    def extend(self, rows: Rows, pool: Table, seen_R: Tensor, out: Table) -> None:
        requests_R = rows.requests_R.long()
        at = torch.arange(out.positions.shape[2], device=seen_R.device)[None, None]
        counts, seen = pool.counts[requests_R][:, None, None], seen_R[:, None, None].int()
        old = pool.positions[requests_R].gather(
            2,
            at.clamp(max=pool.positions.shape[2] - 1).expand(len(requests_R), out.positions.shape[1], -1),
        )
        positions = torch.where(at < counts, old, at.int() + seen - counts)
        positions = positions.clamp(0, rows.slot_table.shape[1] - 1).int()
        slots = rows.slot_table[requests_R[:, None, None], positions.long()]
        live_R = (seen_R > 0) & (rows.lens_R > 0)
        num = pool.counts[requests_R] + rows.lens_R - seen_R.int()
        for held, new in zip(out, (positions, slots, num), strict=True):
            live = live_R.view(-1, *(1,) * (new.dim() - 1))
            held.index_copy_(0, requests_R, torch.where(live, new, held[requests_R]))

    def seal(self, expected: Expected, lent: Lent, pointers: tuple[int, int]) -> None:
        requests_R = expected.requests_R.long()
        stamps = torch.cat(
            (
                expected.values_R3,
                _pointers(expected, pointers),
                digests(expected, lent.table)[:, None],
            ),
            1,
        )
        live_R1 = (expected.lens_R > 0)[:, None]
        lent.stamps_B6.index_copy_(0, requests_R, torch.where(live_R1, stamps, lent.stamps_B6[requests_R]))

    def check(self, expected: Expected, lent: Lent, pointers: tuple[int, int], stale_F1: Tensor) -> Checked:
        stamps_R6 = lent.stamps_B6[expected.requests_R.long()]
        wanted = (expected.values_R3, _pointers(expected, pointers), digests(expected, lent.table)[:, None])
        good_RF = stamps_R6 == torch.cat(wanted, 1)
        good_RF |= (expected.lens_R == 0)[:, None]
        fresh_R = good_RF.all(1)
        # the first field that differs: all before it are good
        first_RF = ~good_RF & (good_RF.cumprod(1).roll(1, 1).index_fill_(1, _zero(stale_F1), 1) > 0)
        stale_F1 += torch.cat((first_RF.sum(0), (~fresh_R).sum(0, keepdim=True)))
        stale_lens_R = torch.where(fresh_R, 0, expected.lens_R)
        return Checked(fresh_R.to(torch.uint8), stale_lens_R, good_RF)

    def resume(
        self,
        expected: Expected,
        lent: Lent,
        pointers: tuple[int, int],
        scanned_B: Tensor,
        refresh_every: int,
        stale_F1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        requests_R = expected.requests_R.long()
        stamps_R6, scanned_R = lent.stamps_B6[requests_R], scanned_B[requests_R]
        seen_R, (row_R, version_R, lens_R) = stamps_R6[:, 2], expected.values_R3.unbind(1)
        age_R = lens_R - scanned_R
        good_R = (stamps_R6[:, 0] == row_R) & (stamps_R6[:, 1] < version_R) & (expected.lens_R > 0)
        good_R &= (stamps_R6[:, 3:5] == _pointers(expected, pointers)).all(1)
        good_R &= (scanned_R > 0) & (scanned_R <= seen_R) & (seen_R < lens_R) & (age_R < refresh_every)
        intact_R = digests(expected, lent.table) == stamps_R6[:, 5]
        stale_F1[len(FIELDS) - 1] += (good_R & ~intact_R).sum()
        good_R &= intact_R
        return torch.where(good_R, seen_R, 0), torch.where(good_R, age_R, 0)


def digests(expected: Expected, table: Table) -> Tensor:
    """int64 [R] over the rows' positions, slots and counts; any single change of a value shows."""
    requests_R = expected.requests_R.long()
    num_lists, size = table.positions.shape[1:]
    counts_R = table.counts[requests_R].long()
    # odd factors: a changed value never vanishes modulo 2 ** 64, nor does an exchange of two
    factors_XM = 2 * torch.arange(num_lists * size, device=counts_R.device).view(num_lists, size) + 3
    entries = table.positions[requests_R].long() + SLOT_FACTOR * table.slots[requests_R].long()
    counted = torch.arange(size, device=counts_R.device) < counts_R[:, None, None]
    return counts_R + torch.where(counted, factors_XM * entries, 0).sum((1, 2))


def _pointers(expected: Expected, pointers: tuple[int, int]) -> Tensor:
    """int64 [R, 2]; filled, not copied from the host."""
    columns = [torch.full_like(expected.values_R3[:, :1], pointer) for pointer in pointers]
    return torch.cat(columns, 1)


def _zero(like: Tensor) -> Tensor:
    return torch.zeros(1, dtype=torch.int64, device=like.device)


def _live(rows: Rows) -> list[tuple[int, int]]:
    """(row, request slot) of the rows that select."""
    lens, requests = rows.lens_R.tolist(), rows.requests_R.tolist()
    return [(r, requests[r]) for r in range(len(requests)) if lens[r] > 0]


def _bias(rows: Rows, slots_J: Tensor) -> Tensor | float:
    if rows.bias is None:
        return 0.0
    bias_J = key_bias(rows.bias.tags_S, slots_J, rows.bias.alpha, rows.bias.beta)
    return 0.0 if bias_J is None else bias_J.double().clamp_min(-1e30)


def _queries_of_heads(q_QC: Tensor, keys: Keys, mix: Mix | None, r: int) -> list[tuple[int, int]]:
    if mix is not None:
        first = torch.as_tensor(mix.first_RE1)[r].tolist()
        return list(itertools.pairwise(first))
    num_heads = keys.shape[1] if isinstance(keys, Tensor) else keys.codes.shape[1]
    group = len(q_QC) // num_heads
    return [(e * group, (e + 1) * group) for e in range(num_heads)]


def _gathered(keys: Keys, slots_J: Tensor) -> Tensor:
    """float64 [J, E, C]."""
    if isinstance(keys, Tensor):
        return keys[slots_J].double()
    if isinstance(keys, Int4Keys):
        return dequantise_int4(Int4Keys(keys.codes[slots_J], keys.ranges[slots_J])).double()
    assert isinstance(keys, IndexCodes)
    codes_JEB = keys.codes[slots_J]
    return torch.cat((codes_JEB & 15, codes_JEB >> 4), -1).double()
