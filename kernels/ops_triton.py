"""The operations of `ops` on CUDA, in Triton. Nothing here waits for the device or looks at a value.

Dims as in ops.py. Scores are summed over the query heads of a list before they are written: `work` is float32
[R, X, W] with the most lists that the plan's tables have. What no kernel fuses (a pool of an earlier step that is
extended) runs as the law has it, which is plain PyTorch without a loop over rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .cpu_scan import Mix
from .decode_attention import Listed, decode_attention
from .ops import Checked, Chosen, Expected, Keys, Lent, Queries, Routing, Rows, Table
from .ops_law import LawOps
from .scan import pooled_scores
from .stamps import check, seal
from .top_k import TableOut, keep

LOWEST = -1e30  # stands for -inf in a bias, which would leave a softmax of hidden keys undefined


class TritonOps(LawOps):
    gives_shares = False

    def __init__(self, num_lists: int, max_len: int, device: torch.device | str) -> None:
        """num_lists: the most of any table; max_len: keys that a row may have, which chooses how rows are split."""
        self._num_lists, self._max_len, self._device = num_lists, max_len, device
        self._reserved = torch.empty(0, dtype=torch.float32, device=device)

    def reserve(self, num_rows: int) -> None:
        """Room for steps of so many rows, before any is captured: graphs keep its address."""
        size = num_rows * self._num_lists * self._max_len
        self._reserved = torch.empty(size, dtype=torch.float32, device=self._device)

    def queries(self, q_RQD: Tensor, scale: float) -> Queries:
        return Queries(q_RQD, scale)

    def route(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, heads: Routing
    ) -> tuple[Queries, Mix]:
        raise NotImplementedError("routed heads are chosen on the CPU only; see plan_support.py")

    def num_worths(self, num_queries: int) -> int:
        return self._num_lists

    def scratch(self, num_rows: int, num_queries: int, width: int) -> Tensor:
        size = num_rows * self._num_lists * width
        room = self._reserved
        if size > len(room):
            room = torch.empty(size, dtype=torch.float32, device=self._device)
        return room[:size].view(num_rows, self._num_lists, width)

    def score(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, work: Tensor, mix: Mix | None
    ) -> None:
        assert mix is None
        pooled_scores(
            q.values,
            keys,
            rows.slot_table.view(-1),
            rows.first_R,
            scale=q.scale,
            heads="layer" if work.shape[1] == 1 else "kv_head",
            kv_lens_R=rows.lens_R,
            pool_RXM=pool.positions,
            pool_lens_R=pool.counts,
            pool_rows_R=rows.requests_R,
            pooled_R=pooled_R,
            out=work,
            **_bias(rows),
        )

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
        assert page_size == 1
        keep(
            work,
            rows.lens_R,
            TableOut(rows.requests_R, *out, rows.slot_table),
            pool_BXM=pool.positions,
            pool_lens_B=pool.counts,
            pooled_R=pooled_R,
            num_sinks=sinks,
            window=window,
        )

    def attend(
        self, q: Queries, k_SHD: Tensor, v_SHD: Tensor, rows: Rows, chosen: Chosen, out_RQD: Tensor
    ) -> None:
        own: tuple[Any, ...] = (None, None, None)
        if chosen.own is not None and chosen.fresh_R is not None:
            own = (chosen.own.slots, chosen.own.counts, chosen.fresh_R)
        shared = chosen.shared
        decode_attention(
            q.values,
            k_SHD,
            v_SHD,
            rows.slot_table.view(-1),
            rows.first_R,
            scale=q.scale,
            kv_lens_R=rows.lens_R if rows.dense_lens_R is None else rows.dense_lens_R,
            max_len=self._max_len,
            listed=Listed(rows.requests_R, rows.lens_R, shared.slots, shared.counts, *own),
            out=out_RQD,
            **_bias(rows),
        )

    def attend_shares(self, work: Tensor, v_SHD: Tensor, rows: Rows, out_RQD: Tensor) -> None:
        raise NotImplementedError(
            "scores of all heads of a list are one number here: there is nothing to attend by"
        )

    def seal(self, expected: Expected, lent: Lent, pointers: tuple[int, int]) -> None:
        seal(expected, lent, pointers)

    def check(self, expected: Expected, lent: Lent, pointers: tuple[int, int], stale_F1: Tensor) -> Checked:
        fresh_R = torch.empty(len(expected.requests_R), dtype=torch.uint8, device=stale_F1.device)
        stale_lens_R = torch.empty_like(expected.lens_R)
        check(expected, lent, pointers, stale_F1, fresh_R, stale_lens_R)
        return Checked(fresh_R, stale_lens_R, None)

    def all_fresh(self, checked: Checked) -> bool:
        return False


def _bias(rows: Rows) -> dict[str, Any]:
    if rows.bias is None or (rows.bias.alpha == 0 and rows.bias.beta == 0):
        return {}
    return {
        "tags_S": rows.bias.tags_S,
        "alpha": max(rows.bias.alpha, LOWEST),
        "beta": max(rows.bias.beta, LOWEST),
    }
