"""Takes reused KV over: copies V and rotate-copies K from the homes into the request's own slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..kernels import cpu_rotate_copy, reference
from ..types import RequestState
from .rope import RopeGroup


class KvLoader:
    """Moves KV between slots of the pool, all layers of a rotary group in one call."""

    def __init__(self, k_buffers: Sequence[Tensor], v_buffers: Sequence[Tensor], groups: Sequence[RopeGroup]) -> None:
        self._groups = [
            (group, [k_buffers[i] for i in group.layers], [v_buffers[i] for i in group.layers]) for group in groups
        ]
        self.device = k_buffers[0].device
        self._rotate_copy: Callable[..., None] = reference.rotate_copy
        if cpu_rotate_copy.covers(k_buffers[0]):
            self._rotate_copy = cpu_rotate_copy.rotate_copy
            for group in groups:
                cpu_rotate_copy.warm_up(k_buffers[0], is_neox=group.is_neox)

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
            self._rotate_copy(k_layers, v_layers, source_T, target_T, cos, sin, is_neox=group.is_neox)
        return target_T.numel()
