"""Where a home lies: the head of its path on the device, what is left of it in the host's memory pool.

    path     |<-------- on the device -------->|<---- in host memory only ---->|
             0                             num_device            num_device + num_host

The host gives the device's leaves up first, so what it keeps there is a head, and what hangs below it in host memory
continues that. Without a hierarchical cache `num_host` is 0 everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..types import Interval, RequestState

Piece = tuple[int, Interval]  # index of a plan's segment, positions in the request


@dataclass(frozen=True, slots=True)
class Found:
    """What the tree holds of a sequence."""

    num_device: int  # tokens
    num_host: int  # tokens behind them
    device_node: Any  # where the device's part ends
    node: Any  # where the whole ends


@dataclass(frozen=True, slots=True)
class HomeSlots:
    """Slots of a stretch of a path, in the order of its tokens."""

    device_T: Tensor  # int64 [tokens on the device], slots of the KV pool
    host_T: Tensor  # int64 [tokens behind them], slots of the host's memory pool; on the CPU

    def part(self, first: int, last: int) -> HomeSlots:
        """Those of the tokens [first, last)."""
        num_device = len(self.device_T)
        return HomeSlots(
            self.device_T[first:last], self.host_T[max(0, first - num_device) : max(0, last - num_device)]
        )


def on_device(state: RequestState, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """What of the pieces the KV pool holds."""
    for index, part in pieces:
        held = part.clip(0, _border(state, index))
        if len(held):
            yield index, held


def on_host(state: RequestState, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """What of the pieces only host memory holds."""
    for index, part in pieces:
        held = part.clip(_border(state, index), part.end)
        if len(held):
            yield index, held


def num_on_host(state: RequestState) -> int:
    """Tokens that the request's plan takes from host memory."""
    if state.plan is None or not any(len(slots) for slots in state.host_slots):
        return 0
    copied = ((copy.segment, copy.interval) for copy in state.plan.copies)
    return sum(len(part) for _, part in on_host(state, copied))


def _border(state: RequestState, index: int) -> int:
    """Position in the request behind the last token of the segment that lies on the device."""
    assert state.plan is not None
    return state.plan.segments[index].interval.start + len(state.home_slots[index])
