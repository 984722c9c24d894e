"""Where the time of a decode step goes, by part and by the role of the layer; off unless `layers.timing` is set.

    scan        scores over the whole history        compaction   the best of them into the pool
    rerank      scores inside a pool                 top_k        the best of either into the indices
    copy        index keys of new tokens             attention    over the indices, the gather of K and V fused in
    dense       attention over everything            rest         checks of shared state, copies of rows
    between     from the layer before: the model's linear layers

A clock is read at the borders of parts only. Seconds are gathered in a dict and counted once per step.
"""

from __future__ import annotations

import time
from collections import defaultdict

from ..metrics import Metrics

PARTS = ("scan", "rerank", "copy", "compaction", "top_k", "attention", "dense", "rest", "between")


class StepClock:
    """Off: every call returns at once."""

    runs = False

    def begin(self, metrics: Metrics) -> None:
        """A new step; what was gathered is counted."""

    def enter(self, role: str) -> None:
        """A layer of this role begins."""

    def lap(self, part: str) -> None:
        """What happened since the last call belongs to `part` of the layer's role."""

    def leave(self) -> None:
        """The layer ends."""


OFF = StepClock()


class RunningClock(StepClock):
    runs = True

    def __init__(self) -> None:
        self._seconds: dict[tuple[str, str], float] = defaultdict(float)
        self._role, self._mark, self._inside = "", 0.0, False

    def begin(self, metrics: Metrics) -> None:
        for (part, role), seconds in self._seconds.items():
            metrics.add("decode_seconds_total", seconds, part=part, role=role)
        self._seconds.clear()
        self._inside = False

    def enter(self, role: str) -> None:
        self._role = role
        if self._inside:
            self.lap("between")
        self._mark, self._inside = time.perf_counter(), True

    def lap(self, part: str) -> None:
        now = time.perf_counter()
        self._seconds[part, self._role] += now - self._mark
        self._mark = now

    def leave(self) -> None:
        self.lap("rest")
