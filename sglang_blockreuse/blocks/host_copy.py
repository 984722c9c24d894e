"""Homes in host memory: copied straight into the request's own slots and turned there to their new positions.

Nothing of the device's pool is taken for them but the slots that the request has anyway, so a home that is used from
host memory pushes nothing out and needs no room of its own. The price is that every use crosses the bus again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels import reference
from ..types import RequestState
from .intervals import positions_of
from .rope import RopeGroup
from .tiers import on_host

# Dims: T tokens, L layers, H KV heads, D head dim


class HostHomes:
    """Reads the host's memory pool by the host's own transfers, whatever its layout.

    controller: the host's HybridCacheController.
    k_buffers, groups: as the loader has them; every layer that keeps KV is in one group.
    """

    def __init__(self, controller: Any, k_buffers: Sequence[Tensor], groups: Sequence[RopeGroup]) -> None:
        self._controller = controller
        self._pool = controller.mem_pool_host.anchor_entry.host_pool
        self._k_buffers = k_buffers
        self._groups = groups

    def wait(self) -> None:
        """Until what this step brings back to the device is there: layers are copied behind the host's back here."""
        counter = self._controller.layer_done_counter
        counter.wait_until(counter.num_layers - 1)

    def load(self, state: RequestState, row_slots: Tensor, low: int, high: int) -> int:
        """Copy what the plan takes from host memory in the chunk [low, high).

        row_slots: the request's slots by position, int [>= high].
        Returns the number of copied tokens.
        """
        assert state.plan is not None
        pieces = list(on_host(state, state.plan.copies_within(low, high)))
        if not pieces:
            return 0
        sources, deltas = [], []
        for index, part in pieces:
            segment = state.plan.segments[index]
            first = part.start - segment.interval.start - len(state.home_slots[index])
            sources.append(state.host_slots[index][first : first + len(part)])
            deltas.append(torch.full((len(part),), segment.delta))
        new_T = torch.from_numpy(positions_of([part for _, part in pieces]))
        old_T = new_T - torch.cat(deltas)
        old_T, new_T = old_T.to(row_slots.device), new_T.to(row_slots.device)
        target_T = row_slots[new_T].long()
        self._fetch(torch.cat(sources), target_T)
        self._turn(target_T, old_T, new_T)
        return len(target_T)

    def _fetch(self, source_T: Tensor, target_T: Tensor) -> None:
        """K and V of all layers as they are at home. source_T: on the CPU."""
        source_T, target_T = self._controller.move_indices(source_T, target_T)
        for group in self._groups:
            for layer in group.layers:
                self._pool.load_to_device_per_layer(
                    self._controller.mem_pool_device, source_T, target_T, layer, self._controller.io_backend
                )

    def _turn(self, slots_T: Tensor, old_T: Tensor, new_T: Tensor) -> None:
        for group in self._groups:
            cos, sin = group.cos_sin(old_T, new_T)
            for layer in group.layers:
                k_SHD = self._k_buffers[layer]
                k_SHD[slots_T] = reference.rotate_keys(k_SHD[slots_T], cos, sin, is_neox=group.is_neox)
