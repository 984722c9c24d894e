"""Keeps a forward within what its step was formed for, also where more has to be computed than was planned.

A step is admitted by the tokens that its plans compute. A plan that fails, or that a guard rejects, needs more of
its chunk; those positions are computed before the step, from left to right, in forwards of their own:

    admitted   |.. copy ..|= run =|.. copy ..|= run =|        6 tokens of 24
    pieces     |== first piece ==|= second =|                  at most `limit` tokens each, of any requests
    the step                                |= 6 =|            as many as admitted, the last of them
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import Interval

Runs = list[list[Interval]]  # per request, what a forward computes of it, ascending


def spill(
    runs_per_request: Sequence[Sequence[Interval]], admitted: Sequence[int], limit: int | None
) -> tuple[list[Runs], Runs]:
    """What goes into forwards before the step, and what is left for the step.

    admitted: tokens per request, at least 1, that the step was formed for.
    limit: tokens that a forward may compute; None: any number.
    A forward of no more than `limit` tokens, or than were admitted, stays whole.
    """
    left = [list(runs) for runs in runs_per_request]
    if limit is None or num_tokens(left) <= max(limit, sum(admitted)):
        return [], left
    pieces: list[Runs] = []
    room = 0
    for index, runs in enumerate(left):
        early = sum(len(run) for run in runs) - admitted[index]
        left[index] = []
        for run in runs:
            start = run.start
            while early > 0 and start < run.end:
                if room == 0:
                    pieces.append([[] for _ in left])
                    room = limit
                taken = min(early, room, run.end - start)
                pieces[-1][index].append(Interval(start, start + taken))
                start, early, room = start + taken, early - taken, room - taken
            if start < run.end:
                left[index].append(Interval(start, run.end))
    return pieces, left


def num_tokens(runs_per_request: Sequence[Sequence[Interval]]) -> int:
    return sum(len(run) for runs in runs_per_request for run in runs)
