"""Recompute policies: which positions of the reused segments belong to T.

A policy has the signature of `seam` and needs nothing but the layout; the registry
below is the one place that names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..types import Interval

Policy = Callable[..., list[Interval]]


def seam(segments: Sequence[Interval], *, tau: int | None, budget_tokens: int) -> list[Interval]:
    """Symmetric windows of tau on both sides of every seam (source, section 5.3).

        T_seam(i) = [e_i - tau, e_i) | [s_{i+1}, s_{i+1} + tau)

    with the asymmetric rule: the true prefix B1 is exact, so nothing of its tail is
    recomputed, and that window goes to the tail of B_m. `segments` are the reused
    stretches only: a neighbour that is computed anyway needs no window. Every segment
    thus repairs its head and its tail.

    With tau None, `budget_tokens` are dealt out evenly, what short segments cannot
    take goes to the others. Returns ascending, disjoint intervals.
    """
    if tau is None:
        shares = deal([len(s) for s in segments], budget_tokens)
        windows = [((share + 1) // 2, share // 2) for share in shares]
    else:
        windows = [(tau, tau)] * len(segments)
    chosen: list[Interval] = []
    for segment, (head, tail) in zip(segments, windows, strict=True):
        if head + tail >= len(segment):
            chosen.append(segment)
            continue
        if head:
            chosen.append(Interval(segment.start, segment.start + head))
        if tail:
            chosen.append(Interval(segment.end - tail, segment.end))
    return chosen


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


POLICIES: dict[str, Policy] = {"seam": seam}
