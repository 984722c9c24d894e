"""Homes that the host would not admit as a client's request, and compile requests on everything a request can carry.

One server with a short context, a small pool and a long neutral compile prefix.
"""

from __future__ import annotations

import json
import random

import pytest
import requests
from prompts import Library, random_ids, usage
from tiny_models import talking_model

pytestmark = pytest.mark.engine
CONTEXT, POOL, NEUTRAL = 512, 900, 200
LONGEST = CONTEXT - 1 - 5 - 1  # tokens of the longest prompt that the host takes
TIMEOUT_S = 240.0  # on a busy machine; what waits for ever is told from what is slow
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(nursery, tmp_path_factory):
    folder = tmp_path_factory.mktemp("limits")
    config = folder / "config.json"
    config.write_text(json.dumps({"blocks": {"compile_prefix_text": "river " * NEUTRAL, "company": 0}}))
    flags = ("--dtype", "float32", "--context-length", str(CONTEXT), "--max-total-tokens", str(POOL))
    flags += ("--max-running-requests", "4", "--blockreuse-config", str(config), "--allow-auto-truncate")
    flags += ("--enable-streaming-session", "--enable-return-hidden-states")
    with nursery.server(talking_model(), *flags, log=folder / "server.log") as running:
        yield running


@pytest.fixture(autouse=True)
def empty_tree(server):
    server.flush_cache()


def generate(server, ids, spans=(), *, sampling=(), mode="reuse", **body):
    custom = {"blockreuse_spans": list(spans), "blockreuse_mode": mode}
    params = {**GREEDY, **dict(sampling), "custom_params": custom}
    return server.generate(input_ids=ids, sampling_params=params, timeout_s=TIMEOUT_S, **body)


def counts(server):
    return server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]


def one_document(seed: int, length: int):
    library = Library(seed=seed, system_len=10, doc_lens=(length,), question_len=10)
    return library.prompt((0,))


def new_homes(server, before):
    return counts(server).get("homes_total", 0) - before.get("homes_total", 0)


@pytest.mark.parametrize("mode", ["reuse", "compile"])
def test_a_home_that_is_longer_than_the_context_is_never_made(server, mode):
    before = counts(server)
    ids, spans = one_document(1, 400)
    answer = generate(server, ids, spans, mode=mode)
    assert usage(answer)["skipped_reason"] == "home_too_long"
    assert usage(answer)["compiled_tokens"] == 0
    assert new_homes(server, before) == 0
    assert generate(server, [5, 6, 7])["meta_info"]["completion_tokens"] == 4, "the scheduler lives"


def test_the_longest_home_that_the_host_takes_is_made(server):
    length = LONGEST - NEUTRAL - 1  # one token of the text's own
    ids, spans = one_document(2, length)
    longest = generate(server, ids, spans, mode="compile")
    assert usage(longest)["compiled_tokens"] in (length, 0)
    num = next(
        n
        for n in (length, length - 1, length - 2)
        if usage(generate(server, *one_document(3, n), mode="compile"))["compiled_tokens"]
    )
    too_long = usage(generate(server, *one_document(4, num + 1), mode="compile"))
    assert too_long["skipped_reason"] == "home_too_long"


@pytest.mark.parametrize("mode", ["reuse", "compile"])
def test_a_home_counts_with_its_prefix_against_the_pool(server, mode):
    """Two blocks: prompt and blocks alone are less than 80 % of the pool, with the prefix they are more."""
    if mode == "reuse":
        ids, spans = Library(seed=5, system_len=10, doc_lens=(150, 150), question_len=10).prompt((0, 1))
        assert len(ids) + 300 < 0.8 * POOL < len(ids) + 300 + NEUTRAL
    else:  # the prompt itself is not run
        ids, spans = Library(seed=5, system_len=10, doc_lens=(160, 160, 160)).prompt((0, 1, 2))
        assert NEUTRAL + 480 < 0.8 * POOL < NEUTRAL + 480 + len(ids)
    before = counts(server)
    found = usage(generate(server, ids, spans, mode=mode))
    if mode == "reuse":
        assert (found["skipped_reason"], new_homes(server, before)) == ("pool_too_small", 0)
    else:
        assert found["compiled_tokens"] == 480


def test_a_home_that_finds_no_room_ends_and_nobody_waits_for_ever(server):
    session = server.post("/open_session", capacity_of_str_len=1000, streaming=True)
    try:
        held = random_ids(490, random.Random(9))
        generate(server, held, session_params={"id": session})
        ids, spans = one_document(10, 240)
        found = usage(generate(server, ids, spans))
        assert found["skipped_reason"] == "no_room"
        assert found["compiled_tokens"] == 0
        assert usage(generate(server, ids, spans, mode="compile"))["skipped_reason"] == "no_room"
    finally:
        server.post("/close_session", session_id=session)
    # negative control: the same with the room that the session took
    assert usage(generate(server, *one_document(11, 240)))["skipped_reason"] != "no_room"


