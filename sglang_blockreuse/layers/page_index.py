"""Bounds of pages, for the scorer `page_minmax`: the channel-wise range of P consecutive keys of a row.

Dims: C entries, P tokens of a page, S pool slots, H KV heads, D head dim, B request slots, N pages of a row

Slots of the pool are in no order, pages are consecutive positions of a row, so pages belong to rows: a request slot
holds entries of one arena, page by page. Bounds are a function of the page's slots and of what stands in them, and
that is what is checked in every step, not whose row it is:

    slots     the entry's slots are the row's own at these positions, so a request slot that changes hands, a row that
              came back, a prefix that the tree exchanged or a block that was copied finds nothing it could misread
    stamp     none of them was written since. Whoever writes KV says so (`written`), as for copies of keys

A page that is not full is computed anew in every step. A write that nobody announced is found by an audit, as in
index_keys.py: one page in AUDIT_PERIOD of each row in every step, all of them in a strict store.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels import cpu_pages
from ..kernels.cpu_numba import as_array
from ..kernels.cpu_pages import Arena
from ..kernels.cpu_scan import Mix
from ..kernels.ops import Queries, Rows
from ..kernels.ops_cpu import geometry_of
from ..kernels.reference_select import page_bounds
from . import index_keys
from .index_keys import KeyCopy
from .share_state import StaleShareState


class PageIndex:
    """The pages of the layers that scan by them. One step at a time."""

    def __init__(self, layers: Iterable[int], k_pool_SHD: Tensor, page_size: int, *, strict: bool) -> None:
        num_slots, num_heads, head_dim = k_pool_SHD.shape
        self.page_size, self.strict = page_size, strict
        self._written_S = np.zeros(num_slots, np.int64)
        self._clock = self._step = 0
        self.stale_1 = torch.zeros(1, dtype=torch.int64)  # pages that were of other keys
        # rows that share a prefix hold its pages each, so this may grow
        size = -(-num_slots // page_size)
        shape = (size, num_heads, 2 * head_dim)
        self._bounds = {layer: torch.zeros(shape, dtype=k_pool_SHD.dtype) for layer in layers}
        self._arena = _arena(size, page_size)
        self._free = list(range(size))
        self._table_BN: Any = np.zeros((0, 0), np.int32)
        self._held: dict[int, int] = {}  # entries of a request slot
        self._last = max(self._bounds, default=-1)
        self._absent_C = self._complete_C = self._checked_C = np.zeros(0, np.int64)

    @property
    def layers(self) -> Collection[int]:
        """Layers whose keys have bounds here."""
        return self._bounds.keys()

    @property
    def copies(self) -> Mapping[int, KeyCopy]:
        """None: pages have scores of their own."""
        return {}

    @property
    def num_bytes(self) -> int:
        arrays = (self._written_S, self._table_BN, *self._arena)
        return sum(array.nbytes for array in (*arrays, *self._bounds.values()))

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is written, or was, by whatever: bounds that read them before are of other keys."""
        self._clock += 1
        self._written_S[slots_T.numpy()] = self._clock

    def begin(self, rows: Rows) -> None:
        """A step of these rows. Pages count as known once the last layer that has bounds has refreshed them."""
        self._step += 1
        self._give_pages(rows)
        period = 1 if self.strict else index_keys.AUDIT_PERIOD
        self._absent_C, self._complete_C, self._checked_C = cpu_pages.missing(
            rows.arrays, self._table_BN, self._arena, self._written_S, self._step % period, period
        )

    def refresh(self, layer: int, k_SHD: Tensor) -> None:
        """Compute what the step's rows lack; mend and count pages that were checked and found to be of other keys.

        Raises StaleShareState for such a page in a strict store.
        """
        bounds_CED, entries_C = self._bounds[layer], self._absent_C
        if len(self._checked_C):
            fresh = self._compute(self._checked_C, k_SHD)
            differs = (fresh != bounds_CED[self._checked_C]).flatten(1).any(1).numpy()
            stale_C = self._checked_C[differs]
            self.stale_1 += len(stale_C)
            if len(stale_C) and self.strict:
                slots = self._arena.slots_CP[stale_C[0]].tolist()
                raise StaleShareState(f"layer {layer}: slots {slots} were rewritten and their page was not")
            entries_C = np.concatenate((entries_C, stale_C))
        bounds_CED[entries_C] = self._compute(entries_C, k_SHD)
        if layer == self._last:
            self._arena.stamp_C[self._complete_C] = self._clock

    def score(
        self, layer: int, q: Queries, k_SHD: Tensor, rows: Rows, pooled_R: Tensor, work_RQW: Tensor, mix: Mix
    ) -> None:
        """Shares of the pages of the rows with pooled_R[r] = 0, at [r, q, n]."""
        cpu_pages.score(
            geometry_of(q, k_SHD),
            q.values.numpy(),
            as_array(self._bounds[layer]),
            rows.arrays,
            self._table_BN,
            self._arena,
            pooled_R.numpy(),
            work_RQW.numpy(),
            mix,
        )

    def _compute(self, entries_C: Any, k_SHD: Tensor) -> Tensor:
        """[n, H, 2 D], low beside high."""
        slots = torch.from_numpy(self._arena.slots_CP[entries_C]).long()
        return torch.cat(page_bounds(k_SHD[slots]), -1)

    # -- entries -----------------------------------------------------------------------------

    def _give_pages(self, rows: Rows) -> None:
        """Every row of the step gets as many entries as it has pages."""
        num_requests, max_len = rows.slot_table.shape
        shape = (num_requests, -(-max_len // self.page_size))
        if self._table_BN.shape != shape:
            self._release(list(self._held))
            self._table_BN = np.zeros(shape, np.int32)
        requests = rows.requests_R.tolist()
        pages = (-(-rows.lens_R.numpy() // self.page_size)).tolist()
        # rows that shrank first
        for request, num in sorted(
            zip(requests, pages, strict=True), key=lambda row: row[1] - self._of(row[0])
        ):
            held = self._of(request)
            if num < held:
                self._free += self._table_BN[request, num:held].tolist()
            elif num > held:
                self._require(num - held, requests)
                taken = [self._free.pop() for _ in range(num - held)]
                self._table_BN[request, held:num] = taken
            self._held[request] = num

    def _of(self, request: int) -> int:
        return self._held.get(request, 0)

    def _require(self, num_entries: int, running: Collection[int]) -> None:
        """Free so many entries: those of rows that are not running, then new ones."""
        if len(self._free) < num_entries:
            self._release([request for request in self._held if request not in running])
        size = len(self._arena.stamp_C)
        if len(self._free) < num_entries:
            more = max(size, num_entries)
            self._arena = Arena(
                *map(np.concatenate, zip(self._arena, _arena(more, self.page_size), strict=True))
            )
            for layer, bounds in self._bounds.items():
                self._bounds[layer] = torch.cat((bounds, bounds.new_zeros(more, *bounds.shape[1:])))
            self._free += range(size, size + more)

    def _release(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._free += self._table_BN[request, : self._held.pop(request)].tolist()


def _arena(size: int, page_size: int) -> Arena:
    return Arena(
        np.full((size, page_size), -1, np.int32), np.full(size, -1, np.int64), np.zeros(size, np.uint8)
    )
