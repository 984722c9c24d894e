"""A step computes what it was formed for, whatever goes wrong in it, and one request's error is nobody else's."""

from __future__ import annotations

import json
import random
import re

import pytest
from prompts import Library, ask, distance, random_ids, usage
from servers import extended_server, with_test_plugin
from tiny_models import SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
CHUNK = 64
IDS = range(10, VOCAB)
LIBRARY = Library(seed=12, doc_lens=(100, 80, 120, 90), question_len=6, ids=IDS)
ORDER, OTHER = (2, 0, 3, 1), (1, 3, 0)


def start(tmp_path_factory, name, blocks, *flags):
    folder = tmp_path_factory.mktemp(name)
    (folder / "config.json").write_text(json.dumps({"blocks": {"company": 0, **blocks}}))
    model = SUPPORTED["llama llama3"].write(folder / "model")
    ours = ("--dtype", "float32", "--max-total-tokens", "8000", "--max-running-requests", "8")
    ours += ("--skip-tokenizer-init", "--chunked-prefill-size", str(CHUNK), "--enable-mixed-chunk")
    ours += ("--blockreuse-config", str(folder / "config.json"))
    env = {**with_test_plugin(), "BLOCKREUSE_TESTING_FORWARDS": "1"}
    return extended_server(model, *ours, *flags, log=folder / "server.log", env=env)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with start(tmp_path_factory, "budget", {"tau": 1}) as running:
        yield running


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A server whose guard lets nothing pass."""
    with start(tmp_path_factory, "guarded", {"tau": 1, "guard": 0.0001}) as running:
        yield running


def know(server):
    server.flush_cache()
    ids, spans = LIBRARY.prompt((0, 1, 2, 3))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)


def full_prefill(server, ids):
    server.flush_cache()
    return ask(server, ids, blockreuse_mode="off")


def forwards(server) -> list[int]:
    """Tokens of every prefill forward so far."""
    return [int(n) for n in re.findall(r"testing: a prefill forward of (\d+) tokens", server.log_text())]


def request(order, **params):
    ids, spans = LIBRARY.prompt(order)
    custom = {"blockreuse_spans": spans, **params}
    return ids, {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True, "custom_params": custom}


def together(server, *requests):
    return server.generate(
        input_ids=[ids for ids, _ in requests],
        sampling_params=[params for _, params in requests],
        return_logprob=True,
        top_logprobs_num=20,
    )


class TestAnErrorInOneRequest:
    @pytest.fixture(scope="class")
    def answers(self, server):
        """A request whose load fails, one beside it that reuses, and the sizes of their forwards."""
        broken, ids = LIBRARY.prompt(ORDER)[0], LIBRARY.prompt(OTHER)[0]
        full = [full_prefill(server, prompt) for prompt in (broken, ids)]
        know(server)
        fine = together(server, request(ORDER, blockreuse_mode="off"), request(OTHER))[1]
        know(server)
        before = len(forwards(server))
        found = together(server, request(ORDER, testing_break="load"), request(OTHER))
        return full, fine, found, forwards(server)[before:]

    def test_the_request_is_answered_as_by_a_full_prefill(self, answers):
        full, _, found, _ = answers
        assert usage(found[0])["skipped_reason"] == "internal_error"
        assert usage(found[0])["reused_tokens"] == 0
        assert found[0]["output_ids"] == full[0]["output_ids"]
        assert distance(found[0], full[0]) <= FULL_PREFILL_LOGPROB

    def test_the_request_beside_it_reuses_as_if_it_were_alone(self, answers):
        full, fine, found, _ = answers
        assert usage(found[1]) == usage(fine)
        assert usage(found[1])["reused_tokens"] > 100
        assert distance(found[1], fine) <= FULL_PREFILL_LOGPROB
        assert distance(found[1], full[1]) > 10 * FULL_PREFILL_LOGPROB, "reuse is seen to differ"

    def test_no_forward_computes_more_than_a_chunk(self, answers):
        _, _, _, sizes = answers
        assert max(sizes) <= CHUNK
        assert sum(sizes) > 250, "what was to be copied was computed"


def test_many_requests_that_fail_at_once_are_computed_in_chunks(server):
    orders = [(2, 0, 3, 1), (1, 3, 0), (3, 1), (0, 3, 2)]
    full = [full_prefill(server, LIBRARY.prompt(order)[0]) for order in orders]
    know(server)
    before = len(forwards(server))
    found = together(server, *(request(order, testing_break="load") for order in orders))
    for one, wanted in zip(found, full, strict=True):
        assert one["output_ids"] == wanted["output_ids"]
        assert distance(one, wanted) <= FULL_PREFILL_LOGPROB
    assert max(forwards(server)[before:]) <= CHUNK


def test_log_probabilities_of_a_prompt_survive_the_failure(server):
    ids, spans = LIBRARY.prompt(ORDER)
    start = spans[-2] + 5
    server.flush_cache()
    want = ask(server, ids, blockreuse_mode="off", logprob_start_len=start)
    know(server)
    found = ask(server, ids, blockreuse_spans=spans, testing_break="load", logprob_start_len=start)
    assert usage(found)["skipped_reason"] == "internal_error"
    values = [
        [v for v, *_ in answer["meta_info"]["input_token_logprobs"] if v is not None]
        for answer in (found, want)
    ]
    assert len(values[0]) == len(values[1]) == len(ids) - start - 1
    assert max(abs(x - y) for x, y in zip(*values, strict=True)) <= FULL_PREFILL_LOGPROB


def test_a_probe_that_fails_costs_its_requests_their_reuse_and_no_more(server):
    ids, spans = LIBRARY.prompt(ORDER)
    full = full_prefill(server, ids)
    know(server)
    before = len(forwards(server))
    found = ask(server, ids, blockreuse_spans=spans, blockreuse_policy="query", testing_break="probe")
    assert usage(found)["skipped_reason"] == "internal_error"
    assert distance(found, full) <= FULL_PREFILL_LOGPROB
    assert max(forwards(server)[before:]) <= CHUNK
    again = ask(server, ids, blockreuse_spans=spans, blockreuse_policy="query", cache_salt="other")
    assert usage(again)["skipped_reason"] is None, "the server goes on"


def test_a_guard_that_asks_for_everything_stays_within_the_step(guarded):
    ids, spans = LIBRARY.prompt(ORDER)
    full = full_prefill(guarded, ids)
    know(guarded)
    before = len(forwards(guarded))
    found = ask(guarded, ids, blockreuse_spans=spans)
    assert usage(found)["guard"]["verdict"] == "full"
    assert max(forwards(guarded)[before:]) <= CHUNK
    assert distance(found, full) <= FULL_PREFILL_LOGPROB


def test_the_sizes_are_seen(server):
    """Negative control: a prompt that is known to take several chunks shows up as several forwards of a chunk."""
    server.flush_cache()
    before = len(forwards(server))
    ask(server, random_ids(3 * CHUNK, random.Random(1), IDS), new_tokens=1)
    assert forwards(server)[before:] == [CHUNK] * 3
