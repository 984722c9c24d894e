"""Layers that read another layer's KV (`kv_from`) on the real server in float32.

Two independent twins say what is right: the Hugging Face model with the same sharing, for prefill and for dense
decode, and calibration's plain arithmetic, for sparse decode. One server serves all laws; its decode steps retract
somebody again and again, and its prefill steps carry decode rows along.
"""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from looks import state_of
from mixed import leaks
from prompts import Library, ask, distance, know, random_ids, usage
from servers import COMMON, lease
from sharing_twin import SharingTwin
from tiny_models import TALKING_LAYERS, talking_model
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.case import Case
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.plan_loader import parse_plan
from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
# Two sources; shared keys are scored, ranked and reused.
PLAN = f"""
version: 1
name: shared
model: {{num_layers: {TALKING_LAYERS}}}
selection: {{final_k: 96, pool_size: 160, sink: 4, window: 32}}
layers:
  - {{layers: 0-1, role: dense}}
  - {{layers: 2, role: full, kv_from: 1}}
  - {{layers: 3, role: reindex, anchor: 2, kv_from: 1}}
  - {{layers: 4, role: full}}
  - {{layers: 5, role: reuse, anchor: 4, kv_from: 4}}
"""
KV_LAYERS = [0, 1, 1, 1, 4, 4]
NUM_OWN = 3
POOL_TOKENS = int(COMMON[COMMON.index("--max-total-tokens") + 1])
RNG = random.Random(8)
LONG, SHORT = random_ids(600, RNG), random_ids(70, RNG)  # SHORT and its answer stay below final_k
LIBRARY = Library(seed=9)
HOME_ORDER, OTHER = (0, 1, 2, 3), (2, 0, 3, 1)


@pytest.fixture(scope="module")
def server():
    env = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "9"}
    with lease("--enable-mixed-chunk", plan=PLAN, env=env) as running:
        yield running


@pytest.fixture(scope="module")
def twin():
    return SharingTwin(talking_model(), KV_LAYERS)


def input_logprobs(answer) -> list[float]:
    return [value for value, *_ in answer["meta_info"]["input_token_logprobs"] if value is not None]


def output_logprobs(answer) -> list[float]:
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


def furthest(got, expected) -> float:
    assert len(got) == len(expected) > 0
    return max(abs(a - b) for a, b in zip(got, expected, strict=True))


class TestMemory:
    def test_the_pool_is_smaller_by_the_layers_that_keep_nothing(self, server):
        """The host's own report and ours; 2 KV heads of 32 channels in float32, and one slot for padding."""
        layer_bytes = 2 * (POOL_TOKENS + 1) * 2 * 32 * 4
        assert state_of(server)["kv"] == {"bytes": NUM_OWN * layer_bytes, "layers": NUM_OWN}
        gibibytes = server.get("/server_info")["internal_states"][0]["memory_usage"]["kvcache"]
        assert gibibytes == pytest.approx(NUM_OWN * layer_bytes / 2**30, abs=1e-3)
        assert f"{NUM_OWN} of {TALKING_LAYERS} layers keep KV of their own" in server.log_text()

    def test_what_the_plan_promises_is_said_at_start_up(self, server):
        (line,) = [line for line in server.log_text().splitlines() if "blockreuse: kv_from: layers" in line]
        assert "exact only for a checkpoint trained for it" in line


class TestAgainstTheTwin:
    def test_prefill(self, server, twin):
        """In chunks, behind a prefix and whole: every token of the prompt."""
        expected = twin.log_probs(LONG)
        found = input_logprobs(ask(server, LONG, new_tokens=1, logprob_start_len=0))
        assert furthest(found, expected) <= FULL_PREFILL_LOGPROB
        behind = ask(server, LONG, new_tokens=1, logprob_start_len=300)
        assert behind["meta_info"]["cached_tokens"] > 0
        assert furthest(input_logprobs(behind), expected[300:]) <= FULL_PREFILL_LOGPROB

    def test_virtual_rows(self, server, twin):
        rows = [0, 40, 40, 41, 41, 300, 300, len(LONG)]
        found = ask(server, LONG, new_tokens=1, logprob_start_len=0, testing_rows=rows)
        assert furthest(input_logprobs(found), twin.log_probs(LONG)) <= FULL_PREFILL_LOGPROB

    def test_dense_decode(self, server, twin):
        answer = ask(server, SHORT, new_tokens=20)
        expected = twin.log_probs(SHORT + answer["output_ids"])[len(SHORT) - 1 :]
        assert furthest(output_logprobs(answer), expected) <= FULL_PREFILL_LOGPROB

    def test_dense_decode_in_mixed_steps_and_after_retraction(self, server, twin):
        """Rows decode while others' prompts are computed; who is retracted computes its KV anew."""
        rng = random.Random(4)
        prompts = [random_ids(rng.randrange(30, 70), rng) for _ in range(6)]
        with concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda ids: ask(server, ids, new_tokens=24), prompts))
        assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
        for ids, answer in zip(prompts, answers, strict=True):
            expected = twin.log_probs(ids + answer["output_ids"])[len(ids) - 1 :]
            assert furthest(output_logprobs(answer), expected) <= FULL_PREFILL_LOGPROB

    @pytest.mark.parametrize("wrong", [0, None], ids=["another source", "no sharing"])
    def test_another_source_is_seen_to_differ(self, server, wrong):
        """Negative control of the twin."""
        layers = [at if wrong is None else wrong if source == 1 and at > 1 else source
                  for at, source in enumerate(KV_LAYERS)]  # fmt: skip
        found = input_logprobs(ask(server, LONG, new_tokens=1, logprob_start_len=0))
        twin = SharingTwin(talking_model(), layers)
        assert furthest(found, twin.log_probs(LONG)) > 100 * FULL_PREFILL_LOGPROB


