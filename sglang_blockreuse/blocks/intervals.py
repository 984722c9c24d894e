"""Set operations on intervals of positions, each in one pass over its operands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

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
    first = 0  # of the holes that reach into this whole or beyond it
    for index, whole in enumerate(wholes):
        while first < len(holes) and holes[first].end <= whole.start:
            first += 1
        last = first
        while last < len(holes) and holes[last].start < whole.end:
            last += 1
        for rest in subtract(whole, holes[first:last]):
            yield index, rest
        first = max(first, last - 1)  # the last hole may reach into the next whole
