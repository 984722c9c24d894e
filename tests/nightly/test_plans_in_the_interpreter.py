"""A layer plan on the real server with SGLang's Triton backend and Triton's interpreter, beside the CPU server.

Both run one decoder: what differs is who serves the operations, and that rows on a device stay in their batch.
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import random

import pytest
from looks import counts
from nursery import Nursery
from places import PLUGIN, REHEARSAL_PLUGIN
from prompts import ask, distance, random_ids
from tiny_models import TinyModel
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
TWIN = "tests/rehearsal/test_bases_in_the_interpreter.py::test_rehearsals_in_the_interpreter"

TINY = TinyModel(
    "llama", {"num_hidden_layers": 6, "head_dim": 16, "hidden_size": 64, "intermediate_size": 96}
)
PLAN = {
    "version": 1,
    "name": "test",
    "selection": {"final_k": 24, "pool_size": 48, "sink": 2, "window": 8},
    "layers": [
        {"layers": 0, "role": "dense"},
        {"layers": 1, "role": "full"},
        {"layers": 2, "role": "reindex", "anchor": 1},
        {"layers": 3, "role": "reuse", "anchor": 2},
        {"layers": 4, "role": "full"},
        {"layers": 5, "role": "reuse", "anchor": 4},
    ],
}
IDS = range(3, 500)
FLAGS = (
    "--dtype",
    "float32",
    "--skip-tokenizer-init",
    "--max-running-requests",
    "4",
    "--context-length",
    "256",
)
RETRACTION = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "7"}
SEEN = 100  # a difference that is none of rounding is so many tolerances


@pytest.fixture(scope="module")
def interpreter():
    with Nursery({"TRITON_INTERPRET": "1"}) as nursery:
        yield nursery


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    def started(nursery, plan, *, like_cuda, blocks=None, env=None):
        folder = tmp_path_factory.mktemp("server")
        (folder / "plan.yaml").write_text(json.dumps(plan))
        config = folder / "blockreuse.yaml"
        config.write_text(json.dumps({"blocks": blocks or {}, "layers": {"plan": str(folder / "plan.yaml")}}))
        paths = [str(PLUGIN), os.environ.get("PYTHONPATH", "")]
        if like_cuda:
            paths.insert(0, str(REHEARSAL_PLUGIN))
        return nursery.server(
            model,
            *FLAGS,
            *("--max-total-tokens", "2000", "--blockreuse-config", str(config)),
            log=folder / "server.log",
            env={"PYTHONPATH": os.pathsep.join(p for p in paths if p), **(env or {})},
        )

    return started


@pytest.fixture(scope="module")
def pair(interpreter, nursery, start):
    with start(interpreter, PLAN, like_cuda=True) as here, start(nursery, PLAN, like_cuda=False) as there:
        assert "by BlockReuseTritonBackend" in here.log_text()
        assert "by CpuAttnBackend" in there.log_text()
        yield here, there


def drawn(num, rng):
    """Prompts of which some are short of the selection, and what is asked of them."""
    lens = [rng.choice((9, 16, 60, 90, 150)) for _ in range(num)]
    modes = [
        rng.choice(({}, {}, {"blockreuse_mode": "exact"}, {"blockreuse_mode": "off"})) for _ in range(num)
    ]
    return [(random_ids(n, rng, IDS), mode) for n, mode in zip(lens, modes, strict=True)]


def answers(server, asked, *, new_tokens):
    """All together, so that rows of every kind share batches; and what was counted meanwhile."""
    server.flush_cache()
    before = counts(server)

    def one(prompt, mode):
        return ask(server, prompt, new_tokens=new_tokens, **mode)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(one, *zip(*asked, strict=True)))
    return found, risen(server, before)


def risen(server, before):
    """What decode counted since."""
    now = {name: n - before.get(name, 0) for name, n in counts(server).items()}
    return {name: n for name, n in now.items() if n and name.startswith("decode_")}


@pytest.mark.nightly(twin=TWIN)
def test_rows_of_every_kind_answer_as_on_the_cpu_and_are_counted_alike(pair):
    asked = drawn(24, random.Random(3))
    (here, counted), (there, wanted) = (answers(server, asked, new_tokens=4) for server in pair)
    assert max(distance(x, y) for x, y in zip(here, there, strict=True)) <= FULL_PREFILL_LOGPROB
    assert counted == wanted
    assert {
        "decode_rows_total sparse",
        "decode_rows_total short",
        "decode_rows_total exact",
    } <= counted.keys()
    assert not any("own_scans" in name for name in counted)


@pytest.mark.nightly(twin=TWIN)
def test_the_plan_acts(pair):
    """Negative control: an answer under the plan is not that of an exact request."""
    here, _ = pair
    prompt = random_ids(150, random.Random(4), IDS)
    sparse, exact = (ask(here, prompt, new_tokens=4, **mode) for mode in ({}, {"blockreuse_mode": "exact"}))
    assert distance(sparse, exact) > SEEN * FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=TWIN)
@pytest.mark.parametrize("field", ["row", "version", "kv", "digest"])
def test_stale_state_is_found_and_scanned_anew(pair, field):
    """A stamp that is spoilt before it is taken: the answer is that of the CPU server, spoilt alike."""
    prompt = random_ids(120, random.Random(5), IDS)
    found = []
    for server in pair:
        server.flush_cache()
        before = counts(server)
        answer = ask(server, prompt, new_tokens=4, testing_stale=field)
        own_scans = {name: n for name, n in risen(server, before).items() if "own_scans" in name}
        found.append((answer, own_scans))
    (here, counted), (there, wanted) = found
    assert counted == wanted
    assert set(counted) == {"decode_own_scans_total reindex", "decode_own_scans_total reuse"}
    assert distance(here, there) <= FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=TWIN)
def test_alpha_and_beta_are_terms_of_scores_and_attention(interpreter, nursery, start):
    """Of prompts whose blocks are reused, in decode steps that select."""
    from prompts import Library

    library = Library(seed=14, system_len=6, doc_lens=(34, 32, 38, 33), question_len=8, ids=IDS)
    found = []
    for used, like_cuda in ((interpreter, True), (nursery, False)):
        blocks = {"alpha": -1.5, "beta": -1.0, "num_true_sinks": 2}
        with start(used, PLAN, like_cuda=like_cuda, blocks=blocks) as server:
            ids, spans = library.prompt((3, 2, 1, 0))
            ask(server, ids, new_tokens=1, blockreuse_spans=spans)
            ids, spans = library.prompt((0, 2, 1, 3))
            found.append(ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2, new_tokens=5))
    assert distance(*found) <= FULL_PREFILL_LOGPROB


@pytest.mark.nightly(twin=TWIN)
def test_rows_that_come_back_share_with_nobody_s_past(start, nursery):
    asked = [(prompt, mode) for prompt, mode in drawn(8, random.Random(6)) if len(prompt) > 24]
    found = []
    for like_cuda in (True, False):
        env = {"TRITON_INTERPRET": "1"} if like_cuda else {}
        with (
            Nursery({**env, **RETRACTION}) as own,
            start(own, PLAN, like_cuda=like_cuda) as server,
        ):
            found.append(answers(server, asked, new_tokens=12))
    (here, counted), (there, _) = found
    assert sum(answer["meta_info"]["num_retractions"] for answer in here) > 0
    assert not any("own_scans" in name for name in counted)
    for one, other in zip(here, there, strict=True):
        if not one["meta_info"]["num_retractions"] and not other["meta_info"]["num_retractions"]:
            assert distance(one, other) <= FULL_PREFILL_LOGPROB