def test_sparse_decode_computes_what_the_evaluator_does(server):
    plan = parse_plan(PLAN, "plan.yaml").bind(TALKING_LAYERS, None)
    answer = ask(server, LONG, new_tokens=12)
    assert server.new_counts()["decode_rows_total sparse"] > 0
    got, tokens = output_logprobs(answer), answer["output_ids"]
    case = Case(Llama(talking_model()), "served", LONG + tokens, len(got) - 1)

    def of(log_probs):
        return [float(log_probs[row, token]) for row, token in enumerate(tokens[1:])]

    assert furthest(got[1:], of(case.log_probs(plan)[0])) <= FULL_PREFILL_LOGPROB
    assert furthest(got[1:], of(case.log_probs(plan.all_dense())[0])) > 100 * FULL_PREFILL_LOGPROB
    assert furthest(got[1:], of(case.dense)) > 100 * FULL_PREFILL_LOGPROB


class TestBlocks:
    def full(self, server, ids):
        answer = ask(server, ids, blockreuse_mode="off")
        server.flush_cache()
        return answer

    def test_repairing_everything_equals_full_prefill(self, server):
        ids, spans = LIBRARY.prompt(OTHER)
        full = self.full(server, ids)
        know(server, LIBRARY, HOME_ORDER)
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_budget=1.0)
        assert usage(answer)["skipped_reason"] == "all_repaired"
        assert distance(answer, full) <= FULL_PREFILL_LOGPROB

    def test_moving_without_repair_is_seen_to_differ(self, server):
        ids, spans = LIBRARY.prompt(OTHER)
        full = self.full(server, ids)
        know(server, LIBRARY, HOME_ORDER)
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
        assert usage(answer)["reused_tokens"] > 250
        assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB

    def test_rows_in_their_place_behind_their_context_equal_full_prefill(self, server):
        library = Library(seed=2, system_len=128, doc_lens=(128,))
        ids, spans = library.prompt((0,))
        full = self.full(server, ids)
        copied = ask(
            server,
            ids,
            testing_max_prefix=spans[0],
            testing_all_homes=True,
            blockreuse_spans=spans,
            blockreuse_tau=0,
        )
        assert usage(copied)["reused_tokens"] == 128
        assert distance(copied, full) <= FULL_PREFILL_LOGPROB

    @pytest.mark.parametrize("policy", ["deviation", "query"])
    def test_policies_that_measure_work_on_shared_keys(self, server, policy):
        ids, spans = LIBRARY.prompt(OTHER)
        know(server, LIBRARY, HOME_ORDER)
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_policy=policy, blockreuse_budget=0.2)
        assert usage(answer)["repaired_tokens"] > 0
        assert usage(answer)["policy"] == policy
        assert "errors_total" not in server.new_counts()


class TestRequests:
    def test_exact_requests_are_refused_and_the_server_goes_on(self, server):
        with pytest.raises(Exception, match=r"HTTP 400.*blockreuse_mode is exact.*kv_from") as refused:
            ask(server, SHORT, blockreuse_mode="exact")
        assert "ask a server without the plan" in str(refused.value)
        assert len(ask(server, SHORT)["output_ids"]) == 4

    def test_a_later_turn_finds_what_the_plan_computed(self, server):
        answer = ask(server, SHORT, new_tokens=20)
        turn = SHORT + answer["output_ids"] + LONG[:30]
        # rows of a short history decode like a prefill; the answer is behind the exact prefix all the same
        found = usage(ask(server, turn, new_tokens=1))
        assert found["prefix_tokens"] + found["reused_tokens"] == len(SHORT) + 19

    def test_the_plan_s_namespace_is_not_open_to_requests(self, server):
        fingerprint = parse_plan(PLAN, "plan.yaml").fingerprint
        with pytest.raises(Exception, match=r"HTTP 400.*reserved"):
            ask(server, SHORT, extra_key=f"blockreuse:kv:{fingerprint[:16]}:")

    def test_the_pool_is_whole_afterwards(self, server):
        ask(server, LONG, new_tokens=8)
        server.flush_cache()
        assert leaks(server) == []
        assert "Traceback" not in server.new_log_text()


REFUSED = {
    "own_window": (PLAN.replace("anchor: 4, kv_from: 4", "anchor: 4, kv_from: 4, own_window: 16"), (),
                   "own_window on layers"),
    "a radix cache that would publish its KV": (PLAN, ("--radix-cache-backend", "radix"), "radix-cache-backend"),
}  # fmt: skip


@pytest.mark.parametrize(("plan", "flags", "says"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_stops_the_server_by_name(plan, flags, says):
    with pytest.raises(ServerFailed, match=says), lease(*flags, plan=plan):
        pass
