"""Copies of keys on a device: a step finds by itself what its rows lack, and writes it before it scans.

The law of copies stands in `index_keys`. There a step's slots are listed on the host; here their flags are looked at
inside the step, once per scoring layer, so that a captured step serves every batch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from ..kernels.index_codes import refresh_codes
from ..kernels.int4_keys import refresh_int4
from ..kernels.ops import Rows
from . import index_keys
from .index_keys import Int4Copy, KeyCopy, MappedCopy


class DeviceCopy(KeyCopy, Protocol):
    def refresh(self, rows: Rows, k_SHD: Tensor, *flags: Tensor, **words: Any) -> None:
        """Write what the rows lack, see `kernels.int4_keys.refresh_int4`."""
        ...


class DeviceInt4(Int4Copy):
    def refresh(self, rows: Rows, k_SHD: Tensor, *flags: Tensor, **words: Any) -> None:
        refresh_int4(self.keys, rows, k_SHD, *flags, **words)


class DeviceMapped(MappedCopy):
    def refresh(self, rows: Rows, k_SHD: Tensor, *flags: Tensor, **words: Any) -> None:
        refresh_codes(self.index, self.codes, rows, k_SHD, *flags, **words)


class DeviceIndexKeys:
    """The copies of a plan's scoring layers. One step at a time."""

    def __init__(self, copies: Mapping[int, DeviceCopy], num_slots: int, device: torch.device | str) -> None:
        self.copies = copies
        self._current_S = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._step_1 = torch.zeros(1, dtype=torch.int64, device=device)
        self.stale_1 = torch.zeros(1, dtype=torch.int64, device=device)  # copies that were of other keys
        self._last = max(copies)
        self._rows: Rows | None = None

    @property
    def layers(self) -> Collection[int]:
        """Layers whose keys have a copy here."""
        return self.copies.keys()

    @property
    def num_bytes(self) -> int:
        return self._current_S.nbytes + sum(copy.num_bytes for copy in self.copies.values())

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is written, or was, by whatever: what stands beside it is of another key."""
        self._current_S.index_fill_(0, slots_T.long(), 0)

    def begin(self, rows: Rows) -> None:
        """A step of these rows. Slots count as copied once the last layer that has a copy has refreshed it."""
        self._step_1 += 1
        self._rows = rows

    def refresh(self, layer: int, k_SHD: Tensor) -> None:
        """Write what the step's rows lack. What was of other keys is counted in `stale_1`."""
        assert self._rows is not None
        self.copies[layer].refresh(
            self._rows,
            k_SHD,
            self._current_S,
            self._step_1,
            self.stale_1,
            period=index_keys.AUDIT_PERIOD,
            is_last=layer == self._last,
            max_len=self._rows.slot_table.shape[1],
        )
