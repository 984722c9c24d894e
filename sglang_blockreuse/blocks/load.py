"""Takes reused KV over: copies V and rotate-copies K from the homes into the request's own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..kernels import cpu_rotate_copy
from ..kernels.dispatch import Dispatcher
from ..types import RequestState
from .host_copy import HostHomes
from .intervals import positions_of
from .rope import RopeGroup, UnsupportedRope
from .tiers import on_device
from .upload import upload


@dataclass(frozen=True, slots=True)
class Copies:
    """What one request copies in a step. Dims: T its copied tokens, ascending"""

    row: int  # of the host's page table
    homes: Sequence[Tensor]  # int64, slots of the homes in question
    home_T: NDArray[np.int64]  # place among those slots, one behind the other
    old_T: NDArray[np.int64]  # position at the home
    new_T: NDArray[np.int64]  # position in the request

    @property
    def num_tokens(self) -> int:
        return len(self.new_T)


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

                rotate_copy.warm_up(k_table, v_table, group.table, is_neox=group.is_neox)

    def find(self, state: RequestState, row: int, low: int, high: int) -> Copies:
        """What the plan copies in the chunk [low, high) of a request whose slots are a row of the page table.

        Homes in host memory are not its business, see host_copy.py.
        """
        assert state.plan is not None
        segments, pieces = state.plan.segments, list(on_device(state, state.plan.copies_within(low, high)))
        first, last = (pieces[0][0], pieces[-1][0] + 1) if pieces else (0, 0)
        homes = state.home_slots[first:last]
        behind = np.cumsum([0, *(len(home) for home in homes)])
        lens = [len(part) for _, part in pieces]
        deltas = np.array([segments[at].delta for at, _ in pieces], dtype=np.int64)
        begins = np.array(
            [segments[at].interval.start - behind[at - first] for at, _ in pieces], dtype=np.int64
        )
        new_T = positions_of([part for _, part in pieces])
        return Copies(row, homes, new_T - np.repeat(begins, lens), new_T - np.repeat(deltas, lens), new_T)

    def load(self, copies: Sequence[Copies], slot_table: Tensor) -> None:
        """Take over what some requests copy: for all of them one upload, and one copy for each group of layers.

        slot_table: int32 [request slots, positions], the host's page table.
        """
        copies = [c for c in copies if c.num_tokens]
        if not copies:
            return
        homes = [slots for c in copies for slots in c.homes]
        behind = np.cumsum([0, *(sum(len(slots) for slots in c.homes) for c in copies)])
        old_T, new_T, home_T, entry_T = upload(
            [
                np.concatenate([c.old_T for c in copies]),
                np.concatenate([c.new_T for c in copies]),
                np.concatenate([c.home_T + first for c, first in zip(copies, behind[:-1], strict=True)]),
                np.concatenate([c.new_T + c.row * slot_table.shape[1] for c in copies]),
            ],
            self.device,
        )
        self._move(torch.cat(homes)[home_T], slot_table.view(-1)[entry_T], old_T, new_T)

    def on_host(self, controller: Any) -> HostHomes:
        """The same for homes in host memory. controller: the host's HybridCacheController."""
        return HostHomes(controller, self._k_buffers, [group for group, _, _ in self._groups])

    def _move(self, source_T: Tensor, target_T: Tensor, old_T: Tensor, new_T: Tensor) -> None:
        """The device's part, on the CPU in this thread: read, rotated and written once for each token and layer."""
        for group, k_layers, v_layers in self._groups:
            cos, sin = group.cos_sin(old_T, new_T, self._kernels.cached_cos_sin)
            self._kernels.rotate_copy(k_layers, v_layers, source_T, target_T, cos, sin, is_neox=group.is_neox)


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
