"""Checks of gpu_check.py that concern prefill: copies of the loader equal the law, and the host waits for none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sglang_blockreuse.blocks.load import KvLoader
from sglang_blockreuse.blocks.rope import RopeGroup
from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.dispatch import Dispatcher
from sglang_blockreuse.types import BlockPlan, Copy, Interval, LocalSegment

NUM_BLOCKS, BLOCK, NUM_LAYERS, HEADS, DIM = 8, 24, 3, 2, 64
END = (NUM_BLOCKS + 1) * BLOCK
DELTA = 5


@contextmanager
def nobody_waits(device: str) -> Iterator[None]:
    """Raises RuntimeError where the host waits for the device."""
    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def loaded(dtype: torch.dtype, device: str) -> Iterator[tuple[Tensor, Tensor]]:
    """Pools after two requests of one step were loaded, and after the law; raises where the host waited."""
    random = torch.Generator().manual_seed(0)
    num_slots = 4 * END + 1
    order = (torch.randperm(num_slots - 1, generator=random) + 1).to(device)
    slot_table = order[: 2 * END].view(2, END).int().contiguous()
    homes = order[2 * END :][: NUM_BLOCKS * BLOCK]
    pools = [
        torch.randn((num_slots, HEADS, DIM), generator=random).to(device, dtype)
        for _ in range(2 * NUM_LAYERS)
    ]
    expected = [pool.double() for pool in pools]
    table = (torch.rand((END, DIM), generator=random) + 0.1).to(device)
    loader = KvLoader(
        pools[:NUM_LAYERS],
        pools[NUM_LAYERS:],
        [RopeGroup("rope", tuple(range(NUM_LAYERS)), table, True)],
        Dispatcher(),
    )
    states = [_state(list(homes.split(BLOCK))) for _ in range(2)]
    with nobody_waits(device):
        loader.load([loader.find(state, row, 0, END) for row, state in enumerate(states)], slot_table)
    new_T = torch.arange(BLOCK, END, device=device)
    angles = reference.cached_cos_sin(table, new_T - DELTA, new_T)
    for row in range(2):
        targets = slot_table[row, BLOCK:].long()
        reference.rotate_copy(expected[:NUM_LAYERS], expected[NUM_LAYERS:], homes, targets, *angles)
    yield from zip(pools, expected, strict=True)


def _state(homes: list[Tensor]) -> Any:
    blocks = [Interval((i + 1) * BLOCK, (i + 2) * BLOCK) for i in range(NUM_BLOCKS)]
    segments = tuple(LocalSegment(block, DELTA, i, block.start) for i, block in enumerate(blocks))
    copies = tuple(Copy(block, i) for i, block in enumerate(blocks))
    plan = BlockPlan(0, END, segments, copies, (Interval(0, BLOCK),), 0, END)
    return SimpleNamespace(plan=plan, home_slots=homes)
