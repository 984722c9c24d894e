"""Two ranks on the CPU over gloo: they plan alike, and together they answer as one rank does.

SGLang's own rank consensus checker runs in the server under test and ends it as soon as two ranks decide
differently; the test plug-in puts every plan of ours before it, too.
"""

from __future__ import annotations

import concurrent.futures
import time

import pytest
import requests
from nursery import Nursery
from prompts import Library, ask, distance, know, usage
from servers import with_test_plugin
from tiny_models import SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.config import POLICIES

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=4, doc_lens=(100, 80, 120, 90), ids=range(10, VOCAB))
ORDERS = ((2, 0, 3, 1), (1, 3), (3, 2, 0), (0, 1, 2, 3))
CHECKER_DELAY_S = 60.0  # the checker compares in a thread of its own
ENV = {
    **with_test_plugin(),
    # read while SGLang is imported
    "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
    # nothing may need a compiler at run time
    "CXX": "/no/such/compiler",
}
FLAGS = ("--dtype", "float32", "--max-total-tokens", "6000", "--max-running-requests", "4")
FLAGS += ("--skip-tokenizer-init", "--chunked-prefill-size", "128")


@pytest.fixture(scope="module")
def checked_nursery():
    with Nursery(ENV) as running:
        yield running


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return SUPPORTED["llama llama3"].write(tmp_path_factory.mktemp("tensor-parallel") / "model")


@pytest.fixture(scope="module")
def one_rank(checked_nursery, model):
    with checked_nursery.server(model, *FLAGS, log=model.parent / "one.log", env=ENV) as server:
        yield [answers(server, order) for order in ORDERS]


@pytest.fixture(scope="module")
def server(checked_nursery, model):
    with checked_nursery.server(
        model, *FLAGS, "--tp-size", "2", log=model.parent / "two.log", env=ENV
    ) as running:
        yield running


def answers(server, order):
    """(full prefill, reuse with repair) of one prompt, each on a tree that holds what it needs and no more."""
    ids, spans = LIBRARY.prompt(order)
    server.flush_cache()
    full = ask(server, ids, blockreuse_mode="off")
    server.flush_cache()
    know(server, LIBRARY)
    return full, ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2)


@pytest.mark.parametrize("case", range(len(ORDERS)), ids=str)
def test_two_ranks_answer_as_one(server, one_rank, case):
    for two, one in zip(answers(server, ORDERS[case]), one_rank[case], strict=True):
        assert usage(two) == usage(one)
        assert two["output_ids"] == one["output_ids"]
        assert distance(two, one) <= FULL_PREFILL_LOGPROB


def test_reuse_happened_and_is_seen_to_differ_from_a_full_prefill(one_rank):
    """Negative control: the comparison above is not one of two full prefills."""
    full, reused = one_rank[0]
    assert usage(reused)["reused_tokens"] > 200
    assert distance(full, reused) > 10 * FULL_PREFILL_LOGPROB


@pytest.mark.parametrize("policy", POLICIES)
def test_ranks_agree_on_many_requests_at_once(server, policy):
    """Also where a policy measures something: each rank sees its own heads only."""
    server.flush_cache()
    cases = [LIBRARY.prompt(order) for order in ORDERS]

    def run(case):
        return ask(server, case[0], new_tokens=4, blockreuse_spans=case[1], blockreuse_policy=policy)

    with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
        found = [usage(answer) for answer in pool.map(run, cases)]
    assert sum(u["reused_tokens"] > 0 for u in found) >= len(ORDERS) - 1
    assert any(u["policy"] == policy for u in found)
    server.flush_cache()  # nothing is locked, on any rank
    assert "Rank consensus checker is enabled" in server.log_text()


def test_a_load_that_fails_on_one_rank_unfolds_its_request_on_both(server, one_rank):
    """Ranks meet in every layer: were one of them to go on folded, neither would ever come out of the forward."""
    full, reused = one_rank[0]
    ids, spans = LIBRARY.prompt(ORDERS[0])
    server.flush_cache()
    know(server, LIBRARY)
    for rank in (1, 0):
        found = ask(
            server,
            ids,
            blockreuse_spans=spans,
            blockreuse_tau=2,
            testing_break=f"load on rank {rank}",
            cache_salt=f"rank {rank}",
        )
        assert usage(found)["skipped_reason"] == "internal_error"
        assert found["output_ids"] == full["output_ids"]
        assert distance(found, full) <= FULL_PREFILL_LOGPROB
    again = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2)
    assert usage(again) == usage(reused), "nothing is left of it"
    server.flush_cache()


def test_a_rank_that_plans_otherwise_is_detected(server):
    """Negative control, last because it ends the server."""
    know(server, LIBRARY)
    ids, spans = LIBRARY.prompt((3, 1, 0))
    with pytest.raises(requests.RequestException):
        _ask_until_it_dies(server, ids, blockreuse_spans=spans, blockreuse_tau=0, testing_rank_drift=True)
    assert "blockreuse plan" in server.log_text()


def _ask_until_it_dies(server, ids, **params):
    """Raises RequestException as soon as the server stops to answer."""
    deadline = time.monotonic() + CHECKER_DELAY_S
    ask(server, ids, new_tokens=1, **params)
    while time.monotonic() < deadline:
        server.get("/health")
        time.sleep(0.5)
