"""Means of keys and values of the blocks of rows, for a tail (`selection.tail: block_mean`).

Dims as in row_pages.py, and: H KV heads, D head dim

A block is summed up once, when it is full; layers that read the same main KV have one copy. What is kept is a mean in
as many bytes as the pool's elements have, so a tail reads one key and one value in place of every TAIL_BLOCK.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu_tail
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_select import Geometry, Rows, Table
from ..kernels.cpu_tail import STORED, Blocks
from .plan import TAIL_BLOCK, BoundPlan
from .row_pages import RowPages, Wanted


class BlockMeans(RowPages):
    """The means that the layers of a plan with a tail attend to."""

    def __init__(self, plan: BoundPlan, geometry: Geometry, num_slots: int, *, strict: bool) -> None:
        self.geometry, self.sources = geometry, plan.tail_layers
        # rows that share a prefix hold its blocks each, so this may grow
        size = -(-num_slots // TAIL_BLOCK)
        shape, dtype = (size, geometry.num_kv_heads, 2 * geometry.head_dim), STORED[geometry.dtype]
        means = {layer: torch.zeros(shape, dtype=dtype) for layer in set(self.sources.values())}
        arena = Blocks.empty(size, TAIL_BLOCK)
        super().__init__(means, arena, num_slots, page_size=TAIL_BLOCK, strict=strict)
        self._rows: Rows | None = None

    def _num_pages(self, lens_R: Any) -> Any:
        return lens_R // self.page_size

    def _missing(self, rows: Rows, phase: int, period: int) -> Wanted:
        self._rows = rows
        absent, checked = cpu_tail.missing(rows, self._table_BN, self._arena, self._written_S, phase, period)
        return Wanted(absent, absent, checked)

    def _empty_arena(self, size: int) -> Blocks:
        return Blocks.empty(size, self.page_size)

    def refresh(self, layer: int, k_SHD: Tensor, v_SHD: Tensor) -> int:
        """For a layer whose means others may read too, see `RowPages._refresh`."""
        keys, values, rows = as_array(k_SHD), as_array(v_SHD), self._rows
        assert rows is not None

        def compute(entries_C: Any) -> Tensor:
            means = cpu_tail.means(self.geometry, keys, values, self._arena, entries_C, rows)
            return torch.from_numpy(means).to(STORED[self.geometry.dtype])

        return self._refresh(layer, compute)

    def attend(
        self, layer: int, q_RQD: Any, keys: Any, values: Any, rows: Rows, table: Table, out_RQD: Any
    ) -> None:
        """Attention of rows of the step over their lists and what these leave out, see `cpu_tail.attend`."""
        means = self._stored[self.sources[layer]]
        means_CHE = (means.view(torch.uint16) if means.dtype == torch.float16 else means).numpy()
        words = (means_CHE, self._table_BN, self._arena, out_RQD)
        cpu_tail.attend(self.geometry, q_RQD, keys, values, rows, table, *words)
