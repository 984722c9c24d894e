"""Tags follow slots and plans: local where KV was copied, false sinks at heads of blocks, true sinks never."""

from __future__ import annotations

import pytest
import torch

from sglang_blockreuse.blocks.tags import SlotTags
from sglang_blockreuse.kernels.reference import TAG_FALSE_SINK, TAG_LOCAL
from sglang_blockreuse.types import (
    PATH,
    BlockOptions,
    BlockPlan,
    Copy,
    Interval,
    LocalSegment,
    RequestState,
    Usage,
)

GLOBAL, LOCAL, SINK = 0, TAG_LOCAL, TAG_LOCAL | TAG_FALSE_SINK
NUM_SLOTS, END, NUM_SINKS = 100, 40, 4


def state_of(segments, runs, *, start=0, home_slots=()):
    """A request of 40 tokens that copies what its runs leave of its segments."""
    computed = {p for run in runs for p in range(run.start, run.end)}
    copies = tuple(
        Copy(Interval(p, p + 1), i)
        for i, s in enumerate(segments)
        for p in range(s.interval.start, s.interval.end)
        if p not in computed
    )
    options = BlockOptions("reuse", tuple(s.interval for s in segments), "seam", 0, 0.05)
    plan = BlockPlan(start, END, tuple(segments), copies, tuple(runs), 0, END)
    return RequestState(options, Usage(), plan=plan, home_slots=list(home_slots))


def block(start, end, *, block_start=None):
    return LocalSegment(Interval(start, end), 7, 0, start if block_start is None else block_start)


@pytest.fixture
def tags():
    found = SlotTags(NUM_SLOTS, num_sinks=NUM_SINKS, device="cpu")
    found.values_S.fill_(SINK)  # whatever stood there before
    return found


ROW = torch.arange(NUM_SLOTS - 1, NUM_SLOTS - 1 - END, -1, dtype=torch.int32)  # slots fall as positions rise


def tagged(tags, state, low=0, high=END):
    tags.planned(state, ROW, low, high)
    return tags.values_S[ROW.long()].tolist()


def test_copied_tokens_are_local_and_the_heads_of_blocks_are_false_sinks(tags):
    state = state_of([block(10, 20), block(20, 36)], [Interval(0, 10), Interval(36, 40)])
    heads = [SINK] * NUM_SINKS
    assert tagged(tags, state) == ([GLOBAL] * 10 + heads + [LOCAL] * 6 + heads + [LOCAL] * 12 + [GLOBAL] * 4)


def test_a_block_that_begins_the_prompt_has_no_false_sinks(tags):
    state = state_of([block(0, 20)], [Interval(20, 40)])
    assert tagged(tags, state) == [LOCAL] * 20 + [GLOBAL] * 20


@pytest.mark.parametrize("first", range(1, NUM_SINKS + 2))
def test_the_first_tokens_of_the_sequence_are_true_sinks_whatever_block_holds_them(tags, first):
    """Behind a BOS token alone, a block begins inside the first s positions."""
    state = state_of([block(first, 20)], [Interval(0, first), Interval(20, 40)])
    spared = range(first, max(first, NUM_SINKS))
    sinks = range(spared.stop, first + NUM_SINKS)
    assert len(sinks) == min(first, NUM_SINKS)
    assert tagged(tags, state)[first:20] == [SINK if p in sinks else LOCAL for p in range(first, 20)]


def test_repaired_tokens_are_neither_local_nor_false_sinks(tags):
    state = state_of([block(10, 30)], [Interval(0, 13), Interval(30, 40)])
    assert tagged(tags, state) == [GLOBAL] * 13 + [SINK] + [LOCAL] * 16 + [GLOBAL] * 10


def test_a_block_whose_head_is_an_exact_prefix_has_no_sinks_behind_it(tags):
    state = state_of([block(15, 30, block_start=10)], [Interval(30, 40)], start=15)
    assert tagged(tags, state, low=15)[15:] == [LOCAL] * 15 + [GLOBAL] * 10


def test_the_last_position_of_a_chunk_is_computed_and_so_global(tags):
    state = state_of([block(10, 30)], [Interval(0, 10), Interval(30, 40)])
    assert tagged(tags, state, 0, 20)[:20] == [GLOBAL] * 10 + [SINK] * 4 + [LOCAL] * 5 + [GLOBAL]


def test_a_plan_that_was_given_up_leaves_no_tag_behind(tags):
    state = state_of([block(10, 30)], [Interval(0, 10), Interval(30, 40)])
    assert LOCAL in tagged(tags, state)
    state.plan = None
    assert tagged(tags, state) == [GLOBAL] * END


def test_a_plan_that_repairs_more_takes_its_tags_back(tags):
    state = state_of([block(10, 30)], [Interval(0, 10), Interval(30, 40)])
    tagged(tags, state)
    state.plan = state_of([block(10, 30)], [Interval(0, 40)]).plan
    assert tagged(tags, state) == [GLOBAL] * END


def test_a_local_path_keeps_the_tags_that_it_had(tags):
    path_slots = torch.arange(10)
    tags.values_S[:10] = torch.tensor([GLOBAL, LOCAL, SINK, GLOBAL, LOCAL] * 2, dtype=torch.uint8)
    path = LocalSegment(Interval(10, 20), 0, PATH, 10)
    state = state_of([path], [Interval(20, 40)], start=10, home_slots=[path_slots])
    assert tagged(tags, state, low=10)[10:20] == [GLOBAL, LOCAL, SINK, GLOBAL, LOCAL] * 2


def test_other_requests_slots_are_not_touched(tags):
    tagged(tags, state_of([block(10, 30)], [Interval(0, 10), Interval(30, 40)]), 5, 25)
    row = set(ROW[5:25].tolist())
    assert all(tags.values_S[s] == SINK for s in range(NUM_SLOTS) if s not in row)
