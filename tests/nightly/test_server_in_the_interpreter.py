"""The real server on SGLang's Triton backend and this package's Triton kernels, all in the interpreter.

What the CPU backend hides is on this path: the host's metadata for virtual rows, its kernels, probes on a class of the
host, alpha and beta in kernels of prefill and decode. The CPU server answers the same requests beside it.
"""

from __future__ import annotations

import json
import os

import pytest
from nursery import Nursery
from places import PLUGIN, REHEARSAL_PLUGIN
from prompts import Library, ask, distance, usage
from tiny_models import TinyModel
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
BASES = "tests/rehearsal/test_bases_in_the_interpreter.py::test_rehearsals_in_the_interpreter"

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
# one guard for the configured policy: other policies are asked for by name and not guarded
GUARDED = {"policy": "head", "guard": 0.001}
CORRECTED = {"alpha": -3.0, "beta": -2.0, "num_true_sinks": 2}
# a prompt computed in three virtual rows, and whatever is generated in the last of them
ROWS = {"testing_rows": [0, 20, 20, 75, 75, 10_000]}
# read while SGLang is imported; a request that runs alone is never taken back
RETRACTION = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "4"}


@pytest.fixture(scope="module")
def interpreter():
    with Nursery({"TRITON_INTERPRET": "1", **RETRACTION}) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """Starts a server of a nursery under a configuration of blocks; on a CPU's way, or on that of a CUDA device."""

    def started(nursery, blocks, *, like_cuda):
        folder = tmp_path_factory.mktemp("server")
        config = folder / "blockreuse.yaml"
        config.write_text(json.dumps({"blocks": blocks}))
        paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
        if like_cuda:
            paths.insert(0, str(REHEARSAL_PLUGIN))
        return nursery.server(
            model,
            *FLAGS,
            *("--max-total-tokens", "2000", "--blockreuse-config", str(config)),
            log=folder / "server.log",
            env={"PYTHONPATH": os.pathsep.join(p for p in paths if p)},
        )

    return started


@pytest.fixture(scope="module")
def like_cuda(interpreter, start):
    with start(interpreter, GUARDED, like_cuda=True) as server:
        yield server


@pytest.fixture(scope="module")
def cpu(nursery, start):
    with start(nursery, GUARDED, like_cuda=False) as server:
        yield server


def answer(server, order, **asked):
    """Of a server that knows every document behind the system prompt, from a prompt of another order."""
    server.flush_cache()
    ids, spans = LIBRARY.prompt((3, 2, 1, 0))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, blockreuse_spans=spans, new_tokens=3, **asked)


def exact(server, order):
    ids, _ = LIBRARY.prompt(order)
    return ask(server, ids, blockreuse_mode="off", new_tokens=3)


@pytest.mark.nightly(twin=BASES)
def test_it_is_the_triton_backend_that_serves(like_cuda, cpu):
    assert "by BlockReuseTritonBackend" in like_cuda.log_text()
    assert "by CpuAttnBackend" in cpu.log_text()


@pytest.mark.nightly(twin=BASES)
def test_a_prompt_computed_in_virtual_rows_equals_a_full_prefill(like_cuda):
    ids, spans = LIBRARY.prompt((0, 1, 2, 3))
    like_cuda.flush_cache()
    full = exact(like_cuda, (0, 1, 2, 3))
    like_cuda.flush_cache()
    lines = like_cuda.log_text().count("requests in 3 rows")
    folded = ask(like_cuda, ids, blockreuse_spans=spans, new_tokens=3, **ROWS)
    assert like_cuda.log_text().count("requests in 3 rows") == lines + 1
    assert distance(folded, full) <= FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=BASES)
@pytest.mark.parametrize(
    "asked",
    [
        {"blockreuse_policy": "seam", "blockreuse_tau": 2},
        {"blockreuse_policy": "query", "blockreuse_budget": 0.3},
        {"blockreuse_policy": "head+query", "blockreuse_budget": 0.3},
        {"blockreuse_policy": "deviation", "blockreuse_budget": 0.1},
    ],
    ids=lambda asked: asked["blockreuse_policy"],
)
def test_a_policy_repairs_and_answers_as_on_the_cpu(like_cuda, cpu, asked):
    here, there = (answer(server, (1, 3, 0, 2), **asked) for server in (like_cuda, cpu))
    assert usage(here)["reused_tokens"] > 50
    assert usage(here)["repaired_tokens"] > 5
    assert usage(here) == usage(there)
    assert distance(here, there) <= FULL_PREFILL_LOGPROB
    if asked["blockreuse_policy"] == "seam":  # what is reused is no full prefill: the comparison can tell
        assert distance(here, exact(like_cuda, (1, 3, 0, 2))) > 100 * FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=BASES)
def test_the_guard_measures_and_computes_everything_where_repair_is_bad(like_cuda, cpu):
    here, there = (answer(server, (2, 0, 1, 3)) for server in (like_cuda, cpu))
    assert usage(here)["guard"]["verdict"] == "full"
    assert usage(here)["guard"]["value"] == pytest.approx(usage(there)["guard"]["value"], abs=1e-4)
    assert distance(here, exact(like_cuda, (2, 0, 1, 3))) <= FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=BASES)
def test_alpha_and_beta_answer_as_on_the_cpu(interpreter, nursery, start):
    """In the prefill that repairs and in the decode steps behind it."""
    found = []
    for used, like_cuda in ((interpreter, True), (nursery, False)):
        with start(used, CORRECTED, like_cuda=like_cuda) as server:
            corrected = answer(server, (0, 2, 1, 3), blockreuse_tau=2)
            found.append((corrected, exact(server, (0, 2, 1, 3))))
    (here, full_here), (there, full_there) = found
    assert usage(here)["reused_tokens"] > 50
    assert distance(here, there) <= FULL_PREFILL_LOGPROB
    assert distance(full_here, full_there) <= FULL_PREFILL_LOGPROB
    assert distance(here, full_here) > 100 * FULL_PREFILL_LOGPROB  # the terms act


@pytest.mark.nightly(twin=BASES)
def test_requests_that_are_taken_back_answer_as_if_nothing_had_happened(like_cuda):
    """The host takes requests back every few steps and computes them again, in rows of other slots."""
    prompts = [LIBRARY.prompt(order)[0] for order in ((0, 1, 2), (1, 2, 3), (2, 3, 0))]
    num_tokens = 8
    like_cuda.flush_cache()
    alone = [ask(like_cuda, ids, blockreuse_mode="off", new_tokens=num_tokens) for ids in prompts]
    like_cuda.flush_cache()
    params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, "custom_params": ROWS}
    together = like_cuda.generate(
        input_ids=prompts, sampling_params=params, return_logprob=True, top_logprobs_num=20
    )
    assert sum(found["meta_info"]["num_retractions"] for found in together) > 0
    for found, want in zip(together, alone, strict=True):
        assert distance(found, want) <= FULL_PREFILL_LOGPROB
