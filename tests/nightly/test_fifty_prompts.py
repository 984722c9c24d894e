"""Feature on, nothing marked: fifty prompts of up to 3000 tokens, answered by the 135M model bit for bit like stock."""

from __future__ import annotations

import pytest
from laws.unmarked import Unmarked

pytestmark = pytest.mark.engine


@pytest.mark.nightly(twin="tests/engine/test_unmarked.py::TestUnmarked")
class TestFiftyPrompts(Unmarked):
    model = "smollm2"
    num_prompts = 50
    longest = 3000
    flags = ("--chunked-prefill-size", "512", "--enable-mixed-chunk", "--max-total-tokens", "40000")
