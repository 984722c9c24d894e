"""Lists of a threshold per KV head on int4 keys, with a tail, on the real server, whose steps retract somebody again
and again, every mean and every copy checked in every step."""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from mixed import leaks
from prompts import Library, ask, distance, random_ids, usage
from servers import spawned_server, with_test_plugin
from tiny_models import TALKING_LAYERS, VOCAB, talking_model
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.plan_loader import parse_plan

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--max-total-tokens", "6000", "--max-running-requests", "6")
RETRACTION = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
RNG = random.Random(9)
IDS = range(10, VOCAB)
LONG, OTHER = random_ids(421, RNG, IDS), random_ids(300, RNG, IDS)
PLAN = """
version: 1
name: test
selection: {final_k: 160, pool_size: 200, share: 0.002, sink: 4, window: 32, tail: block_mean}
scorer: {kind: int4_keys, heads: kv_head, lend_heads: layer}
layers:
  - {layers: 0, role: dense}
  - {layers: 1, role: full}
  - {layers: 2, role: reindex, anchor: 1}
  - {layers: 3, role: reuse, anchor: 2, tail: none}
  - {layers: 4-5, role: full}
"""
STALE = "decode_stale_keys_total"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("selection")
    (folder / "test.yaml").write_text(PLAN)
    env = with_test_plugin() | RETRACTION | {"BLOCKREUSE_TESTING_AUDIT": "1"}
    flags = (*FLAGS, "--layer-plan", str(folder / "test.yaml"))
    with spawned_server(talking_model(), *flags, log=folder / "server.log", env=env) as running:
        yield running


def counts(server):
    return server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]


def risen(server, before, name):
    return counts(server).get(name, 0) - before.get(name, 0)


def test_the_evaluator_computes_what_the_server_serves(server):
    """Plain arithmetic and the engine agree on a row's log-probabilities, float32 both; other plans do not."""
    before = counts(server)
    answer = ask(server, LONG, new_tokens=12)
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    case = ScoredCase(Llama(talking_model()), "served", LONG + answer["output_ids"], len(got) - 1)

    def error(plan):
        bound = parse_plan(plan, "test.yaml").bind(TALKING_LAYERS, None)
        case.check(bound)
        log_probs, _ = case.log_probs(bound)
        tokens = enumerate(zip(answer["output_ids"][1:], got[1:], strict=True))
        return max(abs(float(log_probs[row, token]) - value) for row, (token, value) in tokens)

    assert error(PLAN) <= FULL_PREFILL_LOGPROB
    listed = float(case._listed_L[1:].sum())
    # negative controls: a tau of another plan, and no tail
    assert error(PLAN.replace("0.002", "0.004")) > 10 * FULL_PREFILL_LOGPROB
    assert error(PLAN.replace("tail: block_mean}", "tail: none}")) > 10 * FULL_PREFILL_LOGPROB
    read = risen(server, before, "decode_tokens_total attended")
    assert abs(read / 11 - listed) <= 5, "what was counted is what was listed"


class TestMeansFollowTheirBlocks:
    def test_through_prefill_decode_radix_hits_and_slots_that_change_hands(self, server):
        before = counts(server)
        first = ask(server, LONG, new_tokens=80)  # more than a block of decoded tokens
        again = ask(server, LONG, new_tokens=80)
        assert again["meta_info"]["cached_tokens"] > 400
        assert distance(first, again) <= FULL_PREFILL_LOGPROB
        server.flush_cache()  # the next request gets slots and request slots of the others
        ask(server, OTHER, new_tokens=6)
        assert risen(server, before, "decode_rows_total sparse") > 0
        assert risen(server, before, STALE) == 0

    def test_through_moved_blocks_and_the_next_turn(self, server):
        before = counts(server)
        library = Library(seed=31, ids=IDS)
        first, spans = library.prompt((0, 1, 2, 3))
        ask(server, first, new_tokens=2, blockreuse_spans=spans)
        second, spans = library.prompt((3, 1, 0, 2))
        answer = ask(server, second, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1)
        assert usage(answer)["reused_tokens"] > 200
        turn = second + answer["output_ids"] + random_ids(60, random.Random(6), IDS)
        found = usage(ask(server, turn, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1))
        assert found["prefix_tokens"] + found["reused_tokens"] > 200
        assert risen(server, before, STALE) == 0

    def test_through_retraction(self, server):
        rng = random.Random(5)
        prompts = [random_ids(rng.randrange(200, 320), rng, IDS) for _ in range(6)]
        alone = [ask(server, prompt, new_tokens=24) for prompt in prompts]
        server.flush_cache()
        before = counts(server)
        modes = [{"blockreuse_mode": "exact"} if i == 2 else {} for i in range(6)]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            words = zip(prompts, modes, strict=True)
            together = list(pool.map(lambda one: ask(server, one[0], new_tokens=24, **one[1]), words))
        times = [found["meta_info"]["num_retractions"] for found in together]
        assert sum(times) > 0, "a row came back, else this test is about nothing"
        assert risen(server, before, STALE) == 0
        assert risen(server, before, "decode_own_scans_total reindex") == 0
        for i, (one, other, retracted) in enumerate(zip(alone, together, times, strict=True)):
            if not retracted and i != 2:
                assert distance(one, other) <= FULL_PREFILL_LOGPROB

    def test_a_writer_that_says_nothing_is_detected(self, server):
        """Negative control: other KV in the very slots, positions and request slot of a row before, unannounced."""
        ask(server, LONG, new_tokens=2)
        server.flush_cache()
        before = counts(server)
        ask(server, random_ids(len(LONG), random.Random(8), IDS), new_tokens=3, testing_mute=True)
        # 4 copies of keys, and 4 layers with means of 6 blocks
        assert risen(server, before, STALE) >= 4 * 400 + 4 * 6
        server.flush_cache()
        ask(server, OTHER, new_tokens=1)  # whoever comes next announces again


def test_memory_is_logged_and_nothing_is_left(server):
    ask(server, OTHER, new_tokens=2)
    assert "blockreuse: block means take" in server.log.read_text()
    assert "Traceback" not in server.log_text()
    assert leaks(server) == []
