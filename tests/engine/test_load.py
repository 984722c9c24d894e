"""Three hundred mixed requests on a pool too small for them: nothing crashes, leaks or becomes inexact."""

from __future__ import annotations

import concurrent.futures
import random
import re

import pytest
from mixed import WEIGHTS, MixedTraffic, leaks, num_retracted, state_of, take_references
from prompts import Library
from servers import spawned_server
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.config import POLICIES

pytestmark = pytest.mark.engine
NUM_REQUESTS = 300
NUM_CLIENTS = 12
NUM_PROMPTS = 15
MAX_DOCS = 5  # in a prompt
POOL_TOKENS = 2600
NEW_TOKENS = 12
LIBRARY = Library(seed=3, doc_lens=(100, 130, 80, 150, 120, 90))


@pytest.fixture(scope="module")
def server(model_path, tmp_path_factory):
    flags = ("--dtype", "float32", "--max-total-tokens", str(POOL_TOKENS), "--max-running-requests", "8")
    flags += ("--chunked-prefill-size", "64", "--enable-mixed-chunk", "--enable-metrics")
    # on top of what the small pool forces, every n-th decode step retracts somebody
    # (read while SGLang is imported, so the server imports it for itself)
    env = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
    with spawned_server(
        model_path, *flags, log=tmp_path_factory.mktemp("load") / "server.log", env=env
    ) as running:
        yield running


def test_three_hundred_mixed_requests(server):
    rng = random.Random(11)
    orders = [rng.sample(range(len(LIBRARY.docs)), rng.randint(2, MAX_DOCS)) for _ in range(NUM_PROMPTS)]
    cases = take_references(server, [LIBRARY.prompt(order) for order in orders], NEW_TOKENS)
    traffic = MixedTraffic(
        server, cases, policies=POLICIES, num_new_tokens=NEW_TOKENS, tie=2 * FULL_PREFILL_LOGPROB
    )
    with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
        outcomes = list(pool.map(traffic.run, range(NUM_REQUESTS)))

    assert {outcome.kind for outcome in outcomes} == set(WEIGHTS)
    assert [outcome.problem for outcome in outcomes if outcome.problem] == []
    counts = state_of(server)["counts"]
    assert counts["tokens_total reused"] > 0
    assert "errors_total" not in counts
    # a request that waits for room is looked up at every step, and counted once
    num_requests, num_blocks = (
        sum(value for name, value in counts.items() if name.startswith(series))
        for series in ("requests_total", "blocks_total")
    )
    assert 0 < num_blocks <= MAX_DOCS * num_requests
    # the pressure that this test is about was there
    assert num_retracted(server) > 0
    assert "Traceback" not in server.log_text()
    assert leaks(server) == []
    assert state_of(server)["pool"]["free"] == POOL_TOKENS


def test_metrics_are_exported(server):
    """Runs after the load: the counters stand beside SGLang's own."""
    text = server.get("/metrics")
    lines = {
        line.split("{")[0]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith("sglang:blockreuse_")
    }
    assert lines["sglang:blockreuse_homes_total"] > 0
    assert lines["sglang:blockreuse_copied_tokens_total"] > 0
    assert re.search(r'sglang:blockreuse_tokens_total\{.*kind="reused"', text)
    assert re.search(r'sglang:blockreuse_requests_total\{.*outcome="mode_exact"', text)
