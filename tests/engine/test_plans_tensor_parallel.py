"""A layer plan on two ranks over gloo: each scores with its own heads, and together they choose as one rank does."""

from __future__ import annotations

import concurrent.futures
import random

import pytest
from prompts import ask, distance, random_ids
from servers import extended_server, with_test_plugin
from tiny_models import SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
FLAGS = ("--dtype", "float32", "--max-total-tokens", "6000", "--max-running-requests", "4")
FLAGS += ("--skip-tokenizer-init",)
PLAN = """
version: 1
name: test
selection: {final_k: 32, pool_size: 80, sink: 2, window: 8}
layers:
  - {layers: 0, role: full}
  - {layers: 1, role: reindex, anchor: 0}
  - {layers: 2, role: reuse, anchor: 1}
"""
RNG = random.Random(5)
# all longer than the plan selects
PROMPTS = [random_ids(n, RNG, range(10, VOCAB)) for n in (400, 150, 260)]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return SUPPORTED["llama llama3"].write(tmp_path_factory.mktemp("plans-tensor-parallel") / "model")


def start(model, name, *flags, plan=PLAN):
    path = model.parent / f"{name}.yaml"
    path.write_text(plan)
    flags = (*FLAGS, "--layer-plan", str(path), *flags)
    return extended_server(model, *flags, log=model.parent / f"{name}.log", env=with_test_plugin())


def decode(server, ids, **options):
    """Greedy, from a dense prefill; the first token is the prefill's."""
    answer = ask(server, ids, new_tokens=NEW_TOKENS, **options)
    server.flush_cache()
    return answer


def counts(server):
    found = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return {name: number for name, number in found.items() if name.startswith("decode_")}


@pytest.fixture(scope="module")
def one_rank(model):
    """(sparse answers, dense answers, counters of the sparse ones)."""
    with start(model, "one") as server:
        sparse, counted = [decode(server, ids) for ids in PROMPTS], counts(server)
        yield sparse, [decode(server, ids, blockreuse_mode="exact") for ids in PROMPTS], counted


@pytest.fixture(scope="module")
def two_ranks(model):
    with start(model, "two", "--tp-size", "2") as server:
        yield server


def test_two_ranks_choose_and_answer_as_one(two_ranks, one_rank):
    sparse, dense, counted = one_rank
    for ids, want, exact in zip(PROMPTS, sparse, dense, strict=True):
        got = decode(two_ranks, ids)
        assert got["output_ids"] == want["output_ids"]
        assert distance(got, want) <= FULL_PREFILL_LOGPROB
        assert distance(got, exact) > 100 * FULL_PREFILL_LOGPROB, "the plan leaves something out"
    assert counts(two_ranks) == counted
    assert counted["decode_rows_total sparse"] == len(PROMPTS) * (NEW_TOKENS - 1)


def test_ranks_that_choose_by_their_own_heads_are_detected(two_ranks, one_rank):
    """Negative control: without the sum no rank fails, and the answers are others."""
    for ids, want in zip(PROMPTS, one_rank[0], strict=True):
        assert distance(decode(two_ranks, ids, testing_own_heads=True), want) > 100 * FULL_PREFILL_LOGPROB


def test_requests_that_share_a_batch_choose_alike_too(two_ranks, one_rank):
    with concurrent.futures.ThreadPoolExecutor(len(PROMPTS)) as pool:
        found = list(pool.map(lambda ids: ask(two_ranks, ids, new_tokens=NEW_TOKENS), PROMPTS))
    two_ranks.flush_cache()
    for got, want in zip(found, one_rank[0], strict=True):
        assert got["output_ids"] == want["output_ids"]
        assert distance(got, want) <= FULL_PREFILL_LOGPROB


def test_a_plan_that_ranks_cannot_score_together_stops_the_server_by_name(model):
    routed = PLAN + "scorer: {scan_heads: routed, num_routed_heads: 2}\n"
    with (
        pytest.raises(ServerFailed, match="routed heads with 2 tensor-parallel ranks"),
        start(model, "routed", "--tp-size", "2", plan=routed),
    ):
        pass
