"""Set operations on intervals of positions, each in one pass over its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from ..types import Interval


def merge(intervals: Iterable[Interval]) -> list[Interval]:
    """Union of intervals as ascending, disjoint, non-touching intervals."""
    merged: list[Interval] = []
    # by a key: a dataclass compares ten times slower than a tuple
    for interval in sorted((i for i in intervals if i.start < i.end), key=lambda i: (i.start, i.end)):
        if merged and interval.start <= merged[-1].end:
            if interval.end > merged[-1].end:
                merged[-1] = Interval(merged[-1].start, interval.end)
        else:
            merged.append(interval)
    return merged


def subtract(whole: Interval, holes: Iterable[Interval]) -> list[Interval]:
    """`whole` without `holes` (ascending, disjoint)."""
    rest, position = [], whole.start
    for hole in holes:
        if hole.start >= whole.end:
            break
        if hole.end <= position or hole.start >= hole.end:
            continue
        if position < hole.start:
            rest.append(Interval(position, hole.start))
        position = hole.end
    if position < whole.end:
        rest.append(Interval(position, whole.end))
    return rest


def subtract_each(wholes: Sequence[Interval], holes: Sequence[Interval]) -> Iterator[tuple[int, Interval]]:
    """(index of the whole, what is left of it) for all of `wholes`; both ascending and disjoint."""
    for index, met in _met_by(wholes, holes):
        for rest in subtract(wholes[index], met):
            yield index, rest


def intersect_each(wholes: Sequence[Interval], parts: Sequence[Interval]) -> Iterator[tuple[int, Interval]]:
    """(index of the whole, what `parts` cover of it) for all of `wholes`; both ascending and disjoint."""
    for index, met in _met_by(wholes, parts):
        for part in met:
            yield index, part.clip(wholes[index].start, wholes[index].end)


def _met_by(
    wholes: Sequence[Interval], others: Sequence[Interval]
) -> Iterator[tuple[int, Sequence[Interval]]]:
    """(index, those of `others` that meet it) for all of `wholes`; both ascending and disjoint."""
    first = 0
    for index, whole in enumerate(wholes):
        while first < len(others) and others[first].end <= whole.start:
            first += 1
        last = first
        while last < len(others) and others[last].start < whole.end:
            last += 1
        yield index, others[first:last]
        first = max(first, last - 1)  # the last one may reach into the next whole


def positions_of(intervals: Sequence[Interval]) -> NDArray[np.int64]:
    """int64: every position of the intervals, in their order."""
    starts = np.array([i.start for i in intervals], dtype=np.int64)
    lens = np.array([len(i) for i in intervals], dtype=np.int64)
    before = np.cumsum(lens) - lens  # positions of the intervals in front
    found: NDArray[np.int64] = np.arange(lens.sum()) + np.repeat(starts - before, lens)
    return found


def lie_in(positions: NDArray[np.int64], intervals: Sequence[Interval]) -> NDArray[np.bool_]:
    """bool: the positions that lie in one of the intervals (ascending, disjoint)."""
    edges = np.array([(i.start, i.end) for i in intervals if len(i)], dtype=np.int64).reshape(-1)
    # an odd number of edges up to a position: an interval is open there
    found: NDArray[np.bool_] = np.searchsorted(edges, positions, side="right") % 2 == 1
    return found
