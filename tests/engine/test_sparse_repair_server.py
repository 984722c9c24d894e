"""`prefill: sparse` on the real server in float32: which tokens it touches, how far it moves an answer, who sees it.

Dense repair of the same request, which a test knob asks for, is the oracle; one server serves all tests.
"""

from __future__ import annotations

import concurrent.futures

import pytest
from looks import counts, risen, state_of
from plans import NUM_REINDEX, NUM_REUSE, plan_text
from prompts import Library, ask, distance, usage
from servers import lease
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
FINAL_K = 224
PLAN = plan_text(f"final_k: {FINAL_K}, pool_size: 320, sink: 4, window: 32", "prefill: sparse")
SHORT = Library(seed=31, system_len=20, doc_lens=(40, 45, 50, 42), question_len=15)
LONG = Library(seed=32, doc_lens=(160, 140, 180, 150))
OTHER = Library(seed=33, doc_lens=(170, 130, 150, 140))
ORDER, TAU = (2, 0, 3, 1), 8
SPOILT = range(
    LONG.prompt(ORDER)[1][-2], LONG.prompt(ORDER)[1][-2] + TAU
)  # the repaired head of the last block


@pytest.fixture(scope="module")
def server():
    with lease(plan=PLAN) as running:
        yield running


def repaired(server, library, *, new_tokens=1, keep=False, **params):
    """An answer behind reused blocks, its homes compiled with it; leaves the tree empty."""
    ids, spans = library.prompt(ORDER)
    answer = ask(server, ids, new_tokens=new_tokens, blockreuse_spans=spans, blockreuse_tau=TAU, **params)
    assert usage(answer)["skipped_reason"] is None
    if not keep:
        server.flush_cache()
    return answer


def behind_copies(answer) -> int:
    """Repaired tokens but for the head of the first reused block, which sees exact KV only and stays exact."""
    return usage(answer)["repaired_tokens"] - TAU


class TestEverythingSelected:
    """k >= N."""

    def test_such_tokens_run_dense(self, server):
        before = counts(server)
        answer = repaired(server, SHORT)
        assert risen(server, before, "repair_rows_total short") == behind_copies(answer) > 0
        assert risen(server, before, "repair_rows_total sparse") == 0
        assert distance(answer, repaired(server, SHORT, testing_dense_repair=True)) == 0

    def test_sparse_repair_that_selects_everything_equals_dense_repair(self, server):
        before = counts(server)
        answer = repaired(server, SHORT, testing_short_repair=True)
        assert risen(server, before, "repair_rows_total sparse") == behind_copies(answer)
        dense = repaired(server, SHORT, testing_dense_repair=True)
        assert 0 < distance(answer, dense) <= FULL_PREFILL_LOGPROB

    def test_it_is_repair(self, server):
        """Negative control: what repair computes reaches the answer."""
        dense = repaired(server, SHORT, testing_dense_repair=True)
        ids, spans = SHORT.prompt(ORDER)
        unrepaired = ask(server, ids, new_tokens=1, blockreuse_spans=spans, blockreuse_tau=0)
        assert distance(dense, unrepaired) > 100 * FULL_PREFILL_LOGPROB


class TestSomethingLeftOut:
    def test_every_long_repair_token_is_sparse_and_the_answer_differs(self, server):
        before = counts(server)
        answer = repaired(server, LONG)
        assert risen(server, before, "repair_rows_total sparse") > 20
        kinds = ("sparse", "short")
        assert sum(risen(server, before, f"repair_rows_total {kind}") for kind in kinds) == behind_copies(
            answer
        )
        assert risen(server, before, "decode_own_scans_total reuse") == 0
        dense = repaired(server, LONG, testing_dense_repair=True)
        assert distance(answer, dense) > 10 * FULL_PREFILL_LOGPROB

    def test_its_answer_stays_nearer_to_dense_repair_than_that_of_none(self, server):
        """Nightly, answers of the language model about documents have a bound of their own."""
        dense = repaired(server, LONG, testing_dense_repair=True)
        ids, spans = LONG.prompt(ORDER)
        none = ask(server, ids, new_tokens=1, blockreuse_spans=spans, blockreuse_tau=0)
        server.flush_cache()
        assert 0 < distance(repaired(server, LONG), dense) < distance(none, dense)


