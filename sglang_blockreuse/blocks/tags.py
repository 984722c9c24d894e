"""Tags follow slots: which KV is local and which of it is a false sink, one byte per slot of the pool.

The attention backend adds alpha to the logits of local keys and beta to those of false sinks (source,
section 5.4). Tags are kept only where one of the two is not 0: off costs nothing.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..kernels.reference import TAG_FALSE_SINK, TAG_LOCAL
from ..types import Interval, LocalSegment, RequestState
from .upload import upload


class SlotTags:
    """uint8 [S]; a slot's tag is written whenever its KV is.

    num_sinks: the s of the source. The first s tokens of the sequence are true sinks, which keep their weight; the
    first s tokens of every block that does not begin the sequence are false ones.
    """

    def __init__(self, num_slots: int, *, num_sinks: int, device: torch.device | str) -> None:
        self.values_S = torch.zeros(num_slots, dtype=torch.uint8, device=device)
        self._num_sinks = num_sinks

    def written(self, slots_T: Tensor) -> None:
        """Slots whose KV is computed in this forward: global, whatever stood there before."""
        self.values_S[slots_T] = 0

    def planned(self, state: RequestState, row_slots: Tensor, low: int, high: int) -> None:
        """Tag the chunk [low, high) as the request's plan makes it; to be called whenever the plan changes.

        What is copied is local, and a false sink at the head of its block. What is computed, repaired tokens among
        it, is global, so repair empties the false sinks as the source has it; without a plan everything is.
        What a local path held keeps the tags that it had there.
        row_slots: the request's slots by position.
        """
        slots = row_slots[low:high].long()
        if state.plan is None:
            self.written(slots)
            return
        tags = np.zeros(high - low, dtype=np.int64)
        paths = []
        for index, part in state.plan.copies_within(low, high):
            # a chunk may end inside a copy, and its last position is computed all the same
            part = part.clip(low, high - 1)
            segment = state.plan.segments[index]
            if segment.is_path:
                paths.append((index, part))
                continue
            tags[part.start - low : part.end - low] = TAG_LOCAL
            sinks = self._false_sinks(segment).clip(part.start, part.end)
            if len(sinks):
                tags[sinks.start - low : sinks.end - low] = TAG_LOCAL | TAG_FALSE_SINK
        (found,) = upload([tags], slots.device)
        self.values_S[slots] = found.to(torch.uint8)
        for index, part in paths:
            offset = part.start - state.plan.segments[index].interval.start
            held = self.values_S[state.home_slots[index][offset : offset + len(part)]]
            self.values_S[slots[part.start - low : part.end - low]] = held

    def _false_sinks(self, segment: LocalSegment) -> Interval:
        """S' of one block: its leading tokens without the sequence's; empty for the block that begins it."""
        first = segment.block_start
        return Interval(max(first, self._num_sinks), first + self._num_sinks)
