"""Which rows may be sparse, on the host's own pool of request slots."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_blockreuse.layers.row_modes import RowModes


@pytest.fixture
def pool():
    return ReqToTokenPool(size=4, max_context_len=8, device="cpu", enable_memory_saver=False)


def request(pool, mode=None):
    """What the host's request shows of itself, in a slot of its own."""
    state = None if mode is None else SimpleNamespace(options=SimpleNamespace(mode=mode))
    (slot,) = pool.alloc_rows(1)
    return SimpleNamespace(kv=SimpleNamespace(req_pool_idx=slot), blockreuse=state)


def test_exact_requests_are_dense_and_all_others_are_not(pool):
    modes = RowModes(pool.req_generation.numpy())
    reqs = [request(pool, mode) for mode in (None, "off", "exact", "reuse")]
    modes.admit(reqs)
    assert modes.dense([req.kv.req_pool_idx for req in reqs]).tolist() == [0, 0, 1, 0]


def test_a_slot_that_changed_hands_or_was_never_admitted_is_dense(pool):
    modes = RowModes(pool.req_generation.numpy())
    first, never = request(pool, "off"), request(pool, "off")
    modes.admit([first])
    slots = [first.kv.req_pool_idx, never.kv.req_pool_idx]
    assert modes.dense(slots).tolist() == [0, 1]
    pool.free_rows(slots[:1])
    second = request(pool, "off")
    assert second.kv.req_pool_idx == slots[0]
    assert modes.dense(slots).tolist() == [1, 1]
    modes.admit([second])
    assert modes.dense(slots).tolist() == [0, 1]
