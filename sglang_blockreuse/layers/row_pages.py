"""Things kept of P consecutive positions of a row: whose they are, and whether they still hold.

Dims: C entries, P tokens of a page, S pool slots, B request slots, N pages of a row

Slots of the pool are in no order, pages are consecutive positions of a row, so pages belong to rows: a request slot
holds entries of one arena, page by page. What is kept of a page is a function of its slots and of what stands in them,
and that is what is checked in every step, not whose row it is:

    slots     the entry's slots are the row's own at these positions, so a request slot that changes hands, a row that
              came back, a prefix that the tree exchanged or a block that was copied finds nothing it could misread
    stamp     none of them was written since. Whoever writes KV says so (`written`), as for copies of keys

A write that nobody announced is found by an audit, as in index_keys.py: one page in AUDIT_PERIOD of each row in every
step, all of them in a strict store.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from ..kernels.cpu_select import Rows
from . import index_keys
from .share_state import StaleShareState


class Wanted(NamedTuple):
    """Entries (int64) of a step."""

    absent_C: Any  # that must be computed
    complete_C: Any  # of these those that hold from then on
    checked_C: Any  # that hold, and are checked


_NOTHING = Wanted(*(np.zeros(0, np.int64),) * 3)


class RowPages(ABC):
    """The pages of some layers. One step at a time."""

    def __init__(
        self, stored: dict[int, Tensor], arena: Any, num_slots: int, *, page_size: int, strict: bool
    ) -> None:
        """stored: what is kept of every entry, by layer [C, ...]; arena: what tells whether it holds, arrays of C,
        among them `slots_CP` and `stamp_C`."""
        self.page_size, self.strict = page_size, strict
        self._stored, self._arena = stored, arena
        self._written_S = np.zeros(num_slots, np.int64)
        self._clock = self._step = 0
        self._free = list(range(len(arena.stamp_C)))
        self._table_BN: Any = np.zeros((0, 0), np.int32)
        self._held: dict[int, int] = {}  # entries of a request slot
        self._last = max(stored, default=-1)
        self._wanted = _NOTHING

    @abstractmethod
    def _num_pages(self, lens_R: Any) -> Any:
        """Pages of rows of these lengths."""

    @abstractmethod
    def _missing(self, rows: Rows, phase: int, period: int) -> Wanted:
        """What the rows lack, and what of the rest is checked in this phase."""

    @abstractmethod
    def _empty_arena(self, size: int) -> Any:
        """Entries of nothing."""

    @property
    def layers(self) -> Collection[int]:
        """Layers of whose pages something is kept here."""
        return self._stored.keys()

    @property
    def num_bytes(self) -> int:
        arrays = (self._written_S, self._table_BN, *self._arena)
        return sum(array.nbytes for array in (*arrays, *self._stored.values()))

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is written, or was, by whatever: what was read of them before is of other keys."""
        self._clock += 1
        self._written_S[slots_T.numpy()] = self._clock

    def begin(self, rows: Rows) -> None:
        """A step of these rows. Pages count as known once the last layer that keeps some has refreshed them."""
        self._step += 1
        self._give_pages(rows)
        period = 1 if self.strict else index_keys.AUDIT_PERIOD
        self._wanted = self._missing(rows, self._step % period, period)

    def _refresh(self, layer: int, compute: Callable[[Any], Tensor]) -> int:
        """Compute what the step's rows lack; the number of pages that were checked and found to be of other keys.

        Raises StaleShareState for such a page in a strict store.
        """
        stored, (entries_C, complete_C, checked_C), num_stale = self._stored[layer], self._wanted, 0
        if len(checked_C):
            differs = (compute(checked_C) != stored[checked_C]).flatten(1).any(1).numpy()
            stale_C = checked_C[differs]
            num_stale = len(stale_C)
            if num_stale and self.strict:
                slots = self._arena.slots_CP[stale_C[0]].tolist()
                raise StaleShareState(f"layer {layer}: slots {slots} were rewritten and their page was not")
            entries_C = np.concatenate((entries_C, stale_C))
        stored[entries_C] = compute(entries_C)
        if layer == self._last:
            self._arena.stamp_C[complete_C] = self._clock
        return num_stale

    # -- entries -----------------------------------------------------------------------------

    def _give_pages(self, rows: Rows) -> None:
        """Every row of the step gets as many entries as it has pages."""
        num_requests, max_len = rows.slot_table.shape
        shape = (num_requests, -(-max_len // self.page_size))
        if self._table_BN.shape != shape:
            self._release(list(self._held))
            self._table_BN = np.zeros(shape, np.int32)
        requests = rows.requests_R.tolist()
        pages = self._num_pages(rows.lens_R).tolist()
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
            grown = map(np.concatenate, zip(self._arena, self._empty_arena(more), strict=True))
            self._arena = type(self._arena)(*grown)
            for layer, stored in self._stored.items():
                self._stored[layer] = stored.new_zeros(size + more, *stored.shape[1:])
                self._stored[layer][:size] = stored
            self._free += range(size, size + more)

    def _release(self, requests: Iterable[int]) -> None:
        for request in requests:
            self._free += self._table_BN[request, : self._held.pop(request)].tolist()
