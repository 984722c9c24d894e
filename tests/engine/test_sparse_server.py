"""Layer plans on the real server in float32: what must equal dense decode does, and what differs is seen.

The oracle of a decoded token is the server's own dense prefill: the answer is sent back as a prompt and its
log-probabilities are asked for. One server with a sparse plan serves all tests but those that say otherwise.
"""

from __future__ import annotations

import concurrent.futures
import random

import pytest
import requests
from looks import counts, decode, error, risen, state_of
from plans import ALONE, NUM_REINDEX, NUM_REUSE, PLAN
from prompts import Library, ask, distance, random_ids, usage
from servers import lease
from tiny_models import TALKING_LAYERS, talking_model
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.case import Case
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.plan_loader import parse_plan
from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
RNG = random.Random(3)
LONG, OTHER, THIRD = (random_ids(n, RNG) for n in (420, 300, 350))
SHORT = random_ids(60, RNG)  # stays below final_k
DENSE = "version: 1\nname: dense\nlayers: [{layers: all, role: dense}]\n"


@pytest.fixture(scope="module")
def server():
    with lease(plan=PLAN) as running:
        yield running


class TestExactness:
    def test_exact_requests_decode_dense_on_the_same_server(self, server):
        before = counts(server)
        answer = decode(server, LONG, blockreuse_mode="exact")
        assert risen(server, before, "decode_rows_total exact") == 11
        assert risen(server, before, "decode_rows_total sparse") == 0
        assert error(server, LONG, answer) <= FULL_PREFILL_LOGPROB

    def test_other_requests_decode_sparse_and_are_seen_to_differ(self, server):
        before = counts(server)
        answer = decode(server, LONG)
        assert risen(server, before, "decode_rows_total sparse") == 11
        assert risen(server, before, "decode_own_scans_total reuse") == 0
        assert error(server, LONG, answer) > 100 * FULL_PREFILL_LOGPROB

    def test_rows_that_select_everything_equal_dense(self, server):
        before = counts(server)
        answer = decode(server, SHORT)
        assert risen(server, before, "decode_rows_total short") == 11
        assert error(server, SHORT, answer) <= FULL_PREFILL_LOGPROB

    def test_a_slot_that_an_exact_request_held_is_sparse_again(self, server):
        for _ in range(2):
            exact = decode(server, LONG, blockreuse_mode="exact")
            sparse = decode(server, LONG)
            assert distance(exact, sparse) > 100 * FULL_PREFILL_LOGPROB


def test_rows_of_every_kind_share_a_batch_and_answer_as_alone(server):
    cases = [
        (LONG, {}),
        (OTHER, {}),
        (LONG, {"blockreuse_mode": "exact"}),
        (SHORT, {}),
        (THIRD, {}),
    ]
    alone = [decode(server, ids, **options) for ids, options in cases]
    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        together = list(pool.map(lambda case: ask(server, case[0], new_tokens=12, **case[1]), cases))
    for one, other in zip(alone, together, strict=True):
        assert other["output_ids"] == one["output_ids"]
        assert distance(one, other) <= FULL_PREFILL_LOGPROB


def test_an_aborted_row_leaves_the_others_alone(server):
    alone = decode(server, LONG)
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        doomed = pool.submit(
            server.generate,
            input_ids=OTHER,
            rid="doomed",
            sampling_params={"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
        )
        answer = pool.submit(ask, server, LONG, new_tokens=12)
        requests.post(server.url + "/abort_request", json={"rid": "doomed"}, timeout=30)
        assert distance(answer.result(), alone) <= FULL_PREFILL_LOGPROB
        doomed.result()


def furthest_from(text, answer) -> float:
    """Of a decoded answer behind LONG from what calibration's plain arithmetic makes of it under this plan.

    The first token is sampled from the prefill, every other one from a decode step.
    """
    tokens = answer["output_ids"]
    case = Case(Llama(talking_model()), "served", [*LONG, *tokens], len(tokens) - 1)
    log_probs, _ = case.log_probs(parse_plan(text, "test.yaml").bind(TALKING_LAYERS, None))
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]][1:]
    expected = [float(log_probs[row, token]) for row, token in enumerate(tokens[1:])]
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


