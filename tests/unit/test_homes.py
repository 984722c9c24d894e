"""Homes as records and in flight: what they cost, who waits for them, how they end, and what is said about it."""

from __future__ import annotations

import time
import tracemalloc
from array import array
from types import SimpleNamespace

import pytest

from sglang_blockreuse.blocks.arrive import Arrivals
from sglang_blockreuse.blocks.compile import Compiler, HomeId
from sglang_blockreuse.blocks.manager import BlockManager
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.plan import MAX_RUNS
from sglang_blockreuse.blocks.request import RequestError, parse_options
from sglang_blockreuse.blocks.split import MAX_HOME_VOLUME, bounded, homes
from sglang_blockreuse.blocks.worth import why_nothing, worth_compiling
from sglang_blockreuse.config import BlocksConfig, Config
from sglang_blockreuse.metrics import Metrics
from sglang_blockreuse.types import BlockOptions, Interval, Usage, Wait

PLAIN = Namespace(None, None)


class CountingTree:
    """A tree that holds `cached` and counts what it is asked."""

    def __init__(self, cached: array[int] | None = None) -> None:
        self.cached = cached or array("q")
        self.num_lookups = self.num_tokens = 0

    def lookup(self, tokens, namespace):
        self.num_lookups += 1
        self.num_tokens += len(tokens)
        common = min(len(tokens), len(self.cached))
        while common and tokens[:common] != self.cached[:common]:
            common -= 1
        return common, None


def blocks_behind(leading: int, num_blocks: int, block_len: int) -> tuple[array[int], list[Interval]]:
    tokens = array("q", range(leading + num_blocks * block_len + 10))
    return tokens, [
        Interval(start, start + block_len) for start in range(leading, len(tokens) - 10, block_len)
    ]


def homes_of(leading=20, num_blocks=4, block_len=50, **options):
    tokens, spans = blocks_behind(leading, num_blocks, block_len)
    return homes(tokens, spans, prefix=tokens[:leading], min_block_tokens=32, **options)


def request(tokens, spans, *, mode="reuse", **values):
    custom = {"blockreuse_mode": mode, "blockreuse_spans": [x for s in spans for x in (s.start, s.end)]}
    fields = {
        "rid": "main",
        "sampling_params": SimpleNamespace(custom_params={**custom, **values.pop("params", {})}),
        "origin_input_ids": tokens,
        "extra_key": None,
        "cache_salt": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "multimodal_inputs": None,
        "session": None,
        "lora_id": None,
        "return_hidden_states": False,
        "beam_group": None,
    }
    return SimpleNamespace(**{**fields, **values})


def manager_of(tree, *, pool_size=10**7, **blocks) -> BlockManager:
    return BlockManager(
        config=Config(blocks=BlocksConfig(**blocks)),
        tree=tree,
        bos=None,
        pool_size=pool_size,
        metrics=Metrics(),
    )


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
        kept = bounded(homes(tokens, spans, prefix=tokens[:99], min_block_tokens=32), prompt_len=len(tokens))
        assert len(kept) == MAX_RUNS
        assert [home.span for home in kept] == sorted(home.span for home in kept)
        shortest = min(len(home.body) for home in kept)
        dropped = set(spans) - {home.span for home in kept}
        assert max(len(span) for span in dropped) <= shortest


class TestHomesInFlight:
    def flying(self, **options):
        compiler, usage, wait = Compiler(), Usage(), Wait()
        jobs, ids = compiler.jobs_for(CountingTree(), homes_of(**options), PLAIN, usage)
        compiler.wait(wait, ids)
        return compiler, jobs, usage, wait

    def test_an_id_is_matched_whole_or_not_at_all(self):
        home = HomeId("blockreuse-home-abc-1")
        assert not any(home.startswith(home[:length]) for length in range(len(home)))
        assert home.startswith(str(home)), "the host's own aborts name it whole"
        assert home == str(home)
        assert hash(home) == hash(str(home))

    def test_ids_cannot_be_guessed(self):
        first, second = (self.flying()[1][0].request_id for _ in range(2))
        assert first != second
        assert len(first) >= len("blockreuse-home-") + 32

    def test_ranks_with_one_token_name_homes_alike(self):
        names = [
            [job.request_id for job in Compiler("token").jobs_for(CountingTree(), homes_of(), PLAIN)[0]]
            for _ in range(2)
        ]
        assert names[0] == names[1]

    @pytest.mark.parametrize(("outcome", "num_left"), [("computed", 150), ("aborted", 100), ("no_room", 100)])
    def test_compiled_tokens_are_those_whose_home_did_not_get_lost(self, outcome, num_left):
        compiler, jobs, usage, wait = self.flying()
        assert usage.compiled_tokens == 150
        compiler.ended(jobs[0].request_id, outcome)
        compiler.ended(jobs[0].request_id, outcome)  # told twice, counted once
        assert usage.compiled_tokens == num_left
        assert wait.num_open == 2
        assert len(wait.lost) == (outcome != "computed")

    def test_homes_that_were_never_queued_are_not_waited_for(self):
        compiler, jobs, usage, wait = self.flying()
        compiler.queued(jobs[0].request_id, "request")
        compiler.drop_unqueued()
        assert (wait.num_open, usage.compiled_tokens) == (1, 50)
        assert compiler.first_ahead(wait) == "request"

    def test_whoever_waits_for_a_home_waits_for_what_it_waits_for(self):
        compiler, jobs, _, _ = self.flying()
        for number, job in enumerate(jobs):
            compiler.queued(job.request_id, number)
        joined = Wait()
        compiler.wait(joined, [jobs[2].request_id])
        assert jobs[2].waits_for == (jobs[0].request_id,)
        assert list(compiler.requests_ahead(joined)) == [0, 2]

    def test_a_home_is_wanted_as_long_as_anybody_is_there_who_waits_for_it(self):
        compiler, wait, joined = Compiler(), Wait(), Wait()
        _, ids = compiler.jobs_for(CountingTree(), homes_of(), PLAIN)
        compiler.wait(wait, ids, waiting="bringer")
        compiler.wait(joined, ids[:1], waiting="joiner")
        compiler.ended("bringer", "aborted")
        assert [compiler.is_unwanted(i) for i in ids] == [False, True, True]
        compiler.ended("joiner", "aborted")
        assert all(compiler.is_unwanted(i) for i in ids)

    def test_background_homes_are_for_later_requests(self):
        manager = manager_of(CountingTree(), compile="background")
        jobs = manager.accept(request(*blocks_behind(20, 3, 50)), max_prompt_len=10**6)
        manager.compiler.ended("main")
        assert jobs
        assert not any(manager.compiler.is_unwanted(job.request_id) for job in jobs)


