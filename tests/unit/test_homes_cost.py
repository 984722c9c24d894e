"""What the homes of one request may cost the server: memory, lookups, the scheduler's time in every step."""

from __future__ import annotations

import time
import tracemalloc
from array import array

from home_requests import CountingTree, blocks_behind, homes_of, manager_of, request

from sglang_blockreuse.blocks.plan import MAX_RUNS
from sglang_blockreuse.blocks.split import MAX_HOME_VOLUME, Front, bounded, homes
from sglang_blockreuse.types import Interval


class TestWhatARequestMayCost:
    """A prompt of 128K tokens: 64K of leading text, then 2,047 blocks of 32 tokens."""

    TOKENS, SPANS = blocks_behind(65_536, 2_047, 32)

    def test_all_homes_of_a_request_share_one_prefix(self):
        found = homes_of()
        assert all(home.prefix is found[0].prefix for home in found)

    def test_its_homes_hold_a_bounded_part_of_memory_and_of_the_schedulers_time(self):
        tree = CountingTree(self.TOKENS[:65_536])
        manager = manager_of(tree)
        req = request(self.TOKENS, self.SPANS, params={"blockreuse_tau": 3})
        tracemalloc.start()
        jobs = manager.accept(req, max_prompt_len=10**6)
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert jobs
        assert peak < 32e6, "not one prefix of 64K tokens for each of 2,047 homes"
        assert sum(len(job.home) for job in jobs) <= MAX_HOME_VOLUME * len(self.TOKENS)
        assert tree.num_tokens <= (MAX_HOME_VOLUME + 3) * len(self.TOKENS)
        assert tree.num_lookups <= MAX_RUNS + 3

    def test_homes_behind_a_prefix_that_nobody_has_are_not_looked_up(self):
        tree = CountingTree()
        req = request(self.TOKENS, self.SPANS, params={"blockreuse_tau": 3})
        assert manager_of(tree).accept(req, max_prompt_len=10**6)
        assert tree.num_lookups <= 3

    def test_asking_whether_a_request_is_ready_costs_the_same_with_one_home_and_with_many(self):
        def num_operations(num_blocks: int) -> float:
            tree = CountingTree()
            manager = manager_of(tree)
            req = request(*blocks_behind(100, num_blocks, 40))
            manager.accept(req, max_prompt_len=10**6)
            started = time.perf_counter()
            for _ in range(2000):
                assert not manager.ready(req)
            return time.perf_counter() - started

        # a generous bound: a union over 200 homes is more than twenty times as slow
        assert min(num_operations(200) for _ in range(3)) < 10 * max(num_operations(2) for _ in range(3))

    def test_the_longest_blocks_have_homes_where_not_all_can(self):
        tokens = array("q", range(20_000))
        spans = [Interval(100 + 60 * i, 100 + 60 * i + 32 + i % 20) for i in range(300)]
        kept = bounded(
            homes(tokens, spans, front=Front(tokens[:99]), min_block_tokens=32), prompt_len=len(tokens)
        )
        assert len(kept) == MAX_RUNS
        assert [home.span for home in kept] == sorted(home.span for home in kept)
        shortest = min(len(home.body) for home in kept)
        dropped = set(spans) - {home.span for home in kept}
        assert max(len(span) for span in dropped) <= shortest
