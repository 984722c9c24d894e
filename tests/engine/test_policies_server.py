"""Policies, the guard and local paths on the real server."""

from __future__ import annotations

import random

import pytest
from looks import counts, risen, state_of
from prompts import Library, ask, distance, logprobs, random_ids, usage
from servers import Server, lease
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.config import POLICIES

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=11)
FIRST, SECOND = (0, 1, 2, 3), (2, 0, 3, 1)
WHOLE = ("--chunked-prefill-size", "2048")  # only a prompt that lies in one step is measured
# The two bounds stand on either side of what repaired keys of this model deviate by.
LOOSE_GUARD, TIGHT_GUARD = 10.0, 1e-4


@pytest.fixture(scope="module")
def server():
    with lease(*WHOLE, blocks={"guard": LOOSE_GUARD}) as running:
        yield running


@pytest.fixture(scope="module")
def exact(server):
    ids, _ = LIBRARY.prompt(SECOND)
    # a salt of its own: what it publishes is exact, and a reuse request would rightly take it as a prefix
    return ask(server, ids, new_tokens=8, blockreuse_mode="exact", cache_salt="oracle")


def reuse(server: Server, salt: str, order=SECOND, *, new_tokens: int = 8, **params):
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, new_tokens=new_tokens, blockreuse_spans=spans, cache_salt=salt, **params)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_spends_its_budget_and_names_itself(server, policy):
    found = usage(reuse(server, policy, blockreuse_policy=policy, blockreuse_budget=0.1))
    assert (found["policy"], found["skipped_reason"]) == (policy, None)
    if policy == "seam":  # the configured one, which the bound belongs to
        assert (found["guard"]["verdict"], found["guard"]["measure"]) == ("passed", "deviation")
        assert 0.0 < found["guard"]["value"] < 1.0
    else:
        assert found["guard"] is None
    block_tokens = LIBRARY.system_len + sum(LIBRARY.doc_lens)
    assert found["repaired_tokens"] == int(0.1 * block_tokens)
    assert found["reused_tokens"] > 250
    total = sum(found[f"{kind}_tokens"] for kind in ("prefix", "reused", "repaired", "fresh"))
    assert total == block_tokens + LIBRARY.question_len


@pytest.mark.parametrize("policy", POLICIES)
def test_repairing_everything_equals_full_prefill(server, exact, policy):
    answer = reuse(server, f"all {policy}", blockreuse_policy=policy, blockreuse_budget=1.0)
    assert distance(answer, exact) <= FULL_PREFILL_LOGPROB
    assert usage(answer)["reused_tokens"] == 0


def test_without_repair_the_answer_differs(server, exact):
    answer = reuse(server, "none", blockreuse_budget=0.0)
    assert usage(answer)["reused_tokens"] > 300
    assert distance(answer, exact) > 100 * FULL_PREFILL_LOGPROB, "the control: local KV is not exact KV"


def test_the_question_decides_what_query_repairs(server):
    """The same documents and two questions: repairs differ, so do the answers' conditions."""
    ids, spans = LIBRARY.prompt(SECOND)
    end = len(ids) - LIBRARY.question_len
    params = {"blockreuse_spans": spans, "blockreuse_policy": "query", "blockreuse_budget": 0.1}
    whole = ask(server, ids, cache_salt="q1", **params)
    # the last token alone is asked, instead of the whole question
    last = ask(server, ids, cache_salt="q2", blockreuse_question=[len(ids) - 1, len(ids)], **params)
    same = ask(server, ids, cache_salt="q3", blockreuse_question=[end, len(ids)], **params)
    assert logprobs(whole) == logprobs(same)
    assert logprobs(whole) != logprobs(last)


def test_turn_two_takes_over_what_turn_one_repaired(server):
    ids, spans = LIBRARY.prompt(SECOND)
    first = reuse(server, "chat", blockreuse_budget=0.1)
    next_turn = ids + first["output_ids"] + random_ids(12, random.Random(1))
    before = counts(server)
    found = usage(ask(server, next_turn, cache_salt="chat", blockreuse_spans=spans, blockreuse_budget=0.1))
    assert risen(server, before, "path_tokens_total") == found["reused_tokens"]
    assert found["repaired_tokens"] == 0
    # all but the first answer's last token, whose KV was never computed, and the new message
    assert found["fresh_tokens"] == 13
    assert found["prefix_tokens"] + found["reused_tokens"] == len(next_turn) - 13


def test_the_same_prompt_twice_gives_the_same_answer(server):
    first = reuse(server, "twice", blockreuse_budget=0.1)
    again = reuse(server, "twice", blockreuse_budget=0.1)
    assert distance(first, again) <= FULL_PREFILL_LOGPROB
    assert usage(again)["repaired_tokens"] + usage(again)["fresh_tokens"] == 1


@pytest.mark.parametrize(
    "other",
    [
        pytest.param({"blockreuse_budget": 0.2}, id="another budget"),
        pytest.param({"blockreuse_policy": "head"}, id="another policy"),
        pytest.param({"blockreuse_tau": 4}, id="a tau"),
    ],
)
def test_another_policy_never_sees_the_path(server, other):
    salt = f"path {other}"
    reuse(server, salt, blockreuse_budget=0.1)
    found = usage(reuse(server, salt, **{"blockreuse_budget": 0.1, **other}))
    assert found["repaired_tokens"] > 1, "its own repair, not the other's"


def test_exact_requests_and_other_tenants_never_see_the_path(server, exact):
    reuse(server, "owner", blockreuse_budget=0.0)
    ids, spans = LIBRARY.prompt(SECOND)
    seen = ask(server, ids, new_tokens=8, blockreuse_mode="exact", cache_salt="owner")
    assert distance(seen, exact) <= FULL_PREFILL_LOGPROB
    foreign = usage(ask(server, ids, cache_salt="thief", blockreuse_spans=spans, blockreuse_budget=0.0))
    own = usage(ask(server, ids, cache_salt="owner", blockreuse_spans=spans, blockreuse_budget=0.0))
    assert foreign["prefix_tokens"] == LIBRARY.system_len, "which its own homes published"
    assert own["prefix_tokens"] == len(ids) - 1, "the exact request published the whole prompt"


def test_the_pool_is_whole_after_paths_were_published(server):
    server.flush_cache()
    pool = state_of(server)["pool"]
    assert pool["free"] == pool["size"]
    reuse(server, "whole", blockreuse_budget=0.1)
    pool = state_of(server)["pool"]
    assert pool["free"] + pool["evictable"] == pool["size"]
    assert pool["protected"] == 0


@pytest.mark.parametrize(
    ("policy", "guard", "verdict"),
    [
        pytest.param("seam", TIGHT_GUARD, "full", id="deviation far beyond the bound"),
        pytest.param("query", 0.6, "raised", id="leftover beyond the bound"),
    ],
)
def test_the_guard_repairs_more_where_the_bound_is_exceeded(exact, policy, guard, verdict):
    with lease(*WHOLE, blocks={"guard": guard, "policy": policy}) as strict:
        answer = reuse(strict, "strict", blockreuse_budget=0.1)
        found = usage(answer)
        assert found["guard"]["verdict"] == verdict
        if verdict == "full":
            assert found["reused_tokens"] == 0
            assert distance(answer, exact) <= FULL_PREFILL_LOGPROB
        else:
            assert found["recompute_ratio"] == pytest.approx(0.4), "four times the budget"
