"""Recompute policies: which positions of the reused segments belong to T.

A policy is a record in `POLICIES`: what it must know beyond the layout, and a `select` that turns
layout, budget and evidence into positions. Everything is plain Python and NumPy and deterministic,
so every tensor-parallel rank that sees the same evidence chooses the same positions.

Dims: N positions of the request
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..types import Interval
from .intervals import merge

# Runs chosen by score are at most so many; a larger budget is spent in longer pieces instead. Each run is
# a row of attention, whose index buffers and launches have an end.
MAX_SCORED_RUNS = 160
# Share of the budget that `head+query` spends on the heads of blocks before the question has its say.
HEAD_SHARE = 0.2

Needs = Literal["layout", "question", "deviation"]


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a probe measured for the positions of one request; see `probe.py`."""

    # [3, N]: what the question takes up of a position, summed over its tokens, at most, and at its last token
    attention_3N: NDArray[np.float32] | None = None
    deviation_N: NDArray[np.float32] | None = None  # |k_new - k_old| / |k_new| at an early layer


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What may be repaired, and how much of it."""

    segments: tuple[Interval, ...]  # reused stretches of blocks, ascending, disjoint
    budget_tokens: int
    tau: int | None = None  # policies of windows only: tokens on each side, instead of the budget
    evidence: Evidence = field(default_factory=Evidence)


@dataclass(frozen=True, slots=True)
class Policy:
    """`select` returns ascending, disjoint intervals inside the segments, of at most `budget_tokens`
    tokens unless tau is given."""

    select: Callable[[Layout], list[Interval]]
    needs: Needs = "layout"
    fallback: str | None = None  # the policy for requests whose evidence cannot be measured


def seam(layout: Layout) -> list[Interval]:
    """Symmetric windows of tau on both sides of every seam (source, section 5.3).

        T_seam(i) = [e_i - tau, e_i) | [s_{i+1}, s_{i+1} + tau)

    with the asymmetric rule: the true prefix B1 is exact, so nothing of its tail is
    recomputed, and that window goes to the tail of B_m. Segments are the reused
    stretches only: a neighbour that is computed anyway needs no window. Every segment
    thus repairs its head and its tail.

    With tau None the budget is dealt out evenly, what short segments cannot take goes
    to the others.
    """
    if layout.tau is None:
        windows = [((share + 1) // 2, share // 2) for share in _even(layout, layout.budget_tokens)]
    else:
        windows = [(layout.tau, layout.tau)] * len(layout.segments)
    return _windows(layout.segments, windows)


def head(layout: Layout) -> list[Interval]:
    """The first tokens of every segment: the false sinks, and those that lack most of their left context."""
    if layout.tau is None:
        windows = [(share, 0) for share in _even(layout, layout.budget_tokens)]
    else:
        windows = [(layout.tau, 0)] * len(layout.segments)
    return _windows(layout.segments, windows)


def deviation(layout: Layout) -> list[Interval]:
    """The positions whose key changed most at an early layer when it was computed in context."""
    assert layout.evidence.deviation_N is not None
    return _top(layout, layout.evidence.deviation_N, layout.budget_tokens)


def query(layout: Layout) -> list[Interval]:
    """The positions of which the question takes up most."""
    return _top(layout, interest(layout), layout.budget_tokens)


def head_and_query(layout: Layout) -> list[Interval]:
    """A part of the budget for the heads of all segments, the rest for what the question looks at."""
    num_head = int(layout.budget_tokens * HEAD_SHARE)
    heads = _windows(layout.segments, [(share, 0) for share in _even(layout, num_head)])
    num_spent = sum(len(i) for i in heads)
    return _top(layout, interest(layout), layout.budget_tokens - num_spent, taken=heads)


def random(layout: Layout) -> list[Interval]:
    """Positions drawn evenly: the control that every other policy has to beat."""
    if not layout.segments:
        return []
    num = layout.segments[-1].end
    seed = [num, layout.budget_tokens, *(s.start for s in layout.segments)]
    scores_N = np.random.default_rng(seed).random(num, dtype=np.float32)
    return _top(layout, scores_N, layout.budget_tokens)


def deal(capacities: Sequence[int], total: int) -> list[int]:
    """Split `total` evenly over bins of the given capacities.

    Sum of the result = min(total, sum(capacities)); bins that are not full differ by
    at most one.
    """
    shares = [0] * len(capacities)
    left = min(total, sum(capacities))
    # smallest bin first: what it cannot take raises the level of all that come after it
    for rank, i in enumerate(sorted(range(len(capacities)), key=lambda i: capacities[i])):
        num_open = len(capacities) - rank
        shares[i] = min(capacities[i], -(-left // num_open))
        left -= shares[i]
    return shares


def _even(layout: Layout, total: int) -> list[int]:
    return deal([len(s) for s in layout.segments], total)


def _windows(segments: Sequence[Interval], windows: Sequence[tuple[int, int]]) -> list[Interval]:
    """The first `head` and last `tail` tokens of every segment, all of it where they meet."""
    chosen: list[Interval] = []
    for segment, (first, last) in zip(segments, windows, strict=True):
        if first + last >= len(segment):
            chosen.append(segment)
            continue
        if first:
            chosen.append(Interval(segment.start, segment.start + first))
        if last:
            chosen.append(Interval(segment.end - last, segment.end))
    return [c for c in chosen if len(c)]


def interest(layout: Layout) -> NDArray[np.float32]:
    """How much the question takes up of each position, over the segments alone.

    Three views of the question count alike: all of its tokens, the one that looks hardest, and the last.
    """
    assert layout.evidence.attention_3N is not None
    attention_3N = layout.evidence.attention_3N
    inside_N = _inside(layout.segments, attention_3N.shape[1])
    scores_3N = np.where(inside_N, attention_3N, 0.0)
    totals_31 = scores_3N.sum(axis=1, keepdims=True)
    found: NDArray[np.float32] = (scores_3N / np.maximum(totals_31, np.float32(1e-20))).sum(axis=0)
    return found


def _top(
    layout: Layout,
    scores_N: NDArray[np.float32],
    num: int,
    *,
    taken: Sequence[Interval] = (),
) -> list[Interval]:
    """`taken` and the `num` best positions of the segments outside of it, as intervals.

    Positions are taken in pieces that are as long as MAX_SCORED_RUNS demands. Ties go to the lower position.
    """
    open_N = _inside(layout.segments, len(scores_N)) & ~_inside(taken, len(scores_N))
    open_P = np.flatnonzero(open_N)
    if num <= 0 or not len(open_P):
        return merge(taken)
    # a piece ends with its segment: count positions from the first open one of each segment
    num_before = np.concatenate([[0], np.cumsum(open_N)])
    edges = num_before[np.array([(s.start, s.end) for s in layout.segments])]
    first_P = np.repeat(edges[:, 0], edges[:, 1] - edges[:, 0])
    piece_len = max(1, -(-num // MAX_SCORED_RUNS))
    heads = np.flatnonzero((np.arange(len(open_P)) - first_P) % piece_len == 0)
    sizes = np.diff(heads, append=len(open_P))
    means = np.add.reduceat(scores_N[open_P], heads, dtype=np.float64) / sizes
    starts, ends = open_P[heads], open_P[heads + sizes - 1] + 1
    order = np.argsort(-means, kind="stable")
    before = np.cumsum(ends[order] - starts[order]) - (ends[order] - starts[order])
    order, left = order[before < num], num - before[before < num]
    ends = np.minimum(ends[order], starts[order] + left)
    pieces = zip(starts[order].tolist(), ends.tolist(), strict=True)
    return merge([*taken, *(Interval(start, end) for start, end in pieces)])


def _inside(intervals: Sequence[Interval], num: int) -> NDArray[np.bool_]:
    """bool [num]: the positions that lie in one of the intervals."""
    inside_N = np.zeros(num, dtype=bool)
    for interval in intervals:
        inside_N[interval.start : interval.end] = True
    return inside_N


POLICIES: dict[str, Policy] = {
    "seam": Policy(seam),
    "head": Policy(head),
    "deviation": Policy(deviation, needs="deviation", fallback="head"),
    "query": Policy(query, needs="question", fallback="head"),
    "head+query": Policy(head_and_query, needs="question", fallback="head"),
    "random": Policy(random),
}
