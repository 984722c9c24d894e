"""Mixed requests on a pool too small for them: nothing crashes, leaks or becomes inexact.

`Load` is a test class but for its fixture `server`, started with FLAGS and ENV, and the number of its requests.
"""

from __future__ import annotations

import concurrent.futures
import random
import re

from mixed import WEIGHTS, MixedTraffic, leaks, num_retracted, state_of, take_references
from prompts import Library
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.config import POLICIES

NUM_CLIENTS = 12
MAX_DOCS = 5  # in a prompt
POOL_TOKENS = 2600
NEW_TOKENS = 12
LIBRARY = Library(seed=3, doc_lens=(100, 130, 80, 150, 120, 90))


FLAGS = (
    "--max-total-tokens",
    str(POOL_TOKENS),
    "--chunked-prefill-size",
    "64",
    "--enable-mixed-chunk",
    "--enable-metrics",
)
# on top of what the small pool forces, every n-th decode step retracts somebody
ENV = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "20"}


class Load:
    num_requests: int
    num_prompts: int
    pool_tokens = POOL_TOKENS

    def test_mixed_requests(self, server):
        rng = random.Random(11)
        orders = [
            rng.sample(range(len(LIBRARY.docs)), rng.randint(2, MAX_DOCS)) for _ in range(self.num_prompts)
        ]
        cases = take_references(server, [LIBRARY.prompt(order) for order in orders], NEW_TOKENS)
        traffic = MixedTraffic(
            server, cases, policies=POLICIES, num_new_tokens=NEW_TOKENS, tie=2 * FULL_PREFILL_LOGPROB
        )
        with concurrent.futures.ThreadPoolExecutor(NUM_CLIENTS) as pool:
            outcomes = list(pool.map(traffic.run, range(self.num_requests)))

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
        assert state_of(server)["pool"]["free"] == self.pool_tokens

    def test_metrics_are_exported(self, server):
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
