"""Which request slots decode dense although a layer plan is on, decided at admission.

The scheduler side knows requests, the attention backend knows slots. `admit` is the only door between the two: the
hook on ForwardBatch.init_new calls it for every prefill batch, so before a request's first decode step. A slot that
has changed hands since, or that nobody admitted (rows of a beam have no request of their own), decodes dense.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np


class RowModes:
    """`generation_B` is the host's int64 count of how often each request slot was handed out."""

    def __init__(self, generation_B: Any) -> None:
        self._generation_B = generation_B
        self._admitted_B = np.full(
            len(generation_B), -1, np.int64
        )  # generation of the holder that may be sparse

    def admit(self, reqs: Iterable[Any]) -> None:
        """Take the modes of host requests that hold a slot (`req.kv.req_pool_idx`)."""
        for req in reqs:
            slot, state = req.kv.req_pool_idx, getattr(req, "blockreuse", None)
            exact = state is not None and state.options.mode == "exact"
            self._admitted_B[slot] = -1 if exact else self._generation_B[slot]

    def every(self) -> tuple[Any, Any]:
        """Of every request slot: whose it is (int64 [B]), and whether it must not be sparse (uint8 [B])."""
        return self._generation_B.copy(), (self._admitted_B != self._generation_B).astype(np.uint8)

    def dense(self, requests: Sequence[int]) -> Any:
        """uint8 [R]: the rows of these request slots that must not be sparse."""
        return (self._admitted_B[requests] != self._generation_B[requests]).astype(np.uint8)
