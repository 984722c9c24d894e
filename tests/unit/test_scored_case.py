"""Judging a plan by the scorer it is served with: laws on the real model, and the same choice as the decoder's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from msgspec.structs import replace

from sglang_blockreuse.kernels.ops import Table
from sglang_blockreuse.layers.calibration.case import Case, evaluate
from sglang_blockreuse.layers.calibration.judge import described
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.pattern import bound_of
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.calibration.texts import Texts
from sglang_blockreuse.layers.decode_step import Batch
from sglang_blockreuse.layers.plan import Scorer, Selection
from sglang_blockreuse.layers.sparse_decode import SparseDecoder

SMALL = Selection(final_k=48, pool_size=96, sink=4, window=16)
OWN = Selection(final_k=48, sink=4, window=16)
EVERYTHING = Selection(final_k=400, pool_size=400)
NUM_ROWS = 10
FULL, MIXED = "F" * 30, "FXXFXXXFRRRXXFRRFXXXXXFXXXXXXR"
PAGES, FOUR = Scorer(kind="page_minmax"), Scorer(scan_heads="routed", num_routed_heads=4)
SCORERS = {
    "pages": PAGES,
    "pages, fused": replace(PAGES, scan_heads="fused"),
    "int4": Scorer(kind="int4_keys"),
    "fused": Scorer(scan_heads="fused"),
    "routed": FOUR,
    "routed, residual": replace(FOUR, residual=True),
    "routed, residual, int4": replace(FOUR, residual=True, kind="int4_keys"),
}
# log-probabilities of one sequence computed in passes of other shapes, float32
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def ids(model_path):
    return Texts(model_path).make("copy", 0, 311)


@pytest.fixture(scope="module")
def model(model_path):
    return Llama(model_path)


@pytest.fixture(scope="module")
def case(model, ids):
    return ScoredCase(model, "copy", ids, NUM_ROWS)


def plan_of(pattern, selection, scorer):
    return replace(bound_of(pattern, selection), scorer=scorer)


def log_probs(case, pattern, selection, scorer):
    case.check(plan_of(pattern, selection, scorer))
    return case.log_probs(plan_of(pattern, selection, scorer))[0]


def gap(a, b):
    return float((a - b).abs().max())


@pytest.mark.parametrize("scorer", SCORERS.values(), ids=SCORERS)
class TestEveryScorer:
    def test_reading_everything_is_dense(self, case, scorer):
        assert gap(log_probs(case, MIXED, EVERYTHING, scorer), case.dense) < ROUNDING

    @pytest.mark.parametrize("every", [1, 4], ids="every {}".format)
    def test_reading_less_is_seen_to_differ(self, case, scorer, every):
        selection = replace(SMALL, refresh_every=every)
        found = log_probs(case, FULL, selection, scorer)
        assert gap(found, case.dense) > 100 * ROUNDING
        assert gap(found, log_probs(case, FULL, selection, Scorer())) > ROUNDING, (
            "exact scores choose the same"
        )

    @pytest.mark.parametrize("row", [0, NUM_ROWS - 1], ids="row {}".format)
    @pytest.mark.parametrize("selection", [OWN, SMALL], ids=["own", "pool"])
    def test_it_chooses_what_the_decoder_chooses(self, case, scorer, selection, row):
        plan = plan_of(FULL, selection, scorer)
        _, trace = case.log_probs(plan)
        for layer in (0, 11):
            expected = trace.chosen[layer + 1][layer, "indices"][row].tolist()
            case._layer(layer, trace.hidden[layer], plan, {}, None)  # leaves the layer's queries behind
            assert _decoded(case, plan, layer, row) == sorted(expected)


def _decoded(case, plan, layer, row):
    """Positions that sparse decode chooses for one row of a case, whose keys stand in a pool in another order."""
    length = case.num_tokens + row + 1
    slots = torch.randperm(length + 5)[:length].int()
    keys = torch.full((length + 5, *case._keys[layer].transpose(0, 1).shape[1:]), torch.nan)
    keys[slots.long()] = case._keys[layer].transpose(0, 1)[:length]
    q = case._queries.last_QRD[:, row : row + 1].transpose(0, 1).contiguous()
    decoder = SparseDecoder(plan, num_requests=1, num_q_heads=q.shape[1], k_pools=[keys] * 30)
    batch = Batch(slots[None], [0], [length], np.array([7]), np.zeros(1, np.uint8), None)
    decoder.run(
        decoder.begin(batch), layer, q, keys, keys, torch.empty_like(q), scale=case.model.head_dim**-0.5
    )
    table: Table = decoder.state.own
    return table.positions[0, 0, : table.counts[0]].tolist()


class TestDegenerate:
    def test_pages_of_one_token_are_exact_keys(self, case):
        exact = log_probs(case, FULL, OWN, Scorer())
        assert gap(log_probs(case, FULL, OWN, replace(PAGES, page_size=1)), exact) < ROUNDING
        assert gap(log_probs(case, FULL, OWN, PAGES), exact) > 100 * ROUNDING

    def test_all_nine_heads_are_all(self, case):
        exact, nine = log_probs(case, MIXED, SMALL, Scorer()), replace(FOUR, num_routed_heads=9)
        for scorer in (nine, replace(nine, residual=True)):
            assert gap(log_probs(case, MIXED, SMALL, scorer), exact) < ROUNDING

    def test_exact_keys_are_those_of_the_plain_case(self, case, model, ids):
        plain = Case(model, "copy", ids, NUM_ROWS)
        assert torch.equal(
            log_probs(case, MIXED, SMALL, Scorer()), plain.log_probs(bound_of(MIXED, SMALL))[0]
        )
        with pytest.raises(ValueError, match="judge it as ScoredCase"):
            evaluate([plain], plan_of(FULL, SMALL, PAGES))

    def test_a_pool_that_holds_the_history_is_refreshed_by_itself(self, case):
        wide = replace(SMALL, pool_size=400)
        exact = log_probs(case, FULL, wide, Scorer())
        assert gap(log_probs(case, FULL, replace(wide, refresh_every=5), Scorer()), exact) < ROUNDING
        assert gap(log_probs(case, FULL, replace(SMALL, refresh_every=5), Scorer()), exact) > ROUNDING

    def test_key_from_scores_another_layers_keys(self, case):
        plan = bound_of(FULL, OWN)
        layers = list(plan.layers)
        layers[5] = replace(layers[5], key_from=4)
        assert gap(case.log_probs(replace(plan, layers=tuple(layers)))[0], case.log_probs(plan)[0]) > ROUNDING


def test_what_it_cannot_judge_is_refused_by_name(case):
    for scorer, reason in (
        (Scorer(heads="kv_head"), "give heads layer"),
        (Scorer(kind="model_indexer"), "is not evaluated"),
        (Scorer(kind="learned"), "needs the weights None"),
        (replace(FOUR, num_routed_heads=10), "the model has 9 query heads"),
    ):
        with pytest.raises(ValueError, match=reason):
            evaluate([case], plan_of(FULL, SMALL, scorer))


def test_a_report_says_which_scorer_was_judged():
    assert described(bound_of(FULL, SMALL)) == "exact_qk"
    assert described(plan_of(FULL, SMALL, PAGES)) == "page_minmax of 16 tokens"
    routed = replace(FOUR, kind="int4_keys", residual=True, rerank_heads="all")
    assert described(plan_of(FULL, replace(SMALL, refresh_every=8), routed)) == (
        "int4_keys, scan by 4 routed heads and their residual, rerank by all heads, every 8 steps"
    )