class TestLostHomes:
    def waiting(self, **values):
        manager = manager_of(CountingTree(), **values.pop("blocks", {}))
        req = request(*blocks_behind(20, 3, 50), **values)
        jobs = manager.accept(req, max_prompt_len=10**6)
        assert not manager.ready(req)
        return manager, req, jobs

    def test_they_are_asked_for_once_more_and_then_it_is_said(self):
        manager, req, jobs = self.waiting()
        for job in jobs:
            manager.compiler.ended(job.request_id, "aborted")
        assert not manager.ready(req)
        assert not manager.ready(req), "asked twice in one step"
        assert manager.bereaved == {"main": req}
        again = manager.arrivals.ask_again(req)
        assert [job.home for job in again] == [job.home for job in jobs]
        assert req.blockreuse.usage.compiled_tokens == 100
        assert not manager.ready(req)
        for job in again:
            manager.compiler.ended(job.request_id, "aborted")
        assert manager.ready(req), "a second loss is final"
        assert req.blockreuse.not_compiled == "home_lost"
        assert req.blockreuse.usage.compiled_tokens == 0

    def test_a_home_without_room_is_not_asked_for_again(self):
        manager, req, jobs = self.waiting()
        for job in jobs:
            manager.compiler.ended(job.request_id, "no_room")
        assert manager.ready(req)
        assert req.blockreuse.not_compiled == "no_room"
        assert manager.bereaved == {}

    @pytest.mark.parametrize(("outcome", "reason"), [("no_room", "no_room"), ("computed", "mode_compile")])
    def test_a_compile_request_says_what_became_of_its_homes(self, outcome, reason):
        manager, req, jobs = self.waiting(mode="compile")
        for job in jobs:
            manager.compiler.ended(job.request_id, outcome)
        assert manager.ready(req)
        assert req.blockreuse.usage.skipped_reason == reason

    def test_a_request_that_cannot_have_its_marks_leaves_no_home_behind(self):
        manager = manager_of(CountingTree())
        with pytest.raises(RequestError, match="does not combine with session"):
            manager.accept(
                request(*blocks_behind(20, 3, 50), mode="compile", session=object()), max_prompt_len=10**6
            )
        assert manager.accept(request(*blocks_behind(20, 3, 50)), max_prompt_len=10**6)


class TestThePool:
    """Prompt 20 + 3 * 50 + 10; homes of two blocks."""

    def compiled(self, pool_size, **values) -> tuple[int, str | None]:
        manager = manager_of(CountingTree(), pool_size=pool_size, **values.pop("blocks", {}))
        req = request(*blocks_behind(20, 3, 50), **values)
        return len(manager.accept(req, max_prompt_len=10**6)), req.blockreuse.not_compiled

    @pytest.mark.parametrize("compile", ["before", "background"])
    def test_a_shared_prefix_counts_once(self, compile):
        blocks = {"compile": compile}
        assert self.compiled(280 / 0.8 + 1, blocks=blocks)[0] == 2
        assert self.compiled(280 / 0.8 - 1, blocks=blocks) == (0, "pool_too_small")

    def test_a_compile_request_counts_the_prefix_and_the_blocks(self):
        assert self.compiled(171 / 0.8 + 1, mode="compile")[0] == 3
        assert self.compiled(171 / 0.8 - 1, mode="compile") == (0, "pool_too_small")

    def test_a_neutral_prefix_counts_beside_the_prompt(self):
        tokens, spans = blocks_behind(20, 2, 50)
        arrivals = Arrivals(
            config=BlocksConfig(),
            tree=CountingTree(),
            compiler=Compiler(),
            metrics=Metrics(),
            bos=None,
            pool_size=int((130 + 400 + 100) / 0.8) - 1,
            off_reason=None,
            neutral_prefix=tuple(range(5000, 5400)),
        )
        req = request(tokens, spans)
        assert arrivals.accept(req, max_prompt_len=10**6) == []
        assert req.blockreuse.not_compiled == "pool_too_small"

    @pytest.mark.parametrize("compile", ["before", "background", "manual"])
    def test_a_home_longer_than_a_clients_prompt_may_be_is_not_made(self, compile):
        manager = manager_of(CountingTree(), compile=compile)
        req = request(*blocks_behind(20, 3, 50))
        assert manager.accept(req, max_prompt_len=69) == []
        assert req.blockreuse.not_compiled == "home_too_long"
        fits = manager.accept(request(*blocks_behind(20, 3, 50)), max_prompt_len=70)
        assert len(fits) == (0 if compile == "manual" else 2)