class TestStaleState:
    @pytest.mark.parametrize("field", ["row", "version", "length", "digest", "slots", "counts"])
    def test_of_a_few_tokens_costs_each_a_scan_and_nobody_an_answer(self, server, field):
        alone, other = repaired(server, LONG), repaired(server, OTHER)
        bound = distance(alone, repaired(server, LONG, testing_dense_repair=True))
        before = counts(server)
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            spoilt = pool.submit(repaired, server, LONG, keep=True, testing_stale_repair=[*SPOILT, field])
            beside = pool.submit(repaired, server, OTHER, keep=True)
        # once in every consumer, for each of them
        assert risen(server, before, "decode_own_scans_total reindex") == NUM_REINDEX * len(SPOILT)
        assert risen(server, before, "decode_own_scans_total reuse") == NUM_REUSE * len(SPOILT)
        assert distance(beside.result(), other) <= FULL_PREFILL_LOGPROB
        assert distance(spoilt.result(), alone) < bound, (
            "a few tokens' own scans move less than sparse repair did"
        )

    def test_what_the_checks_cannot_see_would_go_unnoticed(self, server):
        """Negative control: the same damage, stamped as good."""
        alone = repaired(server, LONG)
        bound = distance(alone, repaired(server, LONG, testing_dense_repair=True))
        before = counts(server)
        spoilt = repaired(server, LONG, testing_stale_repair=[*SPOILT, "unseen"])
        assert risen(server, before, "decode_own_scans_total reuse") == 0
        assert distance(spoilt, alone) > bound


class TestWhoSeesIt:
    def test_ordinary_prompts_are_computed_to_the_bit_as_exact_ones(self, server):
        ids, _ = LONG.prompt(ORDER)
        exact = ask(server, ids, new_tokens=1, blockreuse_mode="exact")
        server.flush_cache()
        before = counts(server)
        assert distance(ask(server, ids, new_tokens=1), exact) == 0
        assert risen(server, before, "repair_rows_total sparse") == 0

    def test_an_exact_request_finds_nothing_of_it(self, server):
        ids, _ = LONG.prompt(ORDER)
        oracle = ask(server, ids, new_tokens=6, blockreuse_mode="exact")
        server.flush_cache()
        first = repaired(server, LONG, new_tokens=6, keep=True)
        before = counts(server)
        exact = ask(server, ids, new_tokens=6, blockreuse_mode="exact")
        assert usage(exact)["prefix_tokens"] < len(ids) / 2, "the system prompt and the first document"
        assert distance(exact, oracle) <= FULL_PREFILL_LOGPROB
        assert distance(first, oracle) > 10 * FULL_PREFILL_LOGPROB
        assert risen(server, before, "path_tokens_total") == 0

    def test_the_next_turn_under_the_same_plan_finds_it(self, server):
        """Negative control of the test above: it was published."""
        answer = repaired(server, LONG, new_tokens=6, keep=True)
        ids, spans = LONG.prompt(ORDER)
        turn = ids + answer["output_ids"] + SHORT.question
        before = counts(server)
        ask(server, turn, new_tokens=1, blockreuse_spans=spans, blockreuse_tau=TAU)
        assert risen(server, before, "path_tokens_total") > len(ids) / 2

    def test_a_guarded_or_exact_row_beside_it_is_dense(self, server):
        """Rows of every kind in one prefill batch answer as alone."""
        ids, _ = OTHER.prompt(ORDER)
        cases = [
            lambda: repaired(server, LONG, keep=True),
            lambda: ask(server, ids, new_tokens=1, blockreuse_mode="exact"),
            lambda: ask(server, SHORT.prompt(ORDER)[0], new_tokens=1),
        ]
        alone = []
        for case in cases:
            alone.append(case())
            server.flush_cache()
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            together = [found.result() for found in [pool.submit(case) for case in cases]]
        for one, other in zip(alone, together, strict=True):
            assert distance(one, other) <= FULL_PREFILL_LOGPROB

    def test_the_pool_is_whole_afterwards(self, server):
        repaired(server, LONG, keep=True)
        pool = state_of(server)["pool"]
        assert pool["free"] + pool["evictable"] == pool["size"]
        assert pool["protected"] == 0
