"""Layer plans on the real server in float32: what must equal dense decode does, and what differs is seen.

The oracle of a decoded token is the server's own dense prefill: the answer is sent back as a prompt and its
log-probabilities are asked for. One server with a sparse plan serves all tests but those that say otherwise.
"""

from __future__ import annotations

import concurrent.futures
import os
import random

import pytest
import requests
from places import PLUGIN
from prompts import Library, ask, distance, random_ids, usage
from servers import extended_server
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.case import Case
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.plan_loader import parse_plan
from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--max-total-tokens", "8000", "--max-running-requests", "6")
RNG = random.Random(3)
LONG, OTHER, THIRD = (random_ids(n, RNG) for n in (420, 300, 350))
SHORT = random_ids(60, RNG)  # stays below final_k
PLAN = """
version: 1
name: test
model: {num_layers: 30}
selection: {final_k: 96, pool_size: 160, sink: 4, window: 32}
layers:
  - {layers: 0, role: dense}
  - {layers: 1, role: full}
  - {layers: 2-8, role: reindex, anchor: 1}
  - {layers: 9-12, role: reuse, anchor: 8}
  - {layers: 13, role: full}
  - {layers: 14-29, role: reuse, anchor: 13}
"""


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sparse")
    plan = folder / "test.yaml"
    plan.write_text(PLAN)
    path = os.pathsep.join(filter(None, (str(PLUGIN), os.environ.get("PYTHONPATH"))))
    flags = (*FLAGS, "--layer-plan", str(plan))
    with extended_server(model_path, *flags, log=folder / "server.log", env={"PYTHONPATH": path}) as running:
        yield running


@pytest.fixture(autouse=True)
def empty_tree(request):
    if "server" in request.fixturenames:
        request.getfixturevalue("server").flush_cache()


def decode(server, ids, **options):
    """A greedy answer whose decode steps start from a dense prefill; leaves the tree empty."""
    answer = ask(server, ids, new_tokens=12, **options)
    server.flush_cache()
    return answer


def error(server, ids, answer) -> float:
    """Largest difference of the answer's log-probabilities to those of a dense prefill of the same text."""
    tokens = answer["output_ids"]
    oracle = ask(server, ids + tokens, new_tokens=1, logprob_start_len=len(ids) - 1)
    server.flush_cache()
    want = [value for value, *_ in oracle["meta_info"]["input_token_logprobs"] if value is not None]
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    assert len(want) == len(got) == len(tokens)
    return max(abs(a - b) for a, b in zip(got, want, strict=True))


def counts(server) -> dict[str, float]:
    return server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]


def risen(server, before, name) -> float:
    return counts(server).get(name, 0) - before.get(name, 0)


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


def test_the_evaluator_computes_what_the_server_serves(server, model_path):
    """Calibration's plain arithmetic and the engine agree on a sparse row's log-probabilities, float32 both."""
    plan = parse_plan(PLAN, "test.yaml").bind(30, None)
    answer = decode(server, LONG)
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    # the first token is sampled from the prefill, every other one from a decode step
    case = Case(Llama(model_path), "served", LONG + answer["output_ids"], len(got) - 1)
    log_probs, _ = case.log_probs(plan)
    for row, (token, value) in enumerate(zip(answer["output_ids"][1:], got[1:], strict=True)):
        assert abs(float(log_probs[row, token]) - value) <= FULL_PREFILL_LOGPROB
    dense = [float(case.dense[row, token]) for row, token in enumerate(answer["output_ids"][1:])]
    assert max(abs(a - b) for a, b in zip(dense, got[1:], strict=True)) > 100 * FULL_PREFILL_LOGPROB


class TestStaleState:
    @pytest.mark.parametrize(
        "field", ["row", "version", "length", "kv", "keys", "digest", "positions", "slots", "counts"]
    )
    def test_a_spoilt_field_costs_the_row_a_scan_and_nobody_an_answer(self, server, field):
        alone = decode(server, OTHER)
        good = error(server, LONG, decode(server, LONG))
        before = counts(server)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            spoilt = pool.submit(ask, server, LONG, new_tokens=12, testing_stale=field)
            other = pool.submit(ask, server, OTHER, new_tokens=12)
        server.flush_cache()
        # every consumer of every step: 7 reindex layers and 4 + 16 reuse layers
        assert risen(server, before, "decode_own_scans_total reindex") == 7 * 11
        assert risen(server, before, "decode_own_scans_total reuse") == 20 * 11
        assert distance(other.result(), alone) <= FULL_PREFILL_LOGPROB
        assert error(server, LONG, spoilt.result()) <= good, "own scans are at least as good as shared ones"

    def test_what_the_checks_cannot_see_would_harm_the_answer(self, server):
        """Negative control: the same damage, stamped as good."""
        good = error(server, LONG, decode(server, LONG))
        before = counts(server)
        spoilt = decode(server, LONG, testing_stale="unseen")
        assert risen(server, before, "decode_own_scans_total reuse") == 0
        assert error(server, LONG, spoilt) > 2 * good


def test_the_plan_full_is_bit_equal_to_no_plan(model_path, tmp_path):
    answers = []
    for flags in ((), ("--layer-plan", "full")):
        log = tmp_path / f"{len(flags)}.log"
        with extended_server(model_path, *FLAGS, *flags, log=log) as running:
            answers.append([ask(running, ids, new_tokens=12) for ids in (LONG, SHORT)])
    for without, with_full in zip(*answers, strict=True):
        assert with_full["output_ids"] == without["output_ids"]
        assert distance(with_full, without) == 0.0


def test_a_sparse_plan_needs_the_radix_cache_that_keeps_its_kv_apart(model_path, tmp_path):
    plan = tmp_path / "test.yaml"
    plan.write_text(PLAN)
    flags = ("--layer-plan", str(plan), "--radix-cache-backend", "radix")
    with (
        pytest.raises(ServerFailed, match="radix-cache-backend"),
        extended_server(model_path, *FLAGS, *flags, log=tmp_path / "server.log"),
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
        pool = server.get("/server_info")["internal_states"][0]["blockreuse"]["pool"]
        assert pool["free"] + pool["evictable"] == pool["size"]
        assert pool["protected"] == 0
