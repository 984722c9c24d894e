"""Homes in flight: who waits for them, how they end, and which are made at all."""

from __future__ import annotations

import pytest
from home_requests import PLAIN, CountingTree, blocks_behind, homes_of, manager_of, request

from sglang_blockreuse.blocks.arrive import Arrivals
from sglang_blockreuse.blocks.compile import Compiler, HomeId
from sglang_blockreuse.blocks.request import RequestError
from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.metrics import Metrics
from sglang_blockreuse.types import Usage, Wait


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
            config=BlocksConfig(company=0),
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


class TestDonors:
    """Whose prompts enter the index of `auto`: a home holds the compile prefix, as all others of its prompt do."""

    def entered(self, *, is_home, **values):
        manager = manager_of(CountingTree(), auto=True)
        tokens, spans = blocks_behind(20, 4, 50)
        main = request(tokens, spans, output_ids=[], **values)
        jobs = manager.accept(main, max_prompt_len=1000)
        assert len(jobs) == 3  # the first block stands where its home is
        home = request(jobs[0].home.tokens, [], rid=jobs[0].request_id, output_ids=[])
        who = home if is_home else main
        manager.arrivals.computed(who, up_to=len(who.origin_input_ids), exact_end=len(who.origin_input_ids))
        return manager.arrivals.index_size()["tokens"]

    def test_a_home_is_no_donor(self):
        assert self.entered(is_home=True) == 0

    def test_a_prompt_that_was_computed_exactly_is(self):
        assert self.entered(is_home=False) == 230
