"""Takes reused KV over: copies V and rotate-copies K from the homes into the request's own slots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..kernels import cpu_rotate_copy
from ..kernels.dispatch import Dispatcher
from ..types import RequestState
from .rope import RopeGroup, UnsupportedRope


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
        Returns the number of copied tokens.
        """
        assert state.plan is not None
        sources, targets, old, new = [], [], [], []
        for index, part in state.plan.copies_within(low, high):
            segment, home = state.plan.segments[index], state.home_slots[index]
            offset = part.start - segment.interval.start
            sources.append(home[offset : offset + len(part)])
            targets.append(row_slots[part.start : part.end])
            positions = torch.arange(part.start, part.end, device=self.device)
            new.append(positions)
            old.append(positions - segment.delta)
        if not sources:
            return 0
        source_T, target_T = torch.cat(sources).long(), torch.cat(targets).long()
        old_T, new_T = torch.cat(old), torch.cat(new)
        for group, k_layers, v_layers in self._groups:
            cos, sin = group.cos_sin(old_T, new_T)
            self._kernels.rotate_copy(k_layers, v_layers, source_T, target_T, cos, sin, is_neox=group.is_neox)
        return target_T.numel()


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
