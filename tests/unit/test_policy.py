"""Laws of the recompute policies: what they choose stays inside the segments and the budget."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.blocks.policy import MAX_SCORED_RUNS, POLICIES, Evidence, Layout, head, query, seam
from sglang_blockreuse.config import POLICIES as POLICY_NAMES
from sglang_blockreuse.types import Interval


def positions(intervals) -> list[int]:
    return [p for i in intervals for p in range(i.start, i.end)]


def evidence(num: int, seed: int = 0) -> Evidence:
    rng = np.random.default_rng(seed)
    return Evidence(rng.random((3, num), dtype=np.float32), rng.random(num, dtype=np.float32))


@st.composite
def policy_layouts(draw: st.DrawFn) -> Layout:
    segments, at = [], draw(st.integers(0, 20))
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.integers(1, 90))
        segments.append(Interval(at, at + length))
        at += length + draw(st.integers(0, 10))
    budget = draw(st.integers(0, 300))
    return Layout(
        segments=tuple(segments), budget_tokens=budget, evidence=evidence(at + 1, draw(st.integers(0, 9)))
    )


def test_the_registry_has_the_names_that_requests_may_use():
    assert tuple(POLICIES) == POLICY_NAMES
    assert all(p.fallback in POLICIES for p in POLICIES.values() if p.needs != "layout")


@pytest.mark.parametrize("name", POLICIES)
@given(policy_layouts())
def test_a_policy_spends_its_budget_inside_the_segments(name, layout):
    chosen = POLICIES[name].select(layout) if layout.segments else []
    spent = positions(chosen)
    allowed = positions(layout.segments)
    assert spent == sorted(set(spent)), "ascending and disjoint"
    assert set(spent) <= set(allowed)
    assert len(spent) == min(layout.budget_tokens, len(allowed))


@pytest.mark.parametrize("name", POLICIES)
@given(policy_layouts())
def test_a_policy_chooses_the_same_twice(name, layout):
    if layout.segments:
        assert POLICIES[name].select(layout) == POLICIES[name].select(layout)


@pytest.mark.parametrize("name", ["query", "deviation", "random"])
def test_large_budgets_are_spent_in_longer_pieces(name):
    segment = Interval(0, 20_000)
    layout = Layout(segments=(segment,), budget_tokens=8_000, evidence=evidence(20_000))
    assert len(POLICIES[name].select(layout)) <= MAX_SCORED_RUNS


def test_query_takes_what_the_question_looks_at():
    attention = np.zeros((3, 100), dtype=np.float32)
    attention[:, 40:44] = 1.0
    chosen = query(
        Layout(segments=(Interval(10, 90),), budget_tokens=4, evidence=Evidence(attention_3N=attention))
    )
    assert positions(chosen) == [40, 41, 42, 43]


def test_each_view_of_the_question_counts_alike():
    """One view is a thousand times larger in all, but no view outweighs the other two."""
    attention = np.full((3, 100), 1e-3, dtype=np.float32)
    attention[0, 30] = 1e3
    attention[1:, 70] = 1.0
    chosen = query(
        Layout(segments=(Interval(10, 90),), budget_tokens=1, evidence=Evidence(attention_3N=attention))
    )
    assert positions(chosen) == [70]


def test_head_takes_the_beginnings():
    layout = Layout(segments=(Interval(10, 50), Interval(50, 90)), budget_tokens=6)
    assert positions(head(layout)) == [10, 11, 12, 50, 51, 52]


def test_seam_without_tau_or_budget_repairs_nothing():
    assert seam(Layout(segments=(Interval(10, 60),), budget_tokens=0)) == []
    assert seam(Layout(segments=(Interval(10, 60),), budget_tokens=999, tau=0)) == []


def test_seam_windows_of_tau_on_both_sides():
    layout = Layout(segments=(Interval(10, 60), Interval(60, 65)), budget_tokens=0, tau=3)
    assert positions(seam(layout)) == [10, 11, 12, 57, 58, 59, 60, 61, 62, 63, 64]
