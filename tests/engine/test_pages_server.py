"""Pages and routed heads on the real server, whose steps retract somebody again and again, every page checked in
every step: its bounds must be of the keys that the row has now, wherever they came from."""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from looks import counts, decode, error, risen
from mixed import leaks
from plans import NUM_FULL, plan_text
from prompts import Library, ask, distance, random_ids, usage
from servers import lease
from tiny_models import TALKING_LAYERS, talking_model
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.plan_loader import parse_plan

pytestmark = pytest.mark.engine
RNG = random.Random(9)
LONG, OTHER = random_ids(421, RNG), random_ids(300, RNG)
PLAN = plan_text(
    "final_k: 96, pool_size: 160, sink: 4, window: 32",
    "scorer: {kind: page_minmax, page_size: 8, scan_heads: routed, num_routed_heads: 2,",
    "         residual: true, rerank_heads: all}",
)
RETRACTION = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
STALE = "decode_stale_keys_total"


@pytest.fixture(scope="module")
def server():
    with lease(plan=PLAN, env={**RETRACTION, "BLOCKREUSE_TESTING_AUDIT": "1"}) as running:
        yield running


def test_the_evaluator_computes_what_the_server_serves(server):
    """Plain arithmetic and the engine agree on a row's log-probabilities, float32 both; dense decode does not."""
    answer = decode(server, LONG)
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    case = ScoredCase(Llama(talking_model()), "served", LONG + answer["output_ids"], len(got) - 1)
    plan = parse_plan(PLAN, "test.yaml").bind(TALKING_LAYERS, None)
    case.check(plan)
    log_probs, _ = case.log_probs(plan)
    for row, (token, value) in enumerate(zip(answer["output_ids"][1:], got[1:], strict=True)):
        assert abs(float(log_probs[row, token]) - value) <= FULL_PREFILL_LOGPROB
    dense = [float(case.dense[row, token]) for row, token in enumerate(answer["output_ids"][1:])]
    assert max(abs(a - b) for a, b in zip(dense, got[1:], strict=True)) > 100 * FULL_PREFILL_LOGPROB


def test_exact_requests_decode_dense_on_the_same_server(server):
    answer = decode(server, LONG, blockreuse_mode="exact")
    assert error(server, LONG, answer) <= FULL_PREFILL_LOGPROB


class TestPagesFollowTheirKeys:
    def test_through_prefill_decode_radix_hits_and_slots_that_change_hands(self, server):
        before = counts(server)
        first = ask(server, LONG, new_tokens=20)  # more than two pages of decoded keys
        again = ask(server, LONG, new_tokens=20)
        assert again["meta_info"]["cached_tokens"] > 400
        assert distance(first, again) <= FULL_PREFILL_LOGPROB
        ask(server, OTHER, new_tokens=6)
        server.flush_cache()  # the next request gets slots and request slots of the others
        ask(server, OTHER, new_tokens=6)
        assert risen(server, before, "decode_rows_total sparse") > 0
        assert risen(server, before, STALE) == 0

    def test_through_moved_blocks_repair_and_the_next_turn(self, server):
        before = counts(server)
        library = Library(seed=31)
        first, spans = library.prompt((0, 1, 2, 3))
        ask(server, first, new_tokens=2, blockreuse_spans=spans)
        second, spans = library.prompt((3, 1, 0, 2))
        answer = ask(server, second, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1)
        assert usage(answer)["reused_tokens"] > 200
        turn = second + answer["output_ids"] + random_ids(60, random.Random(6))
        found = usage(ask(server, turn, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1))
        assert found["prefix_tokens"] + found["reused_tokens"] > 200
        assert risen(server, before, STALE) == 0

    def test_through_retraction(self, server):
        rng = random.Random(5)
        prompts = [random_ids(rng.randrange(200, 320), rng) for _ in range(6)]
        alone = [decode(server, prompt) for prompt in prompts]
        before = counts(server)
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            together = list(pool.map(lambda prompt: ask(server, prompt, new_tokens=24), prompts))
        times = [found["meta_info"]["num_retractions"] for found in together]
        assert sum(times) > 0, "a row came back, else this test is about nothing"
        assert risen(server, before, STALE) == 0
        assert risen(server, before, "decode_own_scans_total reindex") == 0
        for one, other, retracted in zip(alone, together, times, strict=True):
            assert len(other["output_ids"]) == 24
            if not retracted:
                assert distance(one, {**other, **_first_tokens(other, 12)}) <= FULL_PREFILL_LOGPROB

    def test_a_writer_that_says_nothing_is_detected(self, server):
        """Negative control: other keys in the very slots, positions and request slot of a row before, unannounced."""
        ask(server, LONG, new_tokens=2)
        server.flush_cache()
        before = counts(server)
        ask(server, random_ids(len(LONG), random.Random(8)), new_tokens=3, testing_mute=True)
        assert risen(server, before, STALE) >= NUM_FULL * 40
        server.flush_cache()
        ask(server, OTHER, new_tokens=1)  # whoever comes next announces again


def _first_tokens(answer, num):
    meta = {**answer["meta_info"], "output_top_logprobs": answer["meta_info"]["output_top_logprobs"][:num]}
    return {"output_ids": answer["output_ids"][:num], "meta_info": meta}


def test_memory_is_logged_and_nothing_is_left(server):
    ask(server, OTHER, new_tokens=2)
    assert "blockreuse: index keys take" in server.log.read_text()
    assert "Traceback" not in server.log_text()
    assert leaks(server) == []
