"""Turns what the tree holds into a plan: which positions are copied, which are computed."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import BlockOptions, BlockPlan, Copy, Interval, LocalSegment
from .intervals import merge, subtract, subtract_each
from .policy import POLICIES, Evidence, Layout

# Rows of attention that one request may have in a step; runs beyond it are joined over the shortest copies.
MAX_RUNS = 224


def build_plan(
    segments: Sequence[LocalSegment],
    *,
    start: int,
    end: int,
    options: BlockOptions,
    policy: str | None = None,
    evidence: Evidence | None = None,
) -> BlockPlan:
    """Plan the positions [start, end) of one request.

    segments: reusable stretches behind `start`, ascending, disjoint.
    start: length of the exact prefix; end: length of the sequence to prefill.
    policy: in place of the request's own; evidence: what that policy asks for.

    Local paths are taken over as they are: they were repaired when they were made.
    The last position is computed whatever the policy says. Host-free and deterministic,
    so every tensor-parallel rank builds the same plan.
    """
    block_end = options.spans[-1].end if options.spans else end
    layout = Layout(
        segments=tuple(s.interval for s in segments if not s.is_path),
        budget_tokens=options.budget_tokens(block_end),
        tau=options.tau,
        evidence=evidence or Evidence(),
    )
    repaired = POLICIES[policy or options.policy].select(layout) if layout.segments else []
    repaired = merge([*repaired, Interval(end - 1, end)])
    copies = [Copy(part, index) for index, part in subtract_each([s.interval for s in segments], repaired)]
    runs = subtract(Interval(start, end), [c.interval for c in copies])
    if len(runs) > MAX_RUNS:
        copies = _without_shortest(copies, len(runs) - MAX_RUNS, start=start)
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


def _without_shortest(copies: Sequence[Copy], num: int, *, start: int) -> list[Copy]:
    """`copies` without the `num` shortest that lie between two runs; each one less joins two runs."""
    between = [
        i
        for i, copy in enumerate(copies)
        # touching copies come from neighbouring segments: computing one of them would add a run
        if copy.interval.start > start
        and (i == 0 or copies[i - 1].interval.end < copy.interval.start)
        and (i + 1 == len(copies) or copy.interval.end < copies[i + 1].interval.start)
    ]
    shortest = set(sorted(between, key=lambda i: (len(copies[i].interval), i))[:num])
    return [copy for i, copy in enumerate(copies) if i not in shortest]
