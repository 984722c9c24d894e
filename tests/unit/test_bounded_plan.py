"""Plans and scored policies in one pass give what the plain loops over every pair give, which stand here."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import example, given
from hypothesis import strategies as st
from strategies import layouts

from sglang_blockreuse.blocks.guard import repaired_in
from sglang_blockreuse.blocks.intervals import lie_in, merge, positions_of, subtract, subtract_each
from sglang_blockreuse.blocks.plan import build_plan
from sglang_blockreuse.blocks.policy import MAX_SCORED_RUNS, POLICIES, Evidence, Layout
from sglang_blockreuse.blocks.rows import repair_mask
from sglang_blockreuse.types import BlockPlan, Interval


def best_positions(layout: Layout, scores, num: int) -> list[Interval]:
    """The best `num` positions in pieces, piece by piece."""
    piece_len = max(1, -(-num // MAX_SCORED_RUNS))
    pieces = []
    for segment in layout.segments:
        for start in range(segment.start, segment.end, piece_len):
            piece = Interval(start, min(start + piece_len, segment.end))
            pieces.append((-float(scores[piece.start : piece.end].mean(dtype=np.float64)), piece))
    chosen = []
    for _, piece in sorted(pieces):
        if num <= 0:
            break
        chosen.append(Interval(piece.start, min(piece.end, piece.start + num)))
        num -= len(chosen[-1])
    return merge(chosen)


@st.composite
def scored_layouts(draw: st.DrawFn) -> Layout:
    segments, at = [], draw(st.integers(0, 20))
    for _ in range(draw(st.integers(1, 40))):
        length = draw(st.integers(1, 90))
        segments.append(Interval(at, at + length))
        at += length + draw(st.integers(0, 10))
    # few different scores, so that ties are common; halves, so that sums are exact
    num = at + draw(st.integers(0, 5))
    scores = draw(st.lists(st.integers(0, 4), min_size=8, max_size=8))
    deviation_N = np.resize(np.array(scores, dtype=np.float32) / 2, num)
    return Layout(
        segments=tuple(segments),
        budget_tokens=draw(st.integers(0, 1000)),
        evidence=Evidence(deviation_N=deviation_N),
    )


@given(scored_layouts())
@example(  # every score is the same: the lowest positions win
    Layout(
        segments=(Interval(5, 25), Interval(25, 45)),
        budget_tokens=7,
        evidence=Evidence(deviation_N=np.ones(50, dtype=np.float32)),
    )
)
def test_the_best_positions_are_those_of_the_plain_loop(layout):
    expected = best_positions(layout, layout.evidence.deviation_N, layout.budget_tokens)
    assert POLICIES["deviation"].select(layout) == expected


@given(scored_layouts(), st.integers(1, 400))
def test_what_the_heads_took_is_not_taken_again(layout, budget):
    num = max(s.end for s in layout.segments)
    attention = np.resize(layout.evidence.deviation_N, (3, num))
    scored = Layout(segments=layout.segments, budget_tokens=budget, evidence=Evidence(attention_3N=attention))
    chosen = POLICIES["head+query"].select(scored)
    assert sum(map(len, chosen)) == min(budget, sum(map(len, layout.segments)))
    assert all(a.end < b.start for a, b in itertools.pairwise(chosen))


intervals = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda p: Interval(min(p), max(p))), max_size=12
)


@given(intervals, intervals)
def test_subtracting_from_many_is_subtracting_from_each(wholes, holes):
    wholes, holes = merge(wholes), merge(holes)
    expected = [(i, rest) for i, whole in enumerate(wholes) for rest in subtract(whole, holes)]
    assert list(subtract_each(wholes, holes)) == expected


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans()), max_size=12), intervals)
def test_wholes_may_touch(lengths, holes):
    """One hole may reach over several of them."""
    wholes, at = [], 0
    for length, gap in lengths:
        at += gap
        wholes.append(Interval(at, at + length))
        at += length
    holes = merge(holes)
    expected = [(i, rest) for i, whole in enumerate(wholes) for rest in subtract(whole, holes)]
    assert list(subtract_each(wholes, holes)) == expected


@given(intervals, intervals)
def test_positions_and_where_they_lie(some, others):
    some, others = merge(some), merge(others)
    expected = [p for i in some for p in range(i.start, i.end)]
    assert positions_of(some).tolist() == expected
    inside = {p for i in others for p in range(i.start, i.end)}
    assert lie_in(positions_of(some), others).tolist() == [p in inside for p in expected]


@given(layouts())
def test_the_guard_reads_what_is_computed_inside_blocks(layout):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    assert repaired_in(plan) == [
        part
        for s in plan.segments
        for run in plan.runs
        if len(part := run.clip(s.interval.start, s.interval.end))
    ]


@given(st.lists(layouts(), min_size=1, max_size=3))
def test_a_repair_mask_flags_the_repairs_of_each_request(plans):
    plans = [build_plan(s, start=start, end=end, options=o) for s, start, end, o in plans]
    runs = [plan.runs_within(plan.start, plan.end) for plan in plans]
    found = [list(plan.repairs_within(plan.start, plan.end)) for plan in plans]
    flags = [
        any(r.start <= p < r.end for r in repaired)
        for computed, repaired in zip(runs, found, strict=True)
        for p in positions_of(computed)
    ]
    mask = repair_mask(runs, found)
    assert (mask is None) == (not any(flags))
    assert mask is None or mask.tolist() == flags


@given(layouts(), st.data())
def test_a_chunk_of_a_plan_is_what_a_walk_over_all_of_it_finds(layout, data):
    segments, start, end, options = layout
    plan = build_plan(segments, start=start, end=end, options=options)
    low = data.draw(st.integers(start, end - 1))
    high = data.draw(st.integers(low + 1, end))
    runs = [r.clip(low, high) for r in plan.runs if r.start < high and r.end > low]
    if not runs or runs[-1].end < high:
        runs.append(Interval(high - 1, high))
    assert plan.runs_within(low, high) == runs
    assert list(plan.copies_within(low, high)) == [
        (c.segment, part) for c in plan.copies if len(part := c.interval.clip(low, high))
    ]
    assert list(plan.repairs_within(low, high)) == list(repairs(plan, runs))
    budget = data.draw(st.integers(1, 60))
    assert plan.chunk_end(low, budget) == chunk_end(plan, low, budget)
    assert plan.first_local == min((c.interval.start for c in plan.copies), default=plan.end)


def repairs(plan: BlockPlan, runs):
    for run in (r.clip(plan.first_local, plan.end - 1) for r in runs):
        for segment in plan.segments:
            if not segment.is_path and len(part := segment.interval.clip(run.start, run.end)):
                yield part


def chunk_end(plan: BlockPlan, low: int, budget: int) -> int:
    end = low
    for run in (r.clip(low, plan.end) for r in plan.runs):
        if not len(run):
            continue
        if len(run) >= budget:
            return run.start + budget
        budget -= len(run)
        end = run.end
    return max(end, low + 1)
