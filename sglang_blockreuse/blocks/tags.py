"""Tags follow slots: which KV is local and which of it is a false sink, one byte per slot of the pool.

The attention backend adds alpha to the logits of local keys and beta to those of false sinks (source,
section 5.4). Tags are kept only where one of the two is not 0: off costs nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.reference import TAG_FALSE_SINK, TAG_LOCAL
from ..types import Interval, RequestState


class SlotTags:
    """uint8 [S]; a slot's tag is written whenever its KV is."""

    def __init__(self, num_slots: int, *, num_sinks: int, device: torch.device | str) -> None:
        self.values_S = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._num_sinks = num_sinks

    def written(self, slots_T: Tensor) -> None:
        """Slots whose KV is computed in this forward: global, whatever stood there before."""
        self.values_S[slots_T] = 0

    def loaded(self, state: RequestState, row_slots: Tensor, low: int, high: int) -> None:
        """Positions of [low, high) that were copied: local, and false sinks at the head of their block.

        Positions that are repaired keep their tag 0, so repair empties the false sinks as the source has it.
        What a local path held keeps the tags that it had there.
        row_slots: the request's slots by position.
        """
        assert state.plan is not None
        for index, part in state.plan.copies_within(low, high):
            slots = row_slots[part.start : part.end].long()
            segment = state.plan.segments[index]
            if segment.is_path:
                offset = part.start - segment.interval.start
                self.values_S[slots] = self.values_S[state.home_slots[index][offset : offset + len(part)]]
                continue
            self.values_S[slots] = TAG_LOCAL
            sinks = Interval(segment.block_start, segment.block_start + self._num_sinks).clip(
                part.start, part.end
            )
            if len(sinks):
                self.values_S[row_slots[sinks.start : sinks.end].long()] = TAG_LOCAL | TAG_FALSE_SINK
