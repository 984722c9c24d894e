"""Feature on, nothing marked: the answers are those of stock, bit for bit; nightly, at length on the 135M model."""

from __future__ import annotations

import pytest
from laws.unmarked import Unmarked

pytestmark = pytest.mark.engine


class TestUnmarked(Unmarked):
    num_prompts = 20
    longest = 1000
    flags = ("--enable-mixed-chunk",)
