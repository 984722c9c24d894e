"""What does not fit into a step is computed before it, from left to right, in pieces."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.blocks.pieces import num_tokens, spill
from sglang_blockreuse.types import Interval


@st.composite
def steps(draw):
    """(runs per request, admitted tokens per request, limit)"""
    requests = []
    for _ in range(draw(st.integers(1, 5))):
        cuts = sorted(draw(st.sets(st.integers(0, 60), min_size=2, max_size=8)))
        requests.append([Interval(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)])
    admitted = [draw(st.integers(1, 70)) for _ in requests]
    return requests, admitted, draw(st.one_of(st.none(), st.integers(1, 100)))


def positions(runs):
    return [p for run in runs for p in range(run.start, run.end)]


@given(steps())
def test_every_position_is_computed_once_and_in_order(step):
    runs, admitted, limit = step
    pieces, rest = spill(runs, admitted, limit)
    for i, wanted in enumerate(runs):
        assert [p for forward in [*pieces, rest] for p in positions(forward[i])] == positions(wanted)


@given(steps())
def test_no_forward_is_larger_than_the_limit_or_than_was_admitted(step):
    runs, admitted, limit = step
    pieces, rest = spill(runs, admitted, limit)
    if limit is None:
        assert (pieces, rest) == ([], runs)
        return
    assert all(0 < num_tokens(piece) <= limit for piece in pieces)
    assert num_tokens(rest) <= max(limit, sum(admitted))


@given(steps())
def test_every_request_keeps_its_last_position_in_the_step(step):
    runs, admitted, limit = step
    _, rest = spill(runs, admitted, limit)
    assert [r[-1].end for r in rest] == [r[-1].end for r in runs]


@given(steps())
def test_pieces_are_as_few_as_the_limit_allows(step):
    runs, admitted, limit = step
    pieces, _ = spill(runs, admitted, limit)
    assert all(num_tokens(piece) == limit for piece in pieces[:-1])


def test_a_step_that_fits_is_left_as_it_is():
    runs = [[Interval(0, 3), Interval(9, 12)], [Interval(4, 8)]]
    assert spill(runs, [1, 1], 10) == ([], runs)
    assert spill(runs, [6, 4], 2) == ([], runs), "what was admitted may run"
