"""Judging lists per KV head, whatever scores, and lists of a threshold: the same choice as the decoder's."""

from __future__ import annotations

import random

import pytest
from case_twin import decoded, listed, lists_of
from msgspec.structs import replace
from tiny_models import NUM_HEADS, NUM_KV_HEADS, TALKING_LAYERS, VOCAB, talking_model

from sglang_blockreuse.layers.calibration.case import evaluate
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.pattern import bound_of
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.plan import Scorer, Selection

SMALL = Selection(final_k=48, pool_size=96, sink=4, window=16)
OWN = Selection(final_k=48, sink=4, window=16)
EVERYTHING = Selection(final_k=400, pool_size=400)
NUM_ROWS, NUM_LAYERS, GROUP = 10, TALKING_LAYERS, NUM_HEADS // NUM_KV_HEADS
FULL, MIXED = "F" * NUM_LAYERS, "FXXRFR"
PAGES, INT4 = Scorer(kind="page_minmax"), Scorer(kind="int4_keys")
PER_HEAD = {"heads": "kv_head", "lend_heads": "layer"}
HEADS = {
    "exact": Scorer(**PER_HEAD),
    "int4": Scorer(kind="int4_keys", **PER_HEAD),
    "int4, nothing lent": Scorer(kind="int4_keys", heads="kv_head"),
    "pages": replace(PAGES, **PER_HEAD),
    "fused": Scorer(scan_heads="fused", **PER_HEAD),
    "routed": Scorer(scan_heads="routed", num_routed_heads=1, **PER_HEAD),
    "routed, residual, int4": Scorer(
        kind="int4_keys", scan_heads="routed", num_routed_heads=1, residual=True, **PER_HEAD
    ),
}
# lists of 20 to 200 positions, of 290
SHARE = 0.006
LISTED = replace(OWN, final_k=200, share=SHARE)
# log-probabilities of one sequence computed in passes of other shapes, float32
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def case():
    rng = random.Random(0)
    ids = [rng.randrange(10, VOCAB) for _ in range(150)] * 2
    return ScoredCase(Llama(talking_model()), "copy", ids[: 290 + NUM_ROWS], NUM_ROWS)


def plan_of(pattern, selection, scorer):
    return replace(bound_of(pattern, selection), scorer=scorer)


def log_probs(case, pattern, selection, scorer):
    case.check(plan_of(pattern, selection, scorer))
    return case.log_probs(plan_of(pattern, selection, scorer))[0]


def gap(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("scorer", HEADS.values(), ids=HEADS)
class TestListsPerHead:
    """Every KV head attends by a list of its own, whatever scores."""

    def test_reading_everything_is_dense(self, case, scorer):
        assert gap(log_probs(case, FULL, EVERYTHING, scorer), case.dense) < ROUNDING

    @pytest.mark.parametrize("selection", [OWN, LISTED], ids=["count", "share"])
    def test_it_chooses_what_the_decoder_chooses(self, case, scorer, selection):
        plan = plan_of(FULL, selection, scorer)
        _, trace = case.log_probs(plan)
        for layer, row in ((0, 0), (4, NUM_ROWS - 1)):
            caught = lists_of(case, layer, trace.hidden[layer], plan)
            expected = [listed(caught, row, GROUP * head) for head in range(2)]
            assert decoded(case, plan, layer, row) == expected
            assert len({tuple(at) for at in expected}) > 1

    def test_heads_of_one_list_choose_otherwise(self, case, scorer):
        """Negative control."""
        one = replace(scorer, heads="layer", lend_heads=None)
        if scorer.num_routed_heads:
            one = replace(one, num_routed_heads=2 * scorer.num_routed_heads)
        found = log_probs(case, FULL, OWN, scorer)
        assert gap(found, log_probs(case, FULL, OWN, one)) > ROUNDING


class TestShares:
    @pytest.mark.parametrize("scorer", [Scorer(), INT4, HEADS["int4"]], ids=["exact", "int4", "per head"])
    def test_a_share_that_everything_exceeds_is_a_count(self, case, scorer):
        count, share = (log_probs(case, MIXED, replace(SMALL, share=x), scorer) for x in (None, 1e-12))
        assert gap(count, share) < ROUNDING

    @pytest.mark.parametrize("scorer", [Scorer(), Scorer(**PER_HEAD), INT4, HEADS["int4"]], ids=str)
    def test_lists_are_as_long_as_rows_need(self, case, scorer):
        wide = replace(SMALL, final_k=200, pool_size=250)
        lens = []
        for share in (0.02, SHARE):
            plan = plan_of(MIXED, replace(wide, share=share), scorer)
            (found,) = evaluate([case], plan)
            selecting = [mean for mean in found.listed_L if mean]
            assert len(selecting) == NUM_LAYERS
            assert all(20 <= mean <= 200 for mean in selecting)
            lens.append(sum(selecting) / NUM_LAYERS)
        assert 20 < lens[0] < lens[1] < 199

    def test_a_refreshed_pool_is_ranked_by_shares_too(self, case):
        wide = replace(SMALL, final_k=100, pool_size=400, share=SHARE)
        every = log_probs(case, FULL, replace(wide, refresh_every=5), Scorer())
        assert gap(every, log_probs(case, FULL, wide, Scorer())) < ROUNDING

    def test_a_tau_of_another_plan_is_seen_to_differ(self, case):
        """Negative control."""
        one, other = (
            log_probs(case, FULL, replace(LISTED, share=x), HEADS["int4"]) for x in (SHARE, 2 * SHARE)
        )
        assert gap(one, other) > 10 * ROUNDING
