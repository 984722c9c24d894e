"""Homes of which a head lies on the device and the rest in host memory."""

from __future__ import annotations

import pytest
import torch
from home_requests import PLAIN, blocks_behind

from sglang_blockreuse.blocks.compile import Compiler
from sglang_blockreuse.blocks.match import find
from sglang_blockreuse.blocks.split import Front, homes
from sglang_blockreuse.blocks.tiers import Found, HomeSlots, num_on_host, on_device, on_host
from sglang_blockreuse.types import (
    BlockOptions,
    BlockPlan,
    Copy,
    Interval,
    LocalSegment,
    RequestState,
    Usage,
)

OPTIONS = BlockOptions(mode="reuse", spans=(), policy="seam", tau=0, budget=0.0)


def slots_of(num_device: int, num_host: int) -> HomeSlots:
    return HomeSlots(torch.arange(num_device), 1000 + torch.arange(num_host))


@pytest.mark.parametrize(
    ("first", "last", "device", "host"),
    [
        (0, 4, [0, 1, 2, 3], []),
        (8, 13, [8, 9], [1000, 1001, 1002]),
        (10, 12, [], [1000, 1001]),
        (12, 15, [], [1002, 1003, 1004]),
        (0, 15, list(range(10)), [1000, 1001, 1002, 1003, 1004]),
    ],
    ids=["head", "across", "from the border", "tail", "all"],
)
def test_a_part_of_a_path_keeps_to_each_tier_what_lies_there(first, last, device, host):
    part = slots_of(10, 5).part(first, last)
    assert (part.device_T.tolist(), part.host_T.tolist()) == (device, host)


def planned(*, num_device: int, num_host: int, copied: Interval) -> RequestState:
    """One segment at 20, of which the first `num_device` tokens lie on the device."""
    segment = LocalSegment(Interval(20, 20 + num_device + num_host), 5, 0, 20)
    plan = BlockPlan(10, 60, (segment,), (Copy(copied, 0),), (), 0, 50)
    slots = slots_of(num_device, num_host)
    return RequestState(OPTIONS, Usage(), plan=plan, home_slots=[slots.device_T], host_slots=[slots.host_T])


@pytest.mark.parametrize(
    ("copied", "low", "high", "device", "host"),
    [
        (Interval(22, 34), 10, 60, [(22, 28)], [(28, 34)]),
        (Interval(22, 34), 10, 26, [(22, 26)], []),
        (Interval(22, 34), 30, 60, [], [(30, 34)]),
        (Interval(22, 27), 10, 60, [(22, 27)], []),
        (Interval(29, 34), 10, 60, [], [(29, 34)]),
    ],
    ids=["across", "a chunk before the border", "a chunk behind it", "on the device", "on the host"],
)
def test_every_copied_position_belongs_to_one_tier(copied, low, high, device, host):
    state = planned(num_device=8, num_host=8, copied=copied)
    pieces = list(state.plan.copies_within(low, high))
    as_pairs = lambda found: [(part.start, part.end) for _, part in found]  # noqa: E731
    assert as_pairs(on_device(state, pieces)) == device
    assert as_pairs(on_host(state, pieces)) == host


def test_what_comes_from_host_memory_is_counted_without_what_is_repaired():
    assert num_on_host(planned(num_device=8, num_host=8, copied=Interval(22, 34))) == 6
    assert num_on_host(planned(num_device=16, num_host=0, copied=Interval(22, 34))) == 0


class TreeOfTwoTiers:
    """Holds one sequence, the first tokens on the device."""

    def __init__(self, tokens, num_device):
        self.tokens, self.num_device = tokens, num_device
        self.held = 0

    def lookup(self, tokens, namespace):
        common = min(len(tokens), len(self.tokens))
        while tokens[:common] != self.tokens[:common]:
            common -= 1
        num_device = min(common, self.num_device)
        return common, Found(num_device, common - num_device, "device node", "node")

    def slots(self, found):
        return slots_of(found.num_device, found.num_host)

    def hold(self, found):
        self.held += 1
        return found

    def let_go(self, lock):
        self.held -= 1


def test_a_block_of_which_the_host_has_the_end_is_found_whole():
    tokens, spans = blocks_behind(20, 1, 50)
    (home,) = homes(tokens, spans, front=Front(tokens[:20]), min_block_tokens=32, all_blocks=True)
    tree = TreeOfTwoTiers(home.tokens, num_device=45)
    (hit,) = find(tree, [home], start=0, end=10**6, namespace=PLAIN)
    assert hit.segment.interval == spans[0]
    assert hit.slots.device_T.tolist() == list(range(20, 45)), "from the block on, without its prefix"
    assert hit.slots.host_T.tolist() == list(range(1000, 1025))


def test_a_block_whose_compile_prefix_went_to_the_host_too_is_found_whole():
    tokens, spans = blocks_behind(20, 1, 50)
    (home,) = homes(tokens, spans, front=Front(tokens[:20]), min_block_tokens=32, all_blocks=True)
    (hit,) = find(TreeOfTwoTiers(home.tokens, 5), [home], start=0, end=10**6, namespace=PLAIN)
    assert len(hit.slots.device_T) == 0
    assert hit.slots.host_T.tolist() == list(range(1015, 1065)), "what lies before is the prefix's"


@pytest.mark.parametrize(
    ("num_fetched", "compiled", "fetched"),
    [(0, 50, 0), (49, 0, 50), (69, 0, 50), (30, 19, 31)],
    ids=["computed", "but for the last token", "with its prefix", "in part"],
)
def test_a_home_that_storage_had_was_not_compiled(num_fetched, compiled, fetched):
    tokens, spans = blocks_behind(20, 1, 50)
    compiler, usage = Compiler(), Usage()
    wanted = homes(tokens, spans, front=Front(tokens[:20]), min_block_tokens=32, all_blocks=True)
    (job,), _ = compiler.jobs_for(TreeOfTwoTiers(tokens[:0], 0), wanted, PLAIN, usage)
    compiler.ended(job.request_id, num_fetched=num_fetched)
    assert (usage.compiled_tokens, usage.storage_tokens) == (compiled, fetched)
