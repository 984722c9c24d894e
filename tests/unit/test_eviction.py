"""Ranks of what the tree holds, for the host's order of eviction."""

from __future__ import annotations

import pytest

from sglang_blockreuse.eviction import SPECULATIVE, Order


@pytest.mark.parametrize("priority", [None, 0, 7, -7])
def test_under_lru_all_exact_kv_has_one_rank_so_that_the_last_use_decides(priority):
    assert Order("lru").rank(priority) == 0


def test_lru_is_the_hosts_priority_policy_with_one_rank():
    assert Order("lru").policy == "priority"


@pytest.mark.parametrize("policy", ["priority", "slru", "lfu", "fifo", "tlru"])
def test_a_policy_that_the_user_chose_is_the_hosts_own_with_the_requests_priorities(policy):
    order = Order(policy)
    assert (order.policy, order.rank(7), order.rank(-7), order.rank(None)) == (policy, 7, -7, 0)


@pytest.mark.parametrize("policy", ["lru", "LRU", "priority"])
def test_a_path_ranks_below_every_priority(policy):
    assert Order(policy).rank(SPECULATIVE) < min(Order(policy).rank(p) for p in (-(2**61), 0, 2**61))


@pytest.mark.parametrize("core", ["rust", "python"])
def test_the_hosts_policy_gives_lower_ranks_up_first_and_then_the_one_not_used_longest(core):
    """A rank is what we say; what the host makes of it is read from both of its trees."""
    tree = tree_of(core)
    for name, priority in (("home", 0), ("path", SPECULATIVE), ("younger", 0)):
        tree.insert(name, priority)
    assert tree.leave() == ["path", "home", "younger"]


@pytest.mark.parametrize("core", ["rust", "python"])
def test_a_path_that_is_inserted_again_with_a_rank_takes_it(core):
    tree = tree_of(core)
    for name, priority in (("home", 0), ("path", SPECULATIVE), ("path", 0)):
        tree.insert(name, priority)
    assert tree.leave() == ["home", "path"]


def tree_of(core: str) -> TreeOfNames:
    return TreeOfNames(core)


class TreeOfNames:
    """The host's tree core with one leaf for each name."""

    def __init__(self, core: str) -> None:
        import torch
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_cache.components import FullComponent
        from sglang.srt.mem_cache.unified_cache.tree_core_registry import create_tree_core

        params = CacheInitParams(
            disable=False,
            req_to_token_pool=None,
            token_to_kv_pool_allocator=None,
            page_size=1,
            eviction_policy=Order("lru").policy,
            tree_components=(ComponentType.FULL,),
        )
        self._full, self._torch, self._slots = ComponentType.FULL, torch, {}
        cache = type("Cache", (), {"enable_session_radix_cache": False, "token_to_kv_pool_allocator": None})()
        self._core = create_tree_core(
            name=core, params=params, components={ComponentType.FULL: FullComponent(cache, params)}
        )

    def insert(self, name: str, priority: int) -> None:
        from array import array

        from sglang.srt.mem_cache.base_prefix_cache import InsertParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        first = self._slots.setdefault(name, 10 * len(self._slots))
        step = self._core.begin_insert(
            InsertParams(
                key=RadixKey(array("q", range(100 + first, 110 + first)), extra_key=None),
                value=self._torch.arange(first, first + 10),
                prev_prefix_len=10,
                priority=priority,
            )
        )
        while step.result is None:
            step = self._core.resume_insert()
        self._core.end_insert()

    def leave(self) -> list[str]:
        """Names in the order in which the host gives them up."""
        names, left, tracker = {slot: name for name, slot in self._slots.items()}, [], {self._full: 0}
        self._core.evict_device_start(self._full, 10**6)
        while (node := self._core.evict_device_next_node(self._full, tracker).node_id) is not None:
            result = self._core.evict_device_leaf(node, False)
            (slots,) = result.device_frees.pop(self._full)
            left.append(names[int(slots[0])])
        self._core.evict_device_end(self._full)
        return left
