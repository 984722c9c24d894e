"""What a plan copies, found at once for any number of pieces."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_blockreuse.blocks.load import KvLoader
from sglang_blockreuse.blocks.rope import RopeGroup
from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.dispatch import Dispatcher
from sglang_blockreuse.types import BlockPlan, Copy, Interval, LocalSegment

SLOTS, HEADS, DIM, END = 6000, 2, 8, 2000
ROPES = (
    RopeGroup("rope", (0, 2), torch.rand(END, DIM) + 0.1, True),
    RopeGroup("none", (1,), None, True),
)


def pools():
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(SLOTS, HEADS, DIM, generator=generator) for _ in range(3)]


def moved(num_blocks, *, length=8, seam=2):
    """A plan of blocks whose first tokens are repaired, each block moved by another distance; its state and row."""
    blocks = [Interval(100 + i * length, 100 + (i + 1) * length) for i in range(num_blocks)]
    segments = tuple(LocalSegment(b, 1 + i % 90, i, b.start) for i, b in enumerate(blocks))
    copies = tuple(Copy(Interval(b.start + seam, b.end), i) for i, b in enumerate(blocks))
    heads = tuple(Interval(b.start, b.start + seam) for b in blocks)
    runs = (Interval(0, 100), *heads, Interval(blocks[-1].end, END))
    plan = BlockPlan(0, END, segments, copies, runs, 0, blocks[-1].end)
    slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(1))
    row, homes = slots[:END].int(), slots[END:]
    home_slots = [homes[i * length : (i + 1) * length] for i in range(num_blocks)]
    return SimpleNamespace(plan=plan, home_slots=home_slots), row


def table_of(rows):
    """The host's page table with some of its rows; what nobody may read is beyond the pool."""
    table = torch.full((max(rows) + 2, END), SLOTS, dtype=torch.int32)
    for at, row in rows.items():
        table[at] = row
    return table


def piece_by_piece(state, row, low, high, into=None):
    """The law: every copied token of the chunk on its own."""
    keys, values = into or (pools(), pools())
    for index, part in state.plan.copies_within(low, high):
        segment = state.plan.segments[index]
        for position in range(part.start, part.end):
            source = state.home_slots[index][position - segment.interval.start :][:1]
            new = torch.tensor([position])
            for group in ROPES:
                cos, sin = group.cos_sin(new - segment.delta, new)
                layers = [[pool[i] for i in group.layers] for pool in (keys, values)]
                reference.rotate_copy(*layers, source, row[new].long(), cos, sin, is_neox=group.is_neox)
    return keys, values


@pytest.mark.parametrize(
    ("low", "high"),
    [(0, END), (0, 101), (100, 108), (109, 141), (500, 501), (900, END)],
    ids=["all", "nothing", "one block", "cut at both ends", "one token", "behind the blocks"],
)
def test_a_chunk_takes_over_what_its_plan_copies_and_nothing_else(low, high):
    state, row = moved(90)
    keys, values = pools(), pools()
    loader = KvLoader(keys, values, ROPES, Dispatcher("reference"))
    copies = loader.find(state, 1, low, high)
    loader.load([copies], table_of({1: row}))
    num = copies.num_tokens
    assert num == sum(len(part) for _, part in state.plan.copies_within(low, high))
    expected = piece_by_piece(state, row, low, high)
    for mine, law, before in zip([*keys, *values], [*expected[0], *expected[1]], pools() * 2, strict=True):
        assert torch.equal(mine, law)
        # negative control: something was moved
        assert torch.equal(mine, before) == (num == 0)


def test_requests_of_one_step_are_copied_together_each_from_its_own_homes():
    """Two requests share a home at two offsets; a third copies nothing."""
    state, row = moved(90)
    twin, _ = moved(40)
    twin.home_slots = state.home_slots[:40]
    other = row.flip(0)[: END // 2].clone()  # of slots that the first does not copy to
    low, high = 0, 500
    other_row = torch.cat([other, torch.full((END - len(other),), SLOTS, dtype=torch.int32)])
    keys, values = pools(), pools()
    loader = KvLoader(keys, values, ROPES, Dispatcher("reference"))
    copies = [
        loader.find(state, 2, low, high),
        loader.find(twin, 0, 0, 101),
        loader.find(twin, 0, low, high),
    ]
    assert copies[1].num_tokens == 0
    loader.load(copies, table_of({2: row, 0: other_row}))
    law = piece_by_piece(twin, other_row, low, high, into=piece_by_piece(state, row, low, high))
    for mine, expected in zip([*keys, *values], [*law[0], *law[1]], strict=True):
        assert torch.equal(mine, expected)


class Counting(TorchDispatchMode):
    """Counts the operations that reach a device."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += 1
        return func(*args, **(kwargs or {}))


def num_operations(num_blocks):
    state, row = moved(num_blocks)
    loader = KvLoader(pools(), pools(), ROPES, Dispatcher("reference"))
    with Counting() as counting:
        copies = loader.find(state, 0, 0, END)
        loader.load([copies], table_of({0: row}))
    assert copies.num_tokens == 6 * num_blocks
    return counting.num


def test_the_device_is_asked_as_often_for_two_hundred_pieces_as_for_two():
    assert num_operations(200) == num_operations(2)
    # negative control: another group of layers is another few operations
    assert num_operations(2) > 10
