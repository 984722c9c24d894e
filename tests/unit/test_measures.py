"""Measures of selections, by hand and on the small model."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels.reference_index import IndexMap, measured_ranges
from sglang_blockreuse.layers.calibration.ageing import DISTANCES, ageing
from sglang_blockreuse.layers.calibration.case import Case
from sglang_blockreuse.layers.calibration.followers import follow, worst_coverage
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.measures import (
    aged_recall,
    jaccard,
    margin,
    mask_of,
    mass_recall,
    recall,
    rho,
)
from sglang_blockreuse.layers.calibration.overlap import collect
from sglang_blockreuse.layers.calibration.pattern import PER_HEAD, bound_of
from sglang_blockreuse.layers.calibration.report import Report
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.calibration.texts import Texts
from sglang_blockreuse.layers.plan import Scorer, Selection

# the four positions of the source, 0 to 3 here
ANCHOR, LATER = torch.tensor([[10.0, 9.0, 1.0, 0.0]]), torch.tensor([[10.0, 1.0, 9.5, 0.0]])


def sets(*positions):
    return mask_of(torch.tensor(positions), 6)


class TestByHand:
    def test_jaccard_is_common_over_all(self):
        """{0,1} and {0,2}: 1 of 3. A mean of sizes in the denominator would give 1/2."""
        assert jaccard(sets([0, 1]), sets([0, 2])).tolist() == pytest.approx([1 / 3])
        assert jaccard(sets([0, 1], [2, 3]), sets([0, 1], [4, 5])).tolist() == [1.0, 0.0]
        assert jaccard(sets([0, 1, 2, 3]), sets([3, 4, 5, 0])).tolist() == pytest.approx([2 / 6])

    def test_recall_asks_how_much_of_the_second_is_held(self):
        """A pool of three holds both that are wanted; what is wanted holds two thirds of the pool."""
        pool, wanted = sets([0, 1, 2]), sets([0, 2])
        assert recall(pool, wanted).tolist() == [1.0]
        assert recall(wanted, pool).tolist() == pytest.approx([2 / 3])
        assert recall(sets([0, 1]), wanted).tolist() == [0.5]

    def test_an_aged_list_is_compared_with_what_is_wanted_so_many_steps_later(self):
        """Row 0 holds {0,1}, row 1 {2,3}; row 1 wants {1,2}, row 2 {2,3}."""
        held, wanted = sets([0, 1], [2, 3], [4, 5]), sets([0, 1], [1, 2], [2, 3])
        assert aged_recall(held, wanted, 0).tolist() == [1.0, 0.5, 0.0]
        assert aged_recall(held, wanted, 1).tolist() == [0.5, 1.0]
        assert aged_recall(held, wanted, 2).tolist() == [0.0]

    def test_mass_is_relative_to_each_head_s_own_best(self):
        """Heads with .5 .3 .1 .1 and .1 .1 .2 .6 read positions 0 and 1: .8 of .8, and .2 of .8."""
        shares = torch.tensor([[[0.5, 0.3, 0.1, 0.1]], [[0.1, 0.1, 0.2, 0.6]]])
        read = torch.tensor([[[0, 1]], [[0, 1]]])
        torch.testing.assert_close(mass_recall(shares, read), torch.tensor([[1.0], [0.25]]))
        own = torch.tensor([[[0, 1]], [[3, 2]]])
        torch.testing.assert_close(mass_recall(shares, own), torch.ones(2, 1))

    def test_the_margin_is_between_the_last_wanted_and_the_first_that_is_not_kept(self):
        assert margin(ANCHOR, 2, 2).tolist() == [8.0]
        assert margin(ANCHOR, 1, 1).tolist() == [1.0]
        assert margin(ANCHOR, 2, 3).tolist() == [9.0], "a pool of three protects the best two"
        assert margin(ANCHOR, 2, 4).tolist() == [math.inf], "what holds everything loses nothing"

    def test_what_is_forced_or_not_yet_there_has_no_score(self):
        ranked = torch.tensor([[math.inf, 5.0, 3.0, 1.0, -math.inf]])
        assert margin(ranked, 2, 2).tolist() == [2.0]
        assert margin(ranked, 2, 4).tolist() == [math.inf]

    def test_rho_is_twice_the_largest_change_over_the_margin(self):
        """The second score falls by 8 and the third rises by 8.5, the margin is 8: 17 / 8."""
        assert rho(ANCHOR, LATER, margin(ANCHOR, 2, 2)).tolist() == [17 / 8]
        assert rho(ANCHOR, ANCHOR + 0.5, margin(ANCHOR, 2, 2)).tolist() == [1 / 8]

    def test_a_tie_has_no_rho(self):
        tied = torch.tensor([[3.0, 2.0, 2.0]])
        assert rho(tied, tied, margin(tied, 2, 2)).isnan().tolist() == [True]


@given(
    seed=st.integers(0, 2**31),
    size=st.integers(1, 6),
    more=st.integers(0, 4),
    scale=st.floats(0.01, 2.0),
)
def test_below_one_nothing_that_is_wanted_leaves_what_is_kept(seed, size, more, scale):
    """The guarantee itself, for a selection (more = 0) and for a pool."""
    generator = torch.Generator().manual_seed(seed)
    one = torch.rand(1, 12, generator=generator, dtype=torch.float64) * 10
    other = one + (torch.rand(1, 12, generator=generator, dtype=torch.float64) - 0.5) * scale
    kept = mask_of(one.topk(size + more).indices, 12)
    wanted = mask_of(other.topk(size).indices, 12)
    if rho(one, other, margin(one, size, size + more)) < 1:
        assert recall(kept, wanted).tolist() == [1.0]


SMALL = Selection(final_k=48, pool_size=96, sink=4, window=16)
NUM_LAYERS, NUM_HEADS = 30, 9
PATTERN = "FRXRXAXR" + "R" * 22


@pytest.fixture(scope="module")
def case(model_path):
    return ScoredCase(Llama(model_path), "prose", Texts(model_path).make("prose", 0, 300), 12)


class TestOnTheModel:
    def test_every_layer_that_reads_a_list_has_its_measures(self, case):
        found = follow([case], bound_of(PATTERN, SMALL))
        assert [at.layer for at in found] == [n for n in range(NUM_LAYERS) if n != 5], (
            "layer 5 attends to all"
        )
        assert [at.anchor for at in found[:7]] == [None, 0, 0, 2, 0, 5, 6]
        for at in found:
            assert len(at.mass_by_head) == len(at.low_by_head) == NUM_HEADS
            assert (at.coverage is not None) == (at.role == "reindex")
            assert (at.rho is None) == (at.role == "full")
            assert 0 < at.mass_by_head[at.worst_head] <= at.mass <= 1 + 1e-6
            assert all(low <= mean + 1e-6 for low, mean in zip(at.low_by_head, at.mass_by_head, strict=True))
            assert at.jaccard <= at.recall <= (1.0 if at.coverage is None else at.coverage) + 1e-6

    def test_a_layer_s_own_list_is_its_own(self, case):
        for at in follow([case], bound_of("F" * NUM_LAYERS, SMALL)):
            assert (at.jaccard, at.recall) == (1.0, 1.0)

    def test_a_pool_of_everything_covers_everything(self, case):
        everything = Selection(final_k=48, pool_size=400, sink=4, window=16)
        for at in follow([case], bound_of("F" + "X" * 29, everything))[1:]:
            assert (at.coverage, at.recall, at.stable) == (1.0, 1.0, 1.0)

    def test_larger_pools_are_seen_to_cover_more(self, case):
        """The ladder of a plan is what plans with those pools have."""
        plan = bound_of("F" + "X" * 29, SMALL)
        worst = worst_coverage(follow([case], plan))
        assert worst[0] < worst[1] < worst[2]
        assert worst[3] == 1.0, "eight times 48 are more than the text"
        four = bound_of("F" + "X" * 29, Selection(final_k=48, pool_size=4 * 48, sink=4, window=16))
        assert min(at.coverage for at in follow([case], four)[1:]) == pytest.approx(worst[2])
        text = Report(
            model="m", options={}, environment={}, judged=[], followers={"mine": follow([case], plan)}
        )
        assert f"4 x final_k: {worst[2]:.3f}" in text.to_markdown()

    def test_a_layer_that_follows_no_full_one_has_no_ladder(self, case):
        found = follow([case], bound_of("FXR" + "F" * 27, SMALL))
        assert [bool(at.coverage_by_pool) for at in found[:3]] == [False, True, False]
        assert worst_coverage(found[2:]) == []

    def test_lists_per_kv_head_hold_more_of_the_heads_mass(self, case):
        plans = [bound_of("F" * NUM_LAYERS, SMALL, scorer) for scorer in (Scorer(), PER_HEAD)]
        one, own = (sum(at.mass for at in follow([case], plan)) for plan in plans)
        assert own > one

    def test_the_scorer_of_the_plan_is_measured(self, case):
        plans = [
            bound_of("F" * NUM_LAYERS, SMALL, scorer)
            for scorer in (Scorer(kind="int4_keys"), Scorer(kind="page_minmax"))
        ]
        four_bits, pages = (sum(at.recall for at in follow([case], plan)) / NUM_LAYERS for plan in plans)
        assert 0.85 < four_bits < 1
        assert pages < four_bits

    def test_a_text_that_is_read_whole_has_no_lists(self, case):
        assert follow([case], bound_of("F" * NUM_LAYERS, Selection(final_k=400))) == []

    def test_the_report_shows_them_by_layer_and_keeps_them_by_head(self, case):
        found = follow([case], bound_of(PATTERN, SMALL))
        report = Report(model="m", options={}, environment={}, judged=[], followers={"mine": found})
        lines = report.to_markdown().split("## What layers read under mine")[1].splitlines()
        (line,) = [line for line in lines if line.startswith("6 | reindex | 5 | ")]
        assert f"{found[5].coverage:.3f}" in line
        assert f"{found[5].mass_by_head[found[5].worst_head]:.3f} ({found[5].worst_head})" in line
        assert len(report.to_dict()["lists"]["mine"][0]["mass_by_head"]) == NUM_HEADS


def test_two_texts_weigh_by_their_rows(case, model_path):
    other = Case(Llama(model_path), "prose", Texts(model_path).make("prose", 1, 300), 4)
    plan = bound_of("F" + "R" * 29, SMALL)
    both, one, two = (follow(cases, plan)[1] for cases in ([case, other], [case], [other]))
    assert both.recall == pytest.approx((12 * one.recall + 4 * two.recall) / 16)


class TestAgeing:
    def test_what_is_fresh_is_whole_and_either_age_loses(self, case):
        table = ageing([case], SMALL)
        assert table[0][0] == 1.0, "the layer's own list, now"
        assert table[0][0] > table[0][1] > table[0][4] > 0, "steps alone"
        assert table[0][0] > table[1][0] > table[5][0] > 0, "layers alone"
        assert table[5][4] < min(table[5][0], table[0][4]), "both together lose more than either"
        assert math.isnan(table[0][5]), "twelve rows are not sixteen steps apart"

    def test_it_is_what_overlap_says_where_only_layers_lie_between(self, case):
        """Against the tables of a search, whose recall counts sinks and window too."""
        forced, k = SMALL.sink + SMALL.window, SMALL.final_k
        for distance, row in zip(DISTANCES[:5], ageing([case], SMALL), strict=False):
            with_forced = collect([case], SMALL).by_distance("recall")[distance]
            assert with_forced == pytest.approx((forced + (k - forced) * row[0]) / k, abs=1e-5)

    def test_texts_that_are_too_short_have_no_table(self, case):
        assert ageing([case], Selection(final_k=400)) == []

    def test_the_report_has_the_table_and_the_picture(self, case, tmp_path):
        pytest.importorskip("matplotlib")
        table = ageing([case], SMALL)
        report = Report(model="m", options={}, environment={}, judged=[], ageing={48: table})
        assert f"4 | {table[4][0]:.3f} | {table[4][1]:.3f}" in report.to_markdown()
        report.write(tmp_path)
        assert (tmp_path / "ageing-48.png").stat().st_size > 1000


class TestParametersAndResults:
    """Two axes: one map in every layer, and one layer's list in every layer."""

    @staticmethod
    def lists(case, pattern, scorer):
        found = {}
        case.selections(
            bound_of(pattern, SMALL, scorer),
            lambda layer, read, lent, logits: found.update({layer.layer: mask_of(read, logits.shape[-1])}),
        )
        return found

    @pytest.fixture
    def shared_map(self, case, monkeypatch):
        """One projection of 32 channels for all layers, no layer's own."""
        torch.manual_seed(0)
        num_channels, (num_kv_heads, head_dim) = 32, (case.model.num_kv_heads, case.model.head_dim)
        basis_CM = torch.linalg.qr(torch.randn(num_kv_heads * head_dim, num_channels)).Q.T.contiguous()
        per_head = basis_CM.unflatten(1, (num_kv_heads, -1)).transpose(0, 1)
        query_QCD = per_head.repeat_interleave(NUM_HEADS // num_kv_heads, 0).contiguous()
        keys_TEC = torch.einsum("htd,hcd->tc", case._keys[0], per_head)[:, None]
        index = IndexMap(basis_CM[None], query_QCD, *measured_ranges(keys_TEC))
        monkeypatch.setattr(case, "weights", {"one": dict.fromkeys(range(NUM_LAYERS), index)}, raising=False)
        return Scorer(kind="learned", weights="one", weights_sha256="0" * 64)

    def test_one_map_in_every_layer_gives_every_layer_a_list_of_its_own(self, case, shared_map):
        lists = self.lists(case, "F" * NUM_LAYERS, shared_map)
        for layer in range(1, NUM_LAYERS):
            assert float(jaccard(lists[layer - 1], lists[layer]).mean()) < 0.95, layer

    def test_one_list_in_every_layer_needs_no_map_in_common(self, case, shared_map):
        for scorer in (Scorer(), shared_map):
            lists = self.lists(case, "F" + "R" * (NUM_LAYERS - 1), scorer)
            assert all(torch.equal(lists[0], each) for each in lists.values())
