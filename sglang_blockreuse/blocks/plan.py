"""Turns what the tree holds into a plan: which positions are copied, which are computed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..types import BlockOptions, BlockPlan, Copy, Interval, LocalSegment
from .policy import POLICIES


def build_plan(
    segments: Sequence[LocalSegment],
    *,
    start: int,
    end: int,
    options: BlockOptions,
) -> BlockPlan:
    """Plan the positions [start, end) of one request.

    segments: reusable stretches behind `start`, ascending, disjoint.
    start: length of the exact prefix; end: length of the sequence to prefill.

    The last position is computed whatever the policy says. Host-free and deterministic,
    so every tensor-parallel rank builds the same plan.
    """
    block_end = options.spans[-1].end if options.spans else end
    repaired = POLICIES[options.policy](
        [s.interval for s in segments],
        tau=options.tau,
        budget_tokens=int(options.budget * block_end),
    )
    repaired = merge([*repaired, Interval(end - 1, end)])
    copies = [
        Copy(hole, index)
        for index, segment in enumerate(segments)
        for hole in subtract(segment.interval, repaired)
    ]
    runs = subtract(Interval(start, end), [c.interval for c in copies])
    num_local = sum(len(s.interval) for s in segments)
    num_reused = sum(len(c.interval) for c in copies)
    return BlockPlan(
        start=start,
        end=end,
        segments=tuple(segments),
        copies=tuple(copies),
        runs=tuple(runs),
        num_repaired=num_local - num_reused,
        block_end=block_end,
    )


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals as ascending, disjoint, non-touching intervals."""
    merged: list[Interval] = []
    for interval in sorted(i for i in intervals if len(i)):
        if merged and interval.start <= merged[-1].end:
            merged[-1] = Interval(merged[-1].start, max(merged[-1].end, interval.end))
        else:
            merged.append(interval)
    return merged


def subtract(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """`whole` without `holes` (ascending, disjoint)."""
    rest, position = [], whole.start
    for hole in holes:
        hole = hole.clip(whole.start, whole.end)
        if not len(hole):
            continue
        if position < hole.start:
            rest.append(Interval(position, hole.start))
        position = max(position, hole.end)
    if position < whole.end:
        rest.append(Interval(position, whole.end))
    return rest
