"""The copies that scorers read in place of the keys: one small key per slot and scoring layer, beside the pool.

Dims: T tokens, S pool slots, H KV heads, D head dim, R rows, Q query heads

A copy belongs to a KV slot, as the key does. So a radix hit finds it where it finds the key, and two requests that
share a prefix share it.

    written(slots)   whoever writes KV says so: the attention backend for every forward, the loader of moved blocks.
                     It costs one byte a slot; nothing is copied for rows that never decode sparse
    begin(rows)      finds the slots of this step's rows that lack a copy
    refresh(layer)   writes those copies once the layer has written its keys

A write that nobody announced would leave a copy of the slot's former key. Every step checks one position in
AUDIT_PERIOD of each row against the keys (in a strict store all of them, which then raises StaleShareState); what
differs is counted and mended.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import cpu_codes
from ..kernels.ops import IndexCodes, Keys, Queries, Rows
from ..kernels.reference_index import IndexMap, index_codes, index_queries
from ..kernels.reference_select import Int4Keys, quantise_int4
from .share_state import StaleShareState

AUDIT_PERIOD = 512  # steps until every position of a row was checked


class KeyCopy(Protocol):
    """The copy of one layer."""

    @property
    def num_bytes(self) -> int: ...

    def write(self, slots_T: Tensor, k_THD: Tensor) -> None: ...

    def differs(self, slots_T: Tensor, k_THD: Tensor) -> Tensor:
        """bool [T]: the slot's copy is that of another key."""
        ...

    @property
    def scored(self) -> Keys:
        """The copy as it is scored."""
        ...

    def queries(self, q: Queries) -> Queries:
        """What scores the copy: [R, Q, C], C = D unless a map made the copy."""
        ...


class Int4Copy:
    """Every channel in 4 bits, with ranges per key (`reference_select.Int4Keys`)."""

    def __init__(
        self, num_slots: int, num_heads: int, head_dim: int, device: torch.device | str = "cpu"
    ) -> None:
        self.keys = Int4Keys.empty(num_slots, num_heads, head_dim, device)

    @property
    def scored(self) -> Keys:
        return self.keys

    @property
    def num_bytes(self) -> int:
        return sum(array.nbytes for array in self.keys)

    def write(self, slots_T: Tensor, k_THD: Tensor) -> None:
        fresh = quantise_int4(k_THD)
        self.keys.codes[slots_T], self.keys.ranges[slots_T] = fresh

    def differs(self, slots_T: Tensor, k_THD: Tensor) -> Tensor:
        fresh = quantise_int4(k_THD)
        same_codes, same_ranges = (
            (held[slots_T] == new).flatten(1).all(1) for held, new in zip(self.keys, fresh, strict=True)
        )
        return ~(same_codes & same_ranges)

    def queries(self, q: Queries) -> Queries:
        return q


class MappedCopy:
    """A few channels that a linear map makes of a token's keys (`reference_index.IndexMap`)."""

    def __init__(self, num_slots: int, index: IndexMap, device: torch.device | str = "cpu") -> None:
        num_heads, num_channels = index.low_EC.shape
        self.index = index = IndexMap(*(tensor.to(device) for tensor in index))
        self.codes = torch.zeros((num_slots, num_heads, num_channels // 2), dtype=torch.uint8, device=device)
        # a query carries the steps, so that the scan sees bare codes
        per_query = index.step_EC.repeat_interleave(index.query_QCD.shape[0] // num_heads, 0)
        self._scaled = index._replace(query_QCD=index.query_QCD * per_query[..., None])

    @property
    def num_bytes(self) -> int:
        return self.codes.nbytes

    def write(self, slots_T: Tensor, k_THD: Tensor) -> None:
        self.codes[slots_T] = index_codes(self.index, k_THD)

    def differs(self, slots_T: Tensor, k_THD: Tensor) -> Tensor:
        """A channel at the border of two codes may be rounded either way: only other codes than these count."""
        held, fresh = self.codes[slots_T].int(), index_codes(self.index, k_THD).int()
        low, high = (held & 15) - (fresh & 15), (held >> 4) - (fresh >> 4)
        return (torch.maximum(low.abs(), high.abs()) > 1).flatten(1).any(1)

    @property
    def scored(self) -> Keys:
        return IndexCodes(self.codes)

    def queries(self, q: Queries) -> Queries:
        values = index_queries(self._scaled, q.values)
        dtype = torch.promote_types(q.values.dtype, values.dtype)
        return Queries(values.to(dtype).contiguous(), q.scale)


class IndexKeys:
    """The copies of a plan's scoring layers. One step at a time."""

    def __init__(self, copies: dict[int, KeyCopy], num_slots: int, *, strict: bool = False) -> None:
        self.copies, self.strict = copies, strict
        self._current_S = torch.zeros(num_slots, dtype=torch.uint8)
        self._step = 0
        self.stale_1 = torch.zeros(1, dtype=torch.int64)  # copies that were of other keys
        self._last = max(copies, default=-1)
        self._absent_T = self._checked_T = torch.zeros(0, dtype=torch.int64)

    @property
    def layers(self) -> Collection[int]:
        """Layers whose keys have a copy here."""
        return self.copies.keys()

    @property
    def num_bytes(self) -> int:
        return self._current_S.nbytes + sum(copy.num_bytes for copy in self.copies.values())

    def written(self, slots_T: Tensor) -> None:
        """KV of these slots is written, or was, by whatever: what stands beside it is of another key."""
        self._current_S[slots_T] = 0

    def begin(self, rows: Rows) -> None:
        """A step of these rows. Slots count as copied once the last layer that has a copy has refreshed it."""
        self._step += 1
        period = 1 if self.strict else AUDIT_PERIOD
        absent, checked = cpu_codes.missing(rows.arrays, self._current_S.numpy(), self._step % period, period)
        self._absent_T, self._checked_T = torch.from_numpy(absent), torch.from_numpy(checked)

    def refresh(self, layer: int, k_SHD: Tensor) -> None:
        """Write what the step's rows lack; mend and count copies that were checked and found to be of other keys.

        Raises StaleShareState for such a copy in a strict store.
        """
        copy, slots_T = self.copies[layer], self._absent_T
        if len(self._checked_T):
            stale_T = self._checked_T[copy.differs(self._checked_T, k_SHD[self._checked_T])]
            self.stale_1 += len(stale_T)
            if len(stale_T) and self.strict:
                raise StaleShareState(
                    f"layer {layer}: slots {stale_T.tolist()[:8]} were rewritten and their index keys were not"
                )
            slots_T = torch.cat((slots_T, stale_T))
        copy.write(slots_T, k_SHD[slots_T])
        if layer == self._last:
            self._current_S[self._absent_T] = 1
