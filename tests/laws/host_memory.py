"""Homes in host memory: the answers of a server on whose device everything fits, from one on which a third does.

`HostMemory` is a test class but for its fixture `server`, started with FLAGS and a write policy, and `wanted`, what
`run` gives on a server with a large pool.
"""

from __future__ import annotations

import random

import pytest
from looks import counts, risen, state_of
from marked import wait_until_idle
from prompts import Library, ask, usage
from tolerances import EXACT, FULL_PREFILL_LOGPROB

NUM_DOCS, DOC_LEN, SYSTEM_LEN, PER_PROMPT = 24, 120, 24, 4
POOL = (SYSTEM_LEN + NUM_DOCS * DOC_LEN) // 3
SMALL = ("--max-total-tokens", str(POOL))
FLAGS = (*SMALL, "--enable-hierarchical-cache", "--hicache-ratio", "8")
LIBRARY = Library(seed=61, system_len=SYSTEM_LEN, doc_lens=(DOC_LEN,) * NUM_DOCS, question_len=12)


def prompts_of_all(*, seed: int) -> list[list[int]]:
    """Orders that together name every document once."""
    docs = list(range(NUM_DOCS))
    random.Random(seed).shuffle(docs)
    return [docs[i : i + PER_PROMPT] for i in range(0, NUM_DOCS, PER_PROMPT)]


def generate(server, order, **params):
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, new_tokens=3, top=4, blockreuse_spans=spans, **params)


def logprobs(answer):
    return [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]


def run(server, *, seeds=(1, 2)) -> list[dict]:
    """Every document, and then every document in other company."""
    return [generate(server, order) for seed in seeds for order in prompts_of_all(seed=seed)]


def reused_when_known(answers) -> int:
    """Tokens that the second half of `run` reused."""
    return sum(usage(answer)["reused_tokens"] for answer in answers[len(answers) // 2 :])


class HostMemory:
    def test_a_library_of_three_pools_is_reused_as_if_all_of_it_were_on_the_device(self, server, wanted):
        before = counts(server)
        server.flush_cache()
        found = run(server)
        for answer, want in zip(found, wanted, strict=True):
            assert logprobs(answer) == pytest.approx(logprobs(want), abs=EXACT[0], rel=EXACT[1])
            told, would = usage(answer), usage(want)
            assert [told[k] for k in ("reused_tokens", "repaired_tokens")] == [
                would[k] for k in ("reused_tokens", "repaired_tokens")
            ]
        half = len(found) // 2
        assert [usage(answer)["compiled_tokens"] for answer in found[half:]] == [0] * half
        on_host = sum(usage(answer)["host_tokens"] for answer in found)
        assert on_host > POOL, "most of the library is not on the device"
        assert risen(server, before, "tier_tokens_total host") == on_host
        assert risen(server, before, "errors_total") == 0

    def test_homes_of_the_wrong_documents_in_host_memory_are_seen(self, server, wanted):
        """The control of equal log-probabilities: rows that change places."""
        server.flush_cache()
        run(server, seeds=(1,))
        answer = generate(server, prompts_of_all(seed=2)[-1], testing_swap_homes=True)
        assert usage(answer)["host_tokens"] > 0
        want = logprobs(wanted[-1])
        distance = max(abs(a - b) for a, b in zip(logprobs(answer), want, strict=True))
        assert distance > 100 * FULL_PREFILL_LOGPROB

    def test_slots_add_up_on_both_tiers_and_the_host_has_no_path(self, server):
        server.flush_cache()
        run(server)
        wait_until_idle(server)
        pool = state_of(server)["pool"]
        assert pool["free"] + pool["evictable"] == pool["size"]
        on_host = pool["host_size"] - pool["host_free"]
        # what is exact: the library behind its prefix, and per prompt what stands before the first copy
        exact = SYSTEM_LEN + NUM_DOCS * DOC_LEN
        num_prompts = 2 * NUM_DOCS // PER_PROMPT
        assert POOL < on_host <= exact + num_prompts * 8, "a local path is a whole prompt"
        server.flush_cache()
        pool = state_of(server)["pool"]
        assert (pool["free"], pool["host_free"]) == (pool["size"], pool["host_size"])

    def test_an_exact_request_is_answered_from_host_memory_as_from_a_full_prefill(self, server):
        order = prompts_of_all(seed=1)[0]
        server.flush_cache()
        want = generate(server, order, blockreuse_mode="exact")
        server.flush_cache()
        run(server)
        found = generate(server, order, blockreuse_mode="exact")
        assert usage(found)["prefix_tokens"] >= SYSTEM_LEN, (
            "the first document is an exact prefix, on some tier"
        )
        assert logprobs(found) == pytest.approx(logprobs(want), abs=FULL_PREFILL_LOGPROB)

    def test_homes_in_host_memory_are_of_one_tenant(self, server):
        server.flush_cache()
        run(server, seeds=(1,))
        order = prompts_of_all(seed=2)[0]
        other = usage(generate(server, order, cache_salt="another"))
        assert other["host_tokens"] == 0
        assert other["compiled_tokens"] >= (len(order) - 1) * DOC_LEN, "all but the one behind the prefix"