def test_the_evaluator_computes_what_the_server_serves(server):
    """Calibration's plain arithmetic and the engine agree on a sparse row's log-probabilities, float32 both."""
    answer = decode(server, LONG)
    assert furthest_from(PLAN, answer) <= FULL_PREFILL_LOGPROB
    assert furthest_from(DENSE, answer) > 100 * FULL_PREFILL_LOGPROB
    assert furthest_from(ALONE, answer) > 100 * FULL_PREFILL_LOGPROB


class TestStaleState:
    @pytest.mark.parametrize(
        "field", ["row", "version", "length", "kv", "keys", "digest", "positions", "slots", "counts"]
    )
    def test_a_spoilt_field_costs_the_row_a_scan_and_nobody_an_answer(self, server, field):
        alone = decode(server, OTHER)
        before = counts(server)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            spoilt = pool.submit(ask, server, LONG, new_tokens=12, testing_stale=field)
            other = pool.submit(ask, server, OTHER, new_tokens=12)
        server.flush_cache()
        # every consumer of every step
        assert risen(server, before, "decode_own_scans_total reindex") == NUM_REINDEX * 11
        assert risen(server, before, "decode_own_scans_total reuse") == NUM_REUSE * 11
        assert distance(other.result(), alone) <= FULL_PREFILL_LOGPROB
        assert furthest_from(ALONE, spoilt.result()) <= FULL_PREFILL_LOGPROB, "every layer chose for itself"

    def test_what_the_checks_cannot_see_would_harm_the_answer(self, server):
        """Negative control: the same damage, stamped as good."""
        good = error(server, LONG, decode(server, LONG))
        before = counts(server)
        spoilt = decode(server, LONG, testing_stale="unseen")
        assert risen(server, before, "decode_own_scans_total reuse") == 0
        assert error(server, LONG, spoilt) > 2 * good
        assert furthest_from(ALONE, spoilt) > 100 * FULL_PREFILL_LOGPROB


def test_the_plan_full_is_bit_equal_to_no_plan():
    answers = []
    for plan in ("", "full"):
        with lease("--enable-mixed-chunk", plan=plan) as running:
            answers.append([ask(running, ids, new_tokens=12) for ids in (LONG, SHORT)])
    for without, with_full in zip(*answers, strict=True):
        assert with_full["output_ids"] == without["output_ids"]
        assert distance(with_full, without) == 0.0


def test_a_sparse_plan_needs_the_radix_cache_that_keeps_its_kv_apart():
    with (
        pytest.raises(ServerFailed, match="radix-cache-backend"),
        lease("--radix-cache-backend", "radix", plan=PLAN),
    ):
        pass


class TestBothFeatures:
    """Document blocks and a layer plan in one request."""

    def test_a_marked_request_decodes_under_the_plan(self, server):
        library = Library(seed=21)
        ids, spans = library.prompt((0, 1, 2, 3))
        ask(server, ids, new_tokens=1, blockreuse_spans=spans)
        before = counts(server)
        other, spans = library.prompt((2, 0, 3, 1))
        found = usage(ask(server, other, new_tokens=8, blockreuse_spans=spans, blockreuse_budget=0.1))
        assert found["reused_tokens"] > 250
        assert risen(server, before, "decode_rows_total sparse") == 7, "one step for each token but the first"
        assert risen(server, before, "tokens_total reused") == found["reused_tokens"]

    def test_what_sparse_decode_wrote_is_found_by_the_next_turn_and_by_no_exact_request(self, server):
        answer = ask(server, LONG, new_tokens=40)
        turn = LONG + answer["output_ids"] + SHORT
        exact = usage(ask(server, turn, new_tokens=1, blockreuse_mode="exact", cache_salt="none"))
        assert exact["prefix_tokens"] == 0
        found = usage(ask(server, turn, new_tokens=1))
        assert found["prefix_tokens"] == len(LONG), "the prompt, which dense prefill wrote"
        assert found["reused_tokens"] == 39, "the answer but for its last token, which was never decoded"
        exact = usage(ask(server, turn, new_tokens=1, blockreuse_mode="exact"))
        assert exact["prefix_tokens"] == len(LONG), "and nothing of the answer"

    def test_the_pool_is_whole_afterwards(self, server):
        ask(server, LONG, new_tokens=8)
        pool = state_of(server)["pool"]
        assert pool["free"] + pool["evictable"] == pool["size"]
        assert pool["protected"] == 0