class TestMarksOfPromptsThatTheHostCuts:
    def test_marks_are_cut_with_the_prompt(self, server):
        library = Library(seed=20, system_len=10, doc_lens=(150, 150, 150, 150), question_len=10)
        ids, spans = library.prompt((0, 1, 2, 3))
        assert len(ids) > CONTEXT
        found = usage(generate(server, ids, spans))
        assert found["prompt_truncated"] is True
        assert found["skipped_reason"] != "no_blocks"
        assert sum(found[f"{kind}_tokens"] for kind in ("prefix", "reused", "repaired", "fresh")) < CONTEXT

    def test_marks_that_were_cut_away_are_not_said_to_be_missing(self, server):
        ids = random_ids(700, random.Random(21))
        found = usage(generate(server, ids, [600, 690]))
        assert (found["prompt_truncated"], found["skipped_reason"]) == (True, "prompt_truncated")

    def test_a_prompt_that_was_not_cut_is_held_to_its_length(self, server):
        with pytest.raises(requests.HTTPError, match=r"400.*outside the prompt of 50 tokens"):
            generate(server, random_ids(50, random.Random(22)), [10, 60])
        found = usage(generate(server, *one_document(23, 60)))
        assert found["prompt_truncated"] is False


class TestCompileRequests:
    @pytest.mark.parametrize("streaming", [True, False], ids=["streaming", "ordinary"])
    def test_a_compile_request_on_a_session_is_refused_and_the_history_stays(self, server, streaming):
        session = server.post("/open_session", capacity_of_str_len=1000, streaming=streaming)
        turn = one_document(30, 100)
        try:
            params = {"id": session}
            first = generate(server, turn[0], session_params=params, rid=f"first-{streaming}")
            if not streaming:
                params = {"id": session, "rid": f"first-{streaming}"}
            with pytest.raises(
                requests.HTTPError, match=r"400.*compile, which does not combine with session"
            ):
                generate(server, *one_document(31, 60), mode="compile", session_params=params)
            with pytest.raises(requests.HTTPError, match="400"):
                generate(server, [9] * 20, [10, 5], session_params=params)
            second = generate(server, [7] * 12, session_params=params)
            history = first["meta_info"]["prompt_tokens"] + first["meta_info"]["completion_tokens"]
            assert second["meta_info"]["prompt_tokens"] >= history + 11
        finally:
            server.post("/close_session", session_id=session)

    @pytest.mark.parametrize(
        ("sampling", "body"),
        [
            ({}, {"return_logprob": True}),
            ({}, {"return_hidden_states": True}),
        ],
        ids=["logprobs", "hidden states"],
    )
    def test_what_a_compile_request_cannot_answer_is_refused(self, server, sampling, body):
        with pytest.raises(requests.HTTPError, match=r"400.*blockreuse_mode is compile"):
            generate(server, *one_document(32, 60), mode="compile", sampling=sampling, **body)
        assert usage(generate(server, *one_document(32, 60), mode="compile"))["compiled_tokens"] == 60

    @pytest.mark.parametrize(
        "sampling",
        [
            {"n": 2, "temperature": 1.0},
            {"stop": ["river"], "min_new_tokens": 3},
            {"json_schema": '{"type": "object"}'},
            {"regex": "[a-z]+"},
            {"max_new_tokens": 0},
        ],
        ids=["n", "stop", "json", "regex", "nothing to answer"],
    )
    def test_a_compile_request_answers_one_token_whatever_is_asked_of_it(self, server, sampling):
        ids, spans = one_document(33, 60)
        answers = generate(server, ids, spans, mode="compile", sampling=sampling)
        answers = answers if isinstance(answers, list) else [answers]
        assert [a["meta_info"]["completion_tokens"] for a in answers] == [1] * len(answers)
        found = usage(generate(server, ids, spans))
        assert found["compiled_tokens"] == 0, "it is in the tree"

    def test_the_ids_that_a_client_wants_back_are_those_it_sent(self, server):
        ids, spans = one_document(34, 60)
        answer = generate(server, ids, spans, mode="compile", return_prompt_token_ids=True)
        assert answer["prompt_token_ids"] == ids


class TestWhoNeedsNoHomes:
    @pytest.mark.parametrize(
        ("params", "reason"),
        [
            ({"blockreuse_budget": 1.0}, "all_repaired"),
            ({"blockreuse_tau": 100}, "all_repaired"),
        ],
        ids=["budget 1", "tau"],
    )
    def test_no_home_is_compiled_for_a_request_that_repairs_everything(self, server, params, reason):
        ids, spans = one_document(40, 120)
        before = counts(server)
        custom = {"blockreuse_spans": spans, **params}
        answer = server.generate(input_ids=ids, sampling_params={**GREEDY, "custom_params": custom})
        assert (usage(answer)["skipped_reason"], new_homes(server, before)) == (reason, 0)

    def test_no_home_is_compiled_for_blocks_whose_log_probabilities_are_wanted(self, server):
        ids, spans = one_document(41, 120)
        before = counts(server)
        found = usage(generate(server, ids, spans, return_logprob=True, logprob_start_len=3))
        assert (found["skipped_reason"], new_homes(server, before)) == ("input_logprobs", 0)

    def test_no_home_is_compiled_for_what_stands_in_the_exact_prefix(self, server):
        ids, spans = one_document(42, 120)
        generate(server, ids)
        before = counts(server)
        found = usage(generate(server, ids, spans))
        assert (found["skipped_reason"], new_homes(server, before)) == ("exact_prefix", 0)
        # three tokens of the block are left behind the exact prefix
        changed = [*ids[: spans[1] - 3], 11, 12, 13, *ids[spans[1] :]]
        found = usage(generate(server, changed, spans))
        assert (found["skipped_reason"], new_homes(server, before)) == ("blocks_too_short", 0)
        # negative control: whoever can use it, brings it
        assert usage(generate(server, *one_document(43, 120)))["compiled_tokens"] == 120
