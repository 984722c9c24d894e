"""Which request slots decode dense although a layer plan is on: one byte per slot, set at admission.

The scheduler side knows requests, the attention backend knows slots. `admit` is the only door between the two: the
hook on ForwardBatch.init_new calls it for every prefill batch, so a slot's byte is set anew before its request's
first decode step, whatever request held the slot before.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np


class RowModes:
    """`dense_B` is uint8 by request slot of the host; slots that were never admitted follow the plan."""

    def __init__(self, num_requests: int) -> None:
        self.dense_B: Any = np.zeros(num_requests, np.uint8)

    def admit(self, reqs: Iterable[Any]) -> None:
        """Take the modes of host requests that hold a slot (`req.kv.req_pool_idx`)."""
        for req in reqs:
            state = getattr(req, "blockreuse", None)
            self.dense_B[req.kv.req_pool_idx] = state is not None and state.options.mode == "exact"
