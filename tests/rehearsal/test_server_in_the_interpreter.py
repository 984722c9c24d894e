"""The real server on SGLang's Triton backend and this package's Triton kernels, all in the interpreter.

What the CPU backend hides is on this path: the host's metadata for virtual rows, its kernels, probes on a class of the
host, alpha and beta in kernels of prefill and decode.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from nursery import Nursery
from prompts import Library, ask, distance, usage
from tiny_models import TinyModel
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

TINY = TinyModel(
    "llama", {"num_hidden_layers": 2, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
)
LIBRARY = Library(seed=14, system_len=6, doc_lens=(34, 32, 38, 33), question_len=8, ids=range(3, 500))
FLAGS = (
    "--dtype",
    "float32",
    "--skip-tokenizer-init",
    "--max-running-requests",
    "3",
    "--context-length",
    "512",
)
SMALL_POOL = 420  # tokens: three prompts fit, their answers do not


@pytest.fixture(scope="module")
def interpreter():
    with Nursery({"TRITON_INTERPRET": "1"}) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def start(interpreter, model, tmp_path_factory):
    """Starts a server under a configuration of blocks."""

    def started(tokens=2000, **blocks):
        folder = tmp_path_factory.mktemp("server")
        config = folder / "blockreuse.yaml"
        config.write_text(json.dumps({"blocks": blocks}))
        paths = (str(Path(__file__).parent / "plugin"), os.environ.get("PYTHONPATH", ""))
        return interpreter.server(
            model,
            *FLAGS,
            *("--max-total-tokens", str(tokens), "--blockreuse-config", str(config)),
            log=folder / "server.log",
            env={"PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        )

    return started


def know(server):
    """Give every document a home, behind the system prompt and in another order than is asked for."""
    ids, spans = LIBRARY.prompt((3, 2, 1, 0))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)


class TestDefaults:
    @pytest.fixture(scope="class")
    def server(self, start):
        with start() as running:
            yield running

    @pytest.fixture(autouse=True)
    def known(self, server):
        server.flush_cache()
        know(server)

    def test_it_is_the_triton_backend_that_serves(self, server):
        assert "by BlockReuseTritonBackend" in server.log_text()

    def test_a_prompt_whose_blocks_are_all_repaired_equals_a_full_prefill(self, server):
        ids, spans = LIBRARY.prompt((0, 1, 2, 3))
        full = ask(server, ids, blockreuse_mode="off", new_tokens=3)
        repaired = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=1000, new_tokens=3)
        assert usage(repaired)["repaired_tokens"] > 0
        assert distance(repaired, full) <= FULL_PREFILL_LOGPROB

    def test_a_folded_prompt_differs_from_a_full_prefill_no_more_than_on_the_cpu(
        self, server, model, nursery, tmp_path
    ):
        ids, spans = LIBRARY.prompt((1, 3, 0, 2))
        reused = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2, new_tokens=3)
        assert usage(reused)["reused_tokens"] > 60
        with nursery.server(model, *FLAGS, "--max-total-tokens", "2000", log=tmp_path / "cpu.log") as cpu:
            know(cpu)
            same = ask(cpu, ids, blockreuse_spans=spans, blockreuse_tau=2, new_tokens=3)
        assert usage(same) == usage(reused)
        assert distance(same, reused) <= FULL_PREFILL_LOGPROB

    @pytest.mark.parametrize("policy", ["query", "head+query", "deviation"])
    def test_a_policy_that_measures_chooses_as_on_the_cpu(self, server, model, nursery, tmp_path, policy):
        ids, spans = LIBRARY.prompt((2, 0, 3, 1))
        asked = {"blockreuse_spans": spans, "blockreuse_policy": policy, "blockreuse_budget": 0.3}
        here = ask(server, ids, new_tokens=3, **asked)
        with nursery.server(model, *FLAGS, "--max-total-tokens", "2000", log=tmp_path / "cpu.log") as cpu:
            know(cpu)
            there = ask(cpu, ids, new_tokens=3, **asked)
        assert usage(here)["repaired_tokens"] > 0
        assert usage(here) == usage(there)
        assert distance(here, there) <= FULL_PREFILL_LOGPROB


def test_the_guard_measures_and_computes_everything_where_repair_is_bad(start):
    with start(guard=1e-6) as server:
        know(server)
        ids, spans = LIBRARY.prompt((0, 1, 2, 3))
        guarded = ask(server, ids, blockreuse_spans=spans, new_tokens=3)
        found = usage(guarded)
        assert found["guard"]["verdict"] == "full"
        full = ask(server, ids, blockreuse_mode="off", new_tokens=3)
        assert distance(guarded, full) <= FULL_PREFILL_LOGPROB


def test_alpha_and_beta_answer_as_on_the_cpu(start, model, nursery, tmp_path):
    bias = {"alpha": -3.0, "beta": -2.0, "num_true_sinks": 2}
    ids, spans = LIBRARY.prompt((0, 1, 2, 3))
    asked = {"blockreuse_spans": spans, "blockreuse_tau": 2, "new_tokens": 4}
    config = tmp_path / "blockreuse.yaml"
    config.write_text(json.dumps({"blocks": bias}))
    flags = ("--max-total-tokens", "2000", "--blockreuse-config", str(config))
    with start(**bias) as server:
        know(server)
        here = ask(server, ids, **asked)
        plain = ask(server, ids, blockreuse_mode="off", new_tokens=4)
    with nursery.server(model, *FLAGS, *flags, log=tmp_path / "cpu.log") as cpu:
        know(cpu)
        there = ask(cpu, ids, **asked)
        plain_there = ask(cpu, ids, blockreuse_mode="off", new_tokens=4)
    assert usage(here)["reused_tokens"] > 60
    assert distance(here, there) <= FULL_PREFILL_LOGPROB
    assert distance(plain, plain_there) <= FULL_PREFILL_LOGPROB
    assert distance(here, plain) > 100 * FULL_PREFILL_LOGPROB  # the terms act


def test_retracted_requests_answer_as_if_nothing_had_happened(start):
    """More is promised than the pool holds, so the host takes requests back and runs them again."""
    orders = [(0, 1, 2), (1, 2, 3), (2, 3, 0)]
    prompts = [LIBRARY.prompt(order) for order in orders]
    with start() as server:
        alone = [ask(server, ids, blockreuse_mode="off", new_tokens=24) for ids, _ in prompts]
    with start(tokens=SMALL_POOL) as server:
        together = server.generate(
            input_ids=[ids for ids, _ in prompts],
            sampling_params=[
                {
                    "temperature": 0,
                    "max_new_tokens": 24,
                    "ignore_eos": True,
                    "custom_params": {"blockreuse_spans": spans, "blockreuse_tau": 1000},
                }
                for _, spans in prompts
            ],
            return_logprob=True,
            top_logprobs_num=20,
        )
        log = server.log_text()
    assert "retract" in log.lower()
    for answer, want in zip(together, alone, strict=True):
        assert distance(answer, want) <= FULL_PREFILL_LOGPROB
