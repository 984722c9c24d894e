"""Calibration on the real model: the evaluator's laws, the tables behind a search, the search itself, the commands."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_blockreuse.cli import main
from sglang_blockreuse.kernels import reference_select
from sglang_blockreuse.layers.calibration.case import Case, Figures, evaluate
from sglang_blockreuse.layers.calibration.judge import at_budget, interval
from sglang_blockreuse.layers.calibration.llama import Llama, UnsupportedModel
from sglang_blockreuse.layers.calibration.overlap import MEASURES, collect
from sglang_blockreuse.layers.calibration.pattern import (
    EXACT,
    PER_HEAD,
    bound_of,
    pattern_of,
    plan_of,
    split,
    uniform,
)
from sglang_blockreuse.layers.calibration.replay import replay
from sglang_blockreuse.layers.calibration.search import (
    Search,
    demotions,
    lendings,
    prior,
    promotions,
    shifts,
    thrifts,
)
from sglang_blockreuse.layers.calibration.texts import ALL_KINDS, CHOICE, HELD_OUT, KINDS, SEARCH, Texts
from sglang_blockreuse.layers.plan import Selection
from sglang_blockreuse.layers.plan_loader import load_plan

SMALL = Selection(final_k=48, pool_size=96, sink=4, window=16)
NUM_LAYERS = 30
MIXED = "FXXFXXXFRRRXXFRRFXXXXXFXXXXXXR"
# log-probabilities of one sequence computed in passes of other shapes, float32
ROUNDING = 1e-4


@pytest.fixture(scope="module")
def texts(model_path):
    return Texts(model_path)


@pytest.fixture(scope="module")
def case(model_path, texts):
    return Case(Llama(model_path), "prose", texts.make("prose", 0, 300), 12)


class TestEvaluator:
    def test_rows_in_one_pass_equal_the_prefill_of_the_whole_text(self, case, model_path, texts):
        ids = texts.make("prose", 0, 300)
        keys, _ = case.model.prefill(torch.tensor(ids[:-1]), 0)
        case.log_probs(None)
        assert (case._keys - keys).abs().max() < ROUNDING * keys.abs().max()

    @pytest.mark.parametrize("scorer", [EXACT, PER_HEAD], ids=["layer", "kv_head"])
    def test_reading_everything_is_dense(self, case, scorer):
        everything = Selection(final_k=400, pool_size=400)
        for pattern in ("F" * NUM_LAYERS, MIXED, "A" + MIXED[1:], "D" * NUM_LAYERS):
            log_probs, _ = case.log_probs(bound_of(pattern, everything, scorer))
            assert (log_probs - case.dense).abs().max() < ROUNDING

    def test_reading_less_is_seen_to_differ(self, case):
        assert case.figures(bound_of("F" * NUM_LAYERS, SMALL)).kl > 100 * ROUNDING

    @pytest.mark.parametrize("scorer", [EXACT, PER_HEAD], ids=["layer", "kv_head"])
    def test_a_pool_of_everything_gives_every_layer_its_own_selection(self, case, scorer):
        wide = Selection(final_k=48, pool_size=400, sink=4, window=16)
        pooled, _ = case.log_probs(bound_of("F" + "X" * 29, wide, scorer))
        own, _ = case.log_probs(bound_of("F" * 30, wide, scorer))
        narrow, _ = case.log_probs(bound_of("F" + "X" * 29, SMALL, scorer))
        assert (pooled - own).abs().max() < ROUNDING
        assert (narrow - own).abs().max() > 100 * ROUNDING

    def test_every_kv_head_reads_by_a_list_of_its_own(self, case):
        """Against the law of selection, in the first layer, whose queries and keys are those of dense decode."""
        plan, model = bound_of("F" * NUM_LAYERS, SMALL, PER_HEAD), case.model
        num_keys = case.num_tokens + case.num_rows
        hidden = model.embed(case._rows)
        q_QRD, _, _ = model.qkv(0, hidden, case._positions)
        case.log_probs(None)
        keys_HJD = case._keys[0].clone()
        logits = case._grouped(q_QRD) @ keys_HJD.transpose(1, 2) * model.head_dim**-0.5
        logits_QRJ = logits.view(model.num_q_heads, case.num_rows, -1).masked_fill(case.future, -torch.inf)
        found_QRK = case._indices(plan.layers[0], plan, logits_QRJ, {}).at
        expected, _ = reference_select.scan(
            q_QRD.transpose(0, 1).double(),
            keys_HJD.transpose(0, 1).double(),
            torch.arange(num_keys).repeat(case.num_rows),
            torch.arange(case.num_rows + 1) * num_keys,
            kv_lens_R=case._positions + 1,
            size=SMALL.final_k,
            scale=model.head_dim**-0.5,
            heads="kv_head",
            num_sinks=SMALL.sink,
            window=SMALL.window,
        )
        each = expected.repeat_interleave(model.num_q_heads // model.num_kv_heads, 1).transpose(0, 1)
        assert torch.equal(found_QRK.sort(-1).values.int(), each.int())
        assert not torch.equal(each[0], each[-1])

    @pytest.mark.parametrize("since", [3, 13, 22])
    def test_a_pass_that_starts_late_equals_the_whole_pass(self, case, since):
        """Also as another plan that agrees up to there and reads what nobody read before."""
        _, trace = case.log_probs(bound_of("F" * NUM_LAYERS, SMALL))
        for follower in "FXR":
            plan = bound_of("F" * since + follower * (NUM_LAYERS - since), SMALL)
            whole, _ = case.log_probs(plan)
            case.log_probs(None)
            late, _ = case.log_probs(plan, since=since, trace=trace)
            assert torch.equal(late, whole)

    def test_scorers_it_does_not_compute_are_refused(self, case):
        from msgspec.structs import replace

        plan = bound_of("F" * NUM_LAYERS, SMALL)
        with pytest.raises(ValueError, match="judge it as ScoredCase"):
            evaluate([case], replace(plan, scorer=replace(plan.scorer, heads="kv_head")))

    def test_oracle_replay_separates_own_misses_from_those_passed_on(self, case):
        found = replay(case, bound_of("F" + "R" * 29, SMALL))
        assert found.direct[0] == pytest.approx(found.total[0], rel=1e-3)
        assert found.total[-1] > 1.5 * found.direct[-1]
        exact = replay(case, bound_of("F" * 30, Selection(final_k=400)))
        assert max(*exact.direct, *exact.total) < ROUNDING


def test_other_models_are_refused_by_name(tmp_path, model_path):
    config = json.loads((model_path / "config.json").read_text())
    for key, value in (("architectures", ["Qwen3ForCausalLM"]), ("rope_scaling", {"rope_type": "llama3"})):
        changed = {**config, key: value}
        if key == "rope_scaling":
            del changed["rope_parameters"]
        (tmp_path / "config.json").write_text(json.dumps(changed))
        with pytest.raises(UnsupportedModel, match=r"Qwen3ForCausalLM|llama3"):
            Llama(tmp_path)


class TestTexts:
    @pytest.mark.parametrize("kind", ALL_KINDS)
    def test_every_kind_has_the_length_that_is_asked_for(self, texts, kind):
        ids = texts.make(kind, 3, 700)
        assert len(ids) == 700
        assert ids == texts.make(kind, 3, 700)
        assert ids != texts.make(kind, 4, 700)

    def test_a_copy_says_its_text_twice(self, texts):
        ids = texts.make("copy", 0, 800)
        assert ids[-200:] == ids[ids.index(ids[-200]) :][:200] or _occurs_twice(ids, ids[-60:])

    def test_pairs_come_back_in_another_order(self, texts, model_path):
        from tokenizers import Tokenizer

        text = Tokenizer.from_file(str(model_path / "tokenizer.json")).decode(texts.make("pairs", 0, 600))
        first, second = (part.splitlines() for part in text.split("\n\n"))
        assert set(second[:-1]) < set(first)
        assert [line for line in first if line in second] != second[:-1]

    @pytest.mark.parametrize("kind", ["prose", "code", "copy"])
    def test_what_judges_is_cut_from_chapters_that_the_search_never_saw(self, texts, kind):
        """No stretch of 40 tokens is in both, while texts of one set share some where there are few chapters."""
        sets = {
            first: [texts.make(kind, first + i, 3000) for i in range(6)]
            for first in (SEARCH, CHOICE, HELD_OUT)
        }
        stretches = {
            first: [{tuple(ids[at : at + 40]) for at in range(len(ids) - 40)} for ids in made]
            for first, made in sets.items()
        }
        for one, other in ((SEARCH, CHOICE), (SEARCH, HELD_OUT), (CHOICE, HELD_OUT)):
            assert not set().union(*stretches[one]) & set().union(*stretches[other])
        assert kind == "code" or any(
            a & b for i, a in enumerate(stretches[SEARCH]) for b in stretches[SEARCH][:i]
        )

    def test_an_unknown_kind_is_refused(self, texts):
        with pytest.raises(ValueError, match="kind 'poem' is unknown"):
            texts.make("poem", 0, 10)
        with pytest.raises(ValueError, match="seed is 3000, but seeds run from 0 to 2999"):
            texts.make("prose", 3000, 10)


def _occurs_twice(ids, part):
    return sum(ids[i : i + len(part)] == part for i in range(len(ids))) == 2


class TestOverlap:
    def test_a_layer_serves_itself_wholly(self, case):
        overlap = collect([case], SMALL)
        for name in ("jaccard", "recall", "coverage"):
            assert torch.equal(overlap.tables[name].diagonal(), torch.ones(NUM_LAYERS))
        assert (
            (overlap.tables["coverage"] >= overlap.tables["recall"])
            .logical_or(overlap.tables["recall"].isnan())
            .all()
        )
        assert overlap.by_kind.keys() == {"prose"}
        assert all(len(overlap.by_distance(name)) == 13 for name in MEASURES)
        assert overlap.loss("R").diagonal().abs().max() == 0
        assert overlap.loss("X").nansum() < overlap.loss("R").nansum()


class TestSearch:
    def test_the_prior_is_the_cheapest_of_all_patterns(self):
        """Against all choices of three full layers of eight."""
        from itertools import combinations

        torch.manual_seed(0)
        loss = torch.rand(8, 8)

        def cost(full):
            anchors = [max(f for f in full if f <= layer) for layer in range(8)]
            return sum(float(loss[anchor, layer]) for layer, anchor in enumerate(anchors) if anchor != layer)

        best = min(((0, *rest) for rest in combinations(range(1, 8), 2)), key=cost)
        assert prior(loss, 3, "R") == "".join("F" if layer in best else "R" for layer in range(8))
        assert prior(loss, 8, "R") == "F" * 8
        assert prior(loss, 2, "X", first=3).startswith("DDDF")
        with pytest.raises(ValueError, match="num_full is 9"):
            prior(loss, 9, "R")

    def test_moves(self):
        assert list(demotions("DFRF", "R")) == ["DFRR"]
        assert list(shifts("FRRF")) == ["FRFR"]
        assert list(promotions("FXR")) == ["FFR", "FXF"]
        assert list(promotions("AXR", "A")) == ["AAR", "AXA"]
        assert list(thrifts("AFXR", "RX")) == ["FFXR", "ARXR", "AXXR", "AFRR"]
        assert list(thrifts("AFXR", "R")) == ["FFXR", "ARXR", "AFRR"]
        assert list(demotions("FFFX", "X")) == ["FXFX", "FFXX"]
        assert list(lendings("FFXR", 2, "XR")) == ["F F X0 R", "FFRR", "F F R0 R"]
        assert list(lendings("FFXR", 3, "R")) == ["F F X R1", "F F X R0"]
        assert list(lendings("FFXR", 1, "XR")) == []

    def test_a_layer_that_lends_no_more_is_forgotten(self):
        assert list(demotions("F F X0 R", "R")) == ["FRXR"]
        assert list(demotions("F F F X1", "R")) == ["FRFX", "FFRX"]
        assert list(shifts("F F X X0")) == ["F X F X0"]
        assert list(shifts("FXFX")) == ["FFXX", "FXXF"]

    def test_every_step_is_measured_on_the_pattern_at_hand(self, case):
        search = Search([case], SMALL, num_screened=1, num_confirmed=1)
        found = search.shrink("FFRFFF" + "R" * 24, "R", 4)
        assert found.num_full == 4
        assert found.kl == pytest.approx(search.measure(found.pattern).kl, rel=1e-3)
        others = [search.measure(other).kl for other in demotions("FFRFFF" + "R" * 24, "R")]
        assert found.kl == pytest.approx(min(others), rel=1e-3)
        polished = search.polish(found.pattern, 1)
        assert polished.kl <= found.kl
        swept = search.sweep(polished.pattern, "R", lambda pattern: pattern.startswith("F"))
        assert swept.kl <= polished.kl
        assert swept.num_full == 4
        exchanged = search.exchange(swept.pattern, "R", 1)
        assert exchanged.kl <= swept.kl
        assert exchanged.num_full == 4

    def test_a_descent_loses_least_per_cost_that_it_saves(self, case):
        """Costs are made up."""
        search = Search([case], SMALL, num_screened=1, num_confirmed=20)
        start, worth = "AXXF" + "R" * 26, {"A": 9.0, "F": 5.0, "X": 2.0, "R": 1.0}

        def cost(pattern: str) -> float:
            return sum(worth[word[0]] for word in split(pattern))

        base = search.measure(start)
        rates = {
            other: (search.measure(other).kl - base.kl) / (cost(start) - cost(other))
            for other in thrifts(start, "RX")
        }
        found = search.descend(start, "RX", cost, cost(start) - 0.5)
        assert found.pattern == min(rates, key=rates.__getitem__)
        cheap = search.descend(start, "R", cost, 0.0)
        assert cheap.pattern == "F" + "R" * 29, "nothing is left to save"

    def test_kinds_weigh_alike_and_the_worst_is_named(self, case):
        search = Search([case, case, _relabelled(case, "other")], SMALL)
        found = search.measure("F" * NUM_LAYERS)
        assert found.kl == pytest.approx(found.worst_kl)
        assert found.worst in ("prose", "other")


def _relabelled(case, kind):
    from copy import copy

    other = copy(case)
    other.kind = kind
    return other


def test_a_pattern_is_a_plan_and_back():
    elsewhere = " ".join(["A", "F", "X0", "R0", "R"] + ["X"] * 25)
    for pattern in (MIXED, uniform(30, 4, "X", first=2), "D" * 30, elsewhere):
        assert pattern_of(plan_of(pattern, SMALL, name="x").bind(30, None)) == pattern
    assert bound_of("FXRR", SMALL).layers[3].anchor == 1
    assert uniform(6, 3, "R", first=1) == "DFRRFR"
    layers = bound_of(elsewhere, SMALL).layers
    assert layers[0].attend == "all"
    assert [layer.anchor for layer in layers[:7]] == [None, None, 0, 0, 2, 1, 1]


def test_a_plan_at_another_budget_keeps_the_multiple_of_its_pool():
    plan = bound_of("FXX", Selection(final_k=196, pool_size=324))
    selection = at_budget(plan, 64).selection
    assert (selection.final_k, selection.pool_size) == (132, 196)
    assert at_budget(plan, 128) == plan
    assert at_budget(bound_of("FRR", Selection(final_k=196)), 256).selection.pool_size is None


def test_the_interval_is_that_of_the_mean():
    low, high = interval([1.0, 2.0, 3.0, 4.0])
    assert 1.0 < low < 2.5 < high < 4.0
    assert interval([2.0, 2.0]) == (2.0, 2.0)


def test_figures_weigh_rows_alike():
    one, two = (
        Figures(torch.full((n,), x), torch.zeros(n), torch.ones(n, dtype=torch.bool), torch.full((n, 1), x))
        for n, x in ((1, 4.0), (3, 0.0))
    )
    assert Figures.joined([one, two]).kl == 1.0
    assert Figures.joined([one, two]).listed_L == [1.0]


def test_calibrate_writes_a_plan_that_loads_and_a_report(model_path, tmp_path, capsys):
    words = [
        "calibrate",
        str(model_path),
        "--out",
        str(tmp_path),
        "--full",
        "29",
        "--rounds",
        "0",
        "--rows",
        "4",
    ]
    words += [
        "--texts",
        "1",
        "--lengths",
        "300",
        "340",
        "--final-k",
        "80",
        "--pool-size",
        "120",
        "--name",
        "found",
    ]
    words += ["--start", "F" * 30, "--k", "12", "30"]
    assert main(words) == 0
    plan = load_plan(tmp_path / "plan.yaml")
    assert plan.name == "found"
    assert pattern_of(plan.bind(30, "LlamaForCausalLM")).count("F") == 29
    assert plan.spec.scorer == PER_HEAD
    report = json.loads((tmp_path / "report.json").read_text())
    assert {row["name"] for row in report["held_out"]} >= {
        "found",
        "own lists everywhere",
        "own lists per KV head",
        "groups of 4, reuse",
    }
    assert report["search"][-1]["num_full"] == 29
    judged = report["held_out"][0]
    assert set(judged["kl_by_kind"]) == set(judged["nll_by_kind"]) == set(KINDS)
    assert judged["k"] == 12
    assert judged["kl_interval"][0] <= judged["kl"] <= judged["kl_interval"][1]
    assert {row["k"] for row in report["held_out"]} == {12, 30}
    for file in ("report.json", "report.md"):
        text = (tmp_path / file).read_text()
        assert str(model_path) not in text
        assert "command" not in text, "a command line holds paths of this machine"
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert (tmp_path / "overlap.png").stat().st_size > 1000
    assert "--- | ---" in (tmp_path / "report.md").read_text()
    assert "found" in capsys.readouterr().out


def test_a_budget_that_no_change_reaches_is_said(model_path, tmp_path, capsys):
    words = [
        "--texts",
        "prose=1",
        "--rows",
        "4",
        "--lengths",
        "300",
        "300",
        "--final-k",
        "80",
        "--pool-size",
        "120",
    ]
    words += ["--start", "F" + "R" * 29, "--full", "1", "--rounds", "0", "--bytes", "0.01", "--k", "12"]
    assert main(["calibrate", str(model_path), "--out", str(tmp_path), *words]) == 0
    assert "--bytes 0.01 is not reached" in capsys.readouterr().err
    assert load_plan(tmp_path / "plan.yaml").bind(30, None).layers[1].role == "reuse"


def test_calibrate_says_what_it_cannot_do(tmp_path, capsys, model_path):
    assert main(["calibrate", str(model_path), "--texts", "copy=many", "--out", str(tmp_path)]) == 1
    assert "--texts copy=many: give one number" in capsys.readouterr().err
    assert main(["calibrate", str(model_path), "--bytes", "20", "--out", str(tmp_path)]) == 1
    assert "--bytes is 20.0, but it is a share" in capsys.readouterr().err
    assert main(["calibrate", str(tmp_path / "missing")]) == 1
    assert "there is no config.json. Give the folder of a model" in capsys.readouterr().err


class TestPlanCommand:
    def test_list(self, capsys):
        assert main(["plan", "list"]) == 0
        assert "full" in capsys.readouterr().out

    def test_validate(self, capsys, tmp_path, model_path):
        assert main(["plan", "validate", "full", "--model", str(model_path)]) == 0
        assert "valid, fingerprint" in capsys.readouterr().out
        (tmp_path / "bad.yaml").write_text("version: 1\nname: x\nlayers: [{layers: 0, role: reuse}]\n")
        assert main(["plan", "validate", str(tmp_path / "bad.yaml")]) == 1
        assert "bad.yaml: selection" in capsys.readouterr().err

    def test_explain(self, capsys, model_path):
        assert main(["plan", "explain", "full", "--model", str(model_path), "--tokens", "4096"]) == 0
        assert "8 rows of 4096 tokens" in capsys.readouterr().out
        assert main(["plan", "explain", "full", "--model", str(model_path), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["ratio"] == 1.0
        assert main(["plan", "explain", "full"]) == 1
        assert "--model" in capsys.readouterr().err
