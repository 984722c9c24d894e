"""Laws of the block plan: what is copied and what is computed."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts

from sglang_blockreuse.blocks.intervals import merge, subtract
from sglang_blockreuse.blocks.plan import MAX_RUNS, build_plan
from sglang_blockreuse.blocks.policy import deal
from sglang_blockreuse.blocks.worth import pays
from sglang_blockreuse.types import PATH, BlockOptions, BlockPlan, Interval, LocalSegment


def positions(intervals) -> list[int]:
    return [p for i in intervals for p in range(i.start, i.end)]


def plan_of_blocks(
    *lengths: int, prefix: int, question: int, tau: int | None = None, budget: float = 0.05
) -> BlockPlan:
    """Blocks of the given lengths behind `prefix`, all known, then a question."""
    spans, at = [], prefix
    for length in lengths:
        spans.append(Interval(at, at + length))
        at += length
    segments = [
        LocalSegment(s, delta=s.start - prefix, block=i, block_start=s.start) for i, s in enumerate(spans)
    ]
    options = BlockOptions(mode="reuse", spans=tuple(spans), policy="seam", tau=tau, budget=budget)
    return build_plan(segments, start=prefix, end=at + question, options=options)


@given(layouts())
def test_copies_and_runs_tile_what_lies_behind_the_prefix(layout):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    copied, computed = positions(c.interval for c in plan.copies), positions(plan.runs)
    assert sorted(copied + computed) == list(range(start, end))
    assert computed == sorted(computed)
    assert computed[-1] == end - 1, "the last position is computed, a token is sampled from it"


@given(layouts())
def test_only_what_a_home_holds_is_copied(layout):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    for copy in plan.copies:
        held = segments[copy.segment].interval
        assert held.start <= copy.interval.start < copy.interval.end <= held.end
    assert plan.num_reused + plan.num_repaired == sum(len(s.interval) for s in segments)


@given(layouts(), st.data())
def test_a_chunk_computes_its_last_position_and_no_copied_one_otherwise(layout, data):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    low = data.draw(st.integers(start, end - 1))
    high = data.draw(st.integers(low + 1, end))
    computed = positions(plan.runs_within(low, high))
    copied = set(positions(part for _, part in plan.copies_within(low, high)))
    assert computed[-1] == high - 1
    assert set(computed) - {high - 1} == set(range(low, high)) - copied - {high - 1}


@given(layouts(), st.integers(1, 60))
def test_chunks_end_in_a_run_and_keep_to_the_budget(layout, budget):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    low, computed = start, []
    while low < end:
        high = plan.chunk_end(low, budget)
        assert low < high <= end
        assert plan.num_computed(low, high) <= budget
        computed += positions(plan.runs_within(low, high))
        low = high
    assert computed == positions(plan.runs), "chunking computes exactly what one pass computes"


def test_a_seam_is_repaired_on_both_sides_but_the_true_prefix_is_not():
    plan = plan_of_blocks(100, 100, 100, prefix=50, question=10, tau=4)
    assert plan.runs == (Interval(50, 54), Interval(146, 154), Interval(246, 254), Interval(346, 360))
    assert plan.num_repaired == 6 * 4


def test_the_tail_of_the_last_block_gets_the_window_of_the_true_prefix():
    plan = plan_of_blocks(100, prefix=50, question=0, tau=4)
    assert plan.runs == (Interval(50, 54), Interval(146, 150))


@pytest.mark.parametrize("tau", [50, 1000])
def test_windows_of_half_a_block_degenerate_to_full_prefill(tau):
    plan = plan_of_blocks(100, 80, prefix=50, question=10, tau=tau)
    assert plan.copies == ()
    assert plan.runs == (Interval(50, 240),)


def test_a_budget_of_one_degenerates_to_full_prefill():
    assert plan_of_blocks(100, 7, 300, prefix=20, question=5, budget=1.0).copies == ()


@pytest.mark.parametrize("budget", [0.01, 0.05, 0.2])
def test_the_budget_bounds_the_repaired_share(budget):
    plan = plan_of_blocks(500, 480, 510, 35, 490, prefix=60, question=30, budget=budget)
    assert budget * 0.9 < plan.num_repaired / plan.block_end <= budget


def test_first_local_is_where_exactness_ends():
    plan = plan_of_blocks(100, 100, prefix=50, question=10, tau=4)
    assert plan.first_local == 54
    assert plan_of_blocks(100, prefix=50, question=10, tau=100).first_local == 160


@given(st.lists(st.integers(0, 50), min_size=1, max_size=10), st.integers(0, 300))
def test_dealing_is_even_and_leaves_nothing_over(capacities, total):
    shares = deal(capacities, total)
    assert sum(shares) == min(total, sum(capacities))
    assert all(s <= c for s, c in zip(shares, capacities, strict=True))
    unfilled = [s for s, c in zip(shares, capacities, strict=True) if s < c]
    assert not unfilled or max(shares) - min(unfilled) <= 1


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8))
def test_merge_is_the_union(pairs):
    intervals = [Interval(min(p), max(p)) for p in pairs]
    merged = merge(intervals)
    assert positions(merged) == sorted(set(positions(intervals)))
    assert all(a.end < b.start for a, b in itertools.pairwise(merged))


@given(st.lists(st.tuples(st.integers(-5, 60), st.integers(-5, 60)), max_size=8))
def test_subtract_is_the_difference(pairs):
    holes = merge(Interval(min(p), max(p)) for p in pairs)
    rest = subtract(Interval(3, 50), holes)
    assert positions(rest) == [p for p in range(3, 50) if p not in positions(holes)]


def test_runs_beyond_the_row_limit_are_joined_over_the_shortest_copies():
    spans = [Interval(10 + 12 * i, 14 + 12 * i + i % 7) for i in range(MAX_RUNS + 50)]
    segments = [LocalSegment(s, delta=0, block=i, block_start=s.start) for i, s in enumerate(spans)]
    options = BlockOptions(mode="reuse", spans=tuple(spans), policy="seam", tau=None, budget=0.0)
    end = spans[-1].end + 5
    plan = build_plan(segments, start=0, end=end, options=options)
    assert len(plan.runs) == MAX_RUNS
    covered = positions(plan.runs) + positions(c.interval for c in plan.copies)
    assert sorted(covered) == list(range(end))
    kept = {len(copy.interval) for copy in plan.copies}
    left_out = {len(span) for span in set(spans) - {copy.interval for copy in plan.copies}}
    assert max(left_out) <= min(kept)


def test_a_local_path_is_taken_over_as_it_is():
    """It was repaired when it was made; a block beside it gets its own windows."""
    path = LocalSegment(Interval(10, 60), delta=0, block=PATH, block_start=10)
    block = LocalSegment(Interval(60, 110), delta=0, block=0, block_start=60)
    options = BlockOptions("reuse", (Interval(60, 110),), "seam", 5, 0.0)
    plan = build_plan([path, block], start=10, end=120, options=options)
    assert positions(c.interval for c in plan.copies) == [*range(10, 60), *range(65, 105)]


def test_reuse_has_to_pay_for_its_rows():
    assert pays(plan_of_blocks(100, prefix=10, question=10))
    assert not pays(plan_of_blocks(12, prefix=10, question=10)), "a handful of tokens"
    comb = plan_of_blocks(*[3] * 60, prefix=10, question=10, tau=1)
    assert len(comb.runs) > 60
    assert not pays(comb), "one token saved for every row"
