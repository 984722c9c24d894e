"""Bounds of pages, for the scorer `page_minmax`: the channel-wise range of P consecutive keys of a row.

Dims as in row_pages.py, and: H KV heads, D head dim

A page that is not full is computed anew in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_pages
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_pages import Arena
from ..kernels.cpu_scan import Mix
from ..kernels.cpu_select import Geometry, Rows
from ..kernels.reference_select import page_bounds
from .row_pages import RowPages, Wanted


class PageIndex(RowPages):
    """The bounds of the layers that scan by them."""

    def __init__(self, layers: Iterable[int], k_pool_SHD: Tensor, page_size: int, *, strict: bool) -> None:
        num_slots, num_heads, head_dim = k_pool_SHD.shape
        # rows that share a prefix hold its pages each, so this may grow
        size = -(-num_slots // page_size)
        shape = (size, num_heads, 2 * head_dim)
        bounds = {layer: torch.zeros(shape, dtype=k_pool_SHD.dtype) for layer in layers}
        super().__init__(bounds, _arena(size, page_size), num_slots, page_size=page_size, strict=strict)

    def _num_pages(self, lens_R: Any) -> Any:
        return -(-lens_R // self.page_size)

    def _missing(self, rows: Rows, phase: int, period: int) -> Wanted:
        return Wanted(*cpu_pages.missing(rows, self._table_BN, self._arena, self._written_S, phase, period))

    def _empty_arena(self, size: int) -> Arena:
        return _arena(size, self.page_size)

    def refresh(self, layer: int, k_SHD: Tensor) -> int:
        """See `RowPages._refresh`."""
        return self._refresh(layer, lambda entries_C: self._compute(entries_C, k_SHD))

    def score(
        self,
        geometry: Geometry,
        layer: int,
        q_RQD: Any,
        rows: Rows,
        pooled_R: Any,
        work_RQW: Any,
        mix: Mix,
    ) -> None:
        """Shares of the pages of the rows with pooled_R[r] = 0, at [r, q, n]."""
        bounds_CED = as_array(self._stored[layer])
        table, arena = self._table_BN, self._arena
        cpu_pages.score(geometry, q_RQD, bounds_CED, rows, table, arena, pooled_R, work_RQW, mix)

    def _compute(self, entries_C: Any, k_SHD: Tensor) -> Tensor:
        """[n, H, 2 D], low beside high."""
        slots = torch.from_numpy(self._arena.slots_CP[entries_C]).long()
        return torch.cat(page_bounds(k_SHD[slots]), -1)


def _arena(size: int, page_size: int) -> Arena:
    return Arena(
        np.full((size, page_size), -1, np.int32), np.full(size, -1, np.int64), np.zeros(size, np.uint8)
    )
