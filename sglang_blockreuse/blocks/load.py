"""Takes reused KV over: copies V and rotate-copies K from the homes into the request's own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import cpu_rotate_copy
from ..kernels.dispatch import Dispatcher
from ..types import Interval, LocalSegment, RequestState
from .host_copy import HostHomes
from .intervals import positions_of
from .rope import RopeGroup, UnsupportedRope
from .tiers import on_device


class KvLoader:
    """Moves KV between slots of the pool, all layers of a rotary group in one call."""

    def __init__(
        self,
        k_buffers: Sequence[Tensor],
        v_buffers: Sequence[Tensor],
        groups: Sequence[RopeGroup],
        kernels: Dispatcher,
    ) -> None:
        self.device = k_buffers[0].device
        self._kernels = kernels
        self._k_buffers = k_buffers
        self._groups = [
            (group, _table(k_buffers, group.layers), _table(v_buffers, group.layers)) for group in groups
        ]
        for group, k_table, v_table in self._groups:
            if cpu_rotate_copy.covers(k_buffers[0]):
                cpu_rotate_copy.warm_up(k_buffers[0], is_neox=group.is_neox)
            elif self.device.type == "cuda":
                from ..kernels import rotate_copy

                half = 0 if group.table is None else group.table.shape[1] // 2
                rotate_copy.warm_up(k_table, v_table, half, is_neox=group.is_neox)

    def load(self, state: RequestState, row_slots: Tensor, low: int, high: int) -> int:
        """Copy the part of the plan that lies in the chunk [low, high).

        row_slots: the request's slots by position, int [>= high].
        Returns the number of copied tokens. Homes in host memory are not its business, see host_copy.py.
        """
        assert state.plan is not None
        pieces = list(on_device(state, state.plan.copies_within(low, high)))
        if not pieces:
            return 0
        home_T, places = _places(state.plan.segments, state.home_slots, pieces)
        old_T, new_T, place_T = self._to_device(places).unbind()
        self._move(home_T[place_T].long(), row_slots[new_T].long(), old_T, new_T)
        return new_T.numel()

    def on_host(self, controller: Any) -> HostHomes:
        """The same for homes in host memory. controller: the host's HybridCacheController."""
        return HostHomes(controller, self._k_buffers, [group for group, _, _ in self._groups])

    def _to_device(self, places: NDArray[np.int64]) -> Tensor:
        """Without waiting for what the device does: memory that is not pinned would be copied behind it."""
        held = torch.from_numpy(places)
        return held if self.device.type == "cpu" else held.pin_memory().to(self.device, non_blocking=True)

    def _move(self, source_T: Tensor, target_T: Tensor, old_T: Tensor, new_T: Tensor) -> None:
        """The device's part, on the CPU in this thread: read, rotated and written once for each token and layer."""
        for group, k_layers, v_layers in self._groups:
            cos, sin = group.cos_sin(old_T, new_T)
            self._kernels.rotate_copy(k_layers, v_layers, source_T, target_T, cos, sin, is_neox=group.is_neox)


def _places(
    segments: Sequence[LocalSegment], home_slots: Sequence[Tensor], pieces: Sequence[tuple[int, Interval]]
) -> tuple[Tensor, NDArray[np.int64]]:
    """Where the tokens of the pieces (segment, positions in the request; ascending) stand: whatever their number, a
    few operations of the device and one copy to it.

    Returns the slots of the homes in question one behind the other, and int64 [3, tokens]: the position at the home,
    the one in the request, and the place among those slots.
    """
    first, last = pieces[0][0], pieces[-1][0] + 1
    homes = home_slots[first:last]
    behind = np.cumsum([0, *(len(home) for home in homes)])
    lens = [len(part) for _, part in pieces]
    new_T = positions_of([part for _, part in pieces])
    delta_T = np.repeat([segments[at].delta for at, _ in pieces], lens)
    begin_T = np.repeat([segments[at].interval.start - behind[at - first] for at, _ in pieces], lens)
    return torch.cat(tuple(homes)), np.stack([new_T - delta_T, new_T, new_T - begin_T])


def _table(buffers: Sequence[Tensor], layers: Sequence[int]) -> Any:
    """The pools of some layers; on CUDA with their addresses, so that one launch serves all of them."""
    pools = [buffers[layer] for layer in layers]
    if pools[0].device.type != "cuda":
        return pools
    from ..kernels.rotate_copy import PoolTable

    return PoolTable.of(pools)


def moved_once(groups: Sequence[RopeGroup], kv_layers: Sequence[int]) -> list[RopeGroup]:
    """The groups without layers that keep no KV: a buffer that several read must not be rotated for each of them.

    kv_layers: the layer whose KV each layer reads.
    Raises UnsupportedRope where a layer reads keys that another rotary embedding than its own has turned.
    """
    group_of = {layer: index for index, group in enumerate(groups) for layer in group.layers}
    for layer, source in enumerate(kv_layers):
        if group_of[layer] != group_of[source]:
            raise UnsupportedRope(
                f"layer {layer} reads the KV of layer {source} (kv_from), whose keys have another rotary embedding: "
                f"{groups[group_of[source]].name} of layers {groups[group_of[source]].layers}. Choose another source"
            )
    kept = (replace(g, layers=tuple(at for at in g.layers if kv_layers[at] == at)) for g in groups)
    return [group for group in kept if group.layers]
