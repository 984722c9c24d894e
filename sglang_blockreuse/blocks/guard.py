"""The guard: judges, before a prompt is computed, whether its repair is as good as it was at calibration.

What is measured depends on the policy, and a bound holds for the policy that it was calibrated with:

    policies that ask the question   leftover   share of what the question takes up that stays local
    all others                       deviation  mean |k_new - k_old| / |k_new| of repaired keys at an early layer
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from ..types import BlockOptions, BlockPlan, Interval
from .policy import POLICIES, Evidence, Layout, interest

Verdict = Literal["passed", "raised", "full"]

# What the guard multiplies budget and windows with where the bound is exceeded; beyond twice the bound all is computed.
BUDGET_FACTOR = 4.0
FULL_BEYOND = 2.0
# What a budget and windows of nothing are raised to.
LEAST_RAISED_SHARE, LEAST_RAISED_TAU = 0.05, 4


def verdict_of(value: float, bound: float) -> Verdict:
    if value <= bound:
        return "passed"
    return "raised" if value <= FULL_BEYOND * bound else "full"


def raised(options: BlockOptions) -> BlockOptions:
    """The request's options with more of whatever limits its repair: the windows, where tau is set, and the budget.

    Both keep their unit, and what was nothing becomes something.
    """
    budget = max(options.budget * BUDGET_FACTOR, LEAST_RAISED_SHARE)
    return replace(
        options,
        tau=None if options.tau is None else max(int(options.tau * BUDGET_FACTOR), LEAST_RAISED_TAU),
        budget=min(1.0, budget) if options.budget <= 1 else budget,
    )


def measures_leftover(policy: str) -> bool:
    return POLICIES[policy].needs == "question"


def leftover(evidence: Evidence, plan: BlockPlan) -> float:
    """Share of the question's interest in the plan's blocks that falls on positions which are not repaired."""
    segments = tuple(s.interval for s in plan.segments if not s.is_path)
    scores_N = interest(Layout(segments=segments, budget_tokens=0, evidence=evidence))
    total = float(scores_N.sum())
    repaired = sum(float(scores_N[i.start : i.end].sum()) for i in repaired_in(plan))
    return 1.0 - repaired / total if total > 0 else 0.0


def deviation(evidence: Evidence, plan: BlockPlan) -> float:
    """Mean deviation of the repaired positions; 0 where there are none."""
    pieces = repaired_in(plan)
    if evidence.deviation_N is None or not pieces:
        return 0.0
    return float(np.concatenate([evidence.deviation_N[i.start : i.end] for i in pieces]).mean())


def repaired_in(plan: BlockPlan) -> Sequence[Interval]:
    """Positions of blocks that a home holds and the plan computes anyway."""
    return [
        piece
        for segment in plan.segments
        if not segment.is_path
        for run in plan.runs
        if len(piece := run.clip(segment.interval.start, segment.interval.end))
    ]
