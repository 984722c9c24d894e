"""The benchmarks on the real server: what they measure, and that a gate sees repair being switched off."""

from __future__ import annotations

import pytest
from contexts import make_contexts
from documents import Composer, Law, Marking, made_source, requests_of
from gate import Bounds, judge
from homes import HOMES
from load import rows_of, run_load
from meter import Arm, Meter
from records import Log
from servers import language_model
from serving import account, counts

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo.client import EndOfTurn

pytestmark = pytest.mark.engine
NUM_TOKENS = 8
NEARLY_ALL = 0.8  # of the tokens before the question; the rest of the context's blocks is 5 % of them


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def server():
    """Agreement with an oracle is about words, so it takes the language model."""
    with language_model() as running:
        yield running


@pytest.fixture(scope="module")
def measured(server, tokenizer, tmp_path_factory):
    """One context whose answer depends on all of its blocks, with nothing repaired and with nearly all."""
    log = Log(tmp_path_factory.mktemp("log") / "quality.jsonl")
    meter = Meter(
        server,
        homes=HOMES["leading"],
        end=EndOfTurn(tokenizer.eos_token_id, tokenizer.eos_token),
        log=log,
        label="",
    )
    contexts = make_contexts(tokenizer, split="calibration", seed=0, per_category=1, categories=["L"])
    oracles = {context.name: meter.oracle(context, NUM_TOKENS) for context in contexts}
    repairing = [Arm("none", 0.0), Arm("seam", NEARLY_ALL), *(Arm(policy, 0.1) for policy in POLICIES)]
    meter.run(contexts, oracles, repairing)
    meter.run(contexts, oracles, [Arm("seam", 0.75)], decode=True)
    return log


def test_a_full_prefill_agrees_with_itself(measured):
    (floor,) = measured.of(policy="full", forced="oracle")
    assert judge([floor], Bounds()).green


def test_every_answer_token_is_compared_and_the_share_is_the_server_s(measured):
    for budget, policy in ((0.0, "none"), (NEARLY_ALL, "seam")):
        (found,) = measured.of(policy=policy, budget=budget, forced="oracle")
        assert found["problem"] is None
        assert len(found["kl"]) == len(found["same_top"]) <= NUM_TOKENS
        assert found["usage"]["recompute_ratio"] == pytest.approx(budget, abs=0.01)


def test_no_measurement_finds_what_an_earlier_one_repaired(measured):
    """A repaired head is exact and would lengthen the prefix of all that follow."""
    ours = [r for r in measured.of(record="measurement") if r["policy"] != "full"]
    assert len({r["usage"]["prefix_tokens"] for r in ours}) == 1
    assert [r["problem"] for r in ours] == [None] * len(ours)


def test_the_gate_turns_red_when_repair_is_switched_off(measured):
    assert judge(measured.of(policy="seam", budget=NEARLY_ALL), Bounds()).green
    assert not judge(measured.of(policy="none"), Bounds()).green


def test_a_generated_answer_is_measured_as_far_as_it_is_the_oracle_s(measured):
    (floor,) = measured.of(policy="full", forced="oracle")
    (found,) = measured.of(policy="seam", budget=0.75)
    assert found["problem"] is None
    num = len(found["kl"])
    assert 1 <= num <= len(floor["kl"])
    assert all(found["same_top"][: num - 1])


class TestLoadGenerator:
    law = Law(num_requests=3, num_documents=4, per_prompt=3, max_tokens=150)

    def run(self, server, tokenizer, model_path, log, marking):
        source = made_source(self.law, lambda text: len(tokenizer(text)["input_ids"]))
        requests = requests_of(self.law, source, Composer(tokenizer, source))
        server.flush_cache()
        before = counts(server)
        rows = rows_of(requests, marking, num_new_tokens=2)
        result = run_load(server, rows, model=model_path, clients=2, rate=float("inf"), seed=0, log=log)
        done = {key: value - before.get(key, 0) for key, value in counts(server).items()}
        return account(result, done, len(requests))

    def test_marked_requests_reuse_and_are_accounted_for(self, server, tokenizer, model_path, tmp_path):
        found = self.run(server, tokenizer, model_path, tmp_path / "log", Marking("seam", 0.05))
        assert found["completed"] == len(found["ttfts"]) == 3
        assert found["problems"] == []
        assert found["blockreuse_tokens"]["reused"] > 0
        assert sum(found["blockreuse_tokens"].values()) == found["total_input_tokens"]

    def test_marks_that_were_lost_are_a_problem(self, server, tokenizer, model_path, tmp_path):
        """Negative control: the same run, its marks left out."""
        found = self.run(server, tokenizer, model_path, tmp_path / "log", None)
        assert found["blockreuse_tokens"]["reused"] == 0
        assert found["problems"] == ["3 marked requests were sent, the server counted 0"]
