"""How long a request may hold the scheduler's thread, and a clock that a busy machine does not disturb."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

# What the design allows, whatever a client marks; and what a request without tokens may cost.
MS_PER_10K_TOKENS = 10.0
MS_PER_REQUEST = 10.0


def allowed_ms(num_tokens: int) -> float:
    return MS_PER_REQUEST + MS_PER_10K_TOKENS * num_tokens / 10_000


def thread_ms(work: Callable[[], object], *, repeat: int = 3) -> float:
    """CPU time of this thread, the best of some tries: what else runs on the machine costs caches too.

    Without the garbage collector, whose pauses depend on what else the process holds.
    """
    best = float("inf")
    gc.disable()
    try:
        for _ in range(repeat):
            started = time.thread_time()
            work()
            best = min(best, time.thread_time() - started)
    finally:
        gc.enable()
    return 1000 * best
