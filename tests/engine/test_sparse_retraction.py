"""Retraction under a layer plan, on a server whose steps retract somebody again and again.

A row that comes back has another slot, another row id and a prefill in between: what it shared before must not be
taken for its own. Exact rows of the same batches are compared with the server's dense prefill of their answers.
"""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from looks import error
from mixed import leaks
from plans import PLAN
from prompts import ask, distance, random_ids
from servers import lease
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
NUM_NEW_TOKENS = 24
NUM_ROWS = 6


@pytest.fixture(scope="module")
def server():
    env = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
    with lease(plan=PLAN, env=env) as running:
        yield running


def test_rows_that_come_back_share_with_nobody_s_past(server):
    rng = random.Random(5)
    prompts = [random_ids(rng.randrange(200, 320), rng) for _ in range(NUM_ROWS)]
    modes = [{"blockreuse_mode": "exact"} if i % 2 else {} for i in range(NUM_ROWS)]

    def answer(prompt, mode):
        return ask(server, prompt, new_tokens=NUM_NEW_TOKENS, **mode)

    # one row alone is never retracted
    alone = [answer(prompt, mode) for prompt, mode in zip(prompts, modes, strict=True)]
    server.flush_cache()
    with concurrent.futures.ThreadPoolExecutor(NUM_ROWS) as pool:
        together = list(pool.map(answer, prompts, modes))
    counts = server.new_counts()
    server.flush_cache()

    times = [found["meta_info"]["num_retractions"] for found in together]
    assert sum(times[::2]) > 0, "a sparse row came back, else this test is about nothing"
    for prompt, mode, found in zip(prompts, modes, together, strict=True):
        assert len(found["output_ids"]) == NUM_NEW_TOKENS
        if mode:
            assert error(server, prompt, found) <= FULL_PREFILL_LOGPROB
    for one, other, retracted in zip(alone, together, times, strict=True):
        if not retracted:
            assert distance(one, other) <= FULL_PREFILL_LOGPROB
    # full layers write before consumers read, in the first step after a return as in any other
    assert counts["decode_rows_total sparse"] > 0
    assert not any(name.startswith("decode_own_scans_total") for name in counts)
    assert "Traceback" not in server.new_log_text()
    assert leaks(server) == []