def options(spans, *, tau=None, budget=0.05, policy="seam"):
    return BlockOptions("reuse", tuple(spans), policy, tau, budget)


@pytest.mark.parametrize("policy", ["seam", "head", "random", "query", "deviation", "head+query"])
@pytest.mark.parametrize(("budget", "reason"), [(1.0, "all_repaired"), (0.05, None)])
def test_homes_are_worth_compiling_where_something_of_them_would_be_copied(policy, budget, reason):
    found = homes_of()
    spans = [home.span for home in found]
    wanted, why = worth_compiling(
        found, options(spans, budget=budget, policy=policy), start=20, limit=230, end=230
    )
    assert (why, bool(wanted)) == (reason, reason is None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prefix_len": 229}, "exact_prefix"),
        ({"prefix_len": 217}, "blocks_too_short"),
        ({"prefix_len": 217, "refused": "all_repaired"}, "blocks_too_short"),
        ({"prefix_len": 20, "limit": 20}, "input_logprobs"),
        ({"prefix_len": 20, "limit": 75}, "input_logprobs"),
        ({"prefix_len": 20}, "not_cached"),
        ({"prefix_len": 20, "not_compiled": "queue_full"}, "queue_full"),
        ({"prefix_len": 20, "refused": "cost_gate", "not_compiled": "queue_full"}, "cost_gate"),
        ({"prefix_len": 20, "homes": []}, "not_cached"),
        ({"prefix_len": 20, "homes": [], "not_compiled": "home_too_long"}, "home_too_long"),
        ({"prefix_len": 20, "homes": [], "min_block_tokens": 60}, "blocks_too_short"),
        (
            {"prefix_len": 20, "homes": [], "min_block_tokens": 60, "not_compiled": "compile_off"},
            "blocks_too_short",
        ),
    ],
)
def test_every_reason_for_no_reuse_is_true(values, reason):
    """Blocks [20, 70), [70, 120), [120, 170), [170, 220), the first of which continues the compile prefix."""
    _, spans = blocks_behind(20, 4, 50)
    known = {"prompt_len": 230, "limit": 230, "refused": None, "not_compiled": None, "min_block_tokens": 32}
    values = {**known, **values}
    assert why_nothing(spans, values.pop("homes", homes_of()), **values) == reason


class TestMarksOfAPromptThatWasCut:
    def parse(self, was_cut=True, **params):
        return parse_options(
            {f"blockreuse_{k}": v for k, v in params.items()},
            prompt_len=100,
            config=BlocksConfig(),
            was_cut=was_cut,
        )

    def test_they_are_cut_where_the_prompt_is(self):
        found = self.parse(spans=[10, 50, 60, 130, 140, 150], question=[90, 160])
        assert found.spans == (Interval(10, 50), Interval(60, 100))
        assert (found.question, found.num_cut) == (Interval(90, 100), 1)
        assert self.parse(question=[120, 160]).question is None

    def test_a_prompt_that_was_not_cut_is_held_to_its_length(self):
        with pytest.raises(RequestError, match="outside the prompt of 100 tokens"):
            self.parse(was_cut=False, spans=[60, 130])

    def test_what_is_malformed_stays_malformed(self):
        with pytest.raises(RequestError, match="begins before"):
            self.parse(spans=[110, 150, 120, 160])


@pytest.mark.parametrize(
    "params",
    [
        {"blockreuse_spans": [0, 10**4000]},
        {"blockreuse_spans": list(range(300_001))},
        {"blockreuse_tau": 10**4000},
        {"blockreuse_budget": 10**400},
        {"blockreuse_policy": "x" * 10**6},
        {"blockreuse_mode": ["x" * 10**6] * 100},
        {"blockreuse_" + "x" * 10**6: 1},
    ],
    ids=["span", "spans", "tau", "budget", "policy", "mode", "key"],
)
def test_what_a_client_sends_is_not_echoed_whole(params):
    with pytest.raises(RequestError) as caught:
        parse_options(params, prompt_len=100, config=BlocksConfig())
    assert len(str(caught.value)) < 500
