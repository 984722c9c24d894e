"""What the guard makes of evidence."""

from __future__ import annotations

import numpy as np
import pytest

from sglang_blockreuse.blocks import guard
from sglang_blockreuse.blocks.plan import build_plan
from sglang_blockreuse.blocks.policy import Evidence
from sglang_blockreuse.types import BlockOptions, Interval, LocalSegment

SPAN = Interval(10, 60)


def plan(budget: float):
    options = BlockOptions("reuse", (SPAN,), "head", None, budget)
    return build_plan([LocalSegment(SPAN, 0, 0, 10)], start=10, end=70, options=options)


def test_leftover_is_the_interest_in_what_stays_local():
    attention = np.zeros((3, 70), dtype=np.float32)
    attention[:, 10] = 3.0  # repaired: the head
    attention[:, 50] = 1.0  # not repaired
    attention[:, 65] = 9.0  # no block
    assert guard.leftover(Evidence(attention_3N=attention), plan(0.1)) == pytest.approx(0.25)


def test_deviation_is_the_mean_over_repaired_positions():
    change = np.full(70, 9.0, dtype=np.float32)
    change[10:16] = 0.5  # a tenth of 60 tokens, at the head
    assert guard.deviation(Evidence(deviation_N=change), plan(0.1)) == pytest.approx(0.5)
    assert guard.deviation(Evidence(deviation_N=change), plan(0.0)) == 0.0


@pytest.mark.parametrize(("value", "verdict"), [(0.5, "passed"), (0.7, "raised"), (1.1, "full")])
def test_verdicts(value, verdict):
    assert guard.verdict_of(value, 0.5) == verdict


def test_a_raised_budget_keeps_its_unit():
    assert guard.raised(0.05) == 0.2
    assert guard.raised(0.5) == 1.0
    assert guard.raised(200) == 800
