"""The benchmarks' statistics, and the gate that no bad answer passes."""

from __future__ import annotations

import math
import random
import statistics

import published_tables
import pytest
import quality
import report_quality
import report_serving
from bench_records import measurement, usage
from contexts import Context
from gate import Bounds, judge, outcome_problems
from homes import HOMES, configured, reordered
from meter import COVERED, covering, problem
from meter import Arm as MeterArm
from mixed import same_up_to_a_tie
from serving import Arm, account, turn_order
from soak import growth_problems, memory_slope
from stats import bootstrap, gap_share, paired_ratio, percentile, slope_per_hour

from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.demo.client import Position
from sglang_blockreuse.demo.compare import kl_divergence
from sglang_blockreuse.demo.prompts import Prompt


def distribution(rng, size, sharpness):
    weights = [math.exp(sharpness * rng.gauss(0, 1)) for _ in range(size)]
    logprobs = {token: math.log(w / sum(weights)) for token, w in enumerate(weights)}
    return Position(logprobs, top=max(logprobs, key=logprobs.__getitem__))


class TestKl:
    def test_the_rest_as_one_event_is_a_tight_lower_bound(self):
        rng = random.Random(1)
        for _ in range(50):
            p, q = distribution(rng, 2000, 3.0), distribution(rng, 2000, 3.0)
            exact = sum(math.exp(a) * (a - q.logprobs[t]) for t, a in p.logprobs.items())
            cut = covering(p)
            assert sum(map(math.exp, cut.logprobs.values())) >= COVERED
            assert len(cut.logprobs) < len(p.logprobs)
            bound = kl_divergence(cut, q)
            assert bound <= exact + 1e-12
            assert bound == pytest.approx(exact, rel=0.01)

    def test_the_whole_vocabulary_gives_the_exact_value(self):
        rng = random.Random(2)
        p, q = distribution(rng, 300, 1.0), distribution(rng, 300, 1.0)
        exact = sum(math.exp(a) * (a - q.logprobs[t]) for t, a in p.logprobs.items())
        assert kl_divergence(p, q) == pytest.approx(exact, rel=1e-9)


class TestBootstrap:
    def test_the_interval_covers_the_truth_as_often_as_it_says(self):
        rng = random.Random(3)
        covered = 0
        for trial in range(200):
            sample = [rng.gauss(1.0, 2.0) for _ in range(30)]
            found = bootstrap(sample, statistics.fmean, seed=trial, num=400)
            covered += found.low <= 1.0 <= found.high
        # 95 % nominal; a percentile bootstrap of 30 clusters is a little narrow
        assert 0.88 * 200 <= covered <= 0.99 * 200

    def test_clusters_count_and_not_what_is_inside_them(self):
        """Negative control: a context repeated ten times is no more evidence than once."""
        pairs = [(0.1, 0.5), (0.4, 0.5), (0.2, 0.9)]
        alone = bootstrap(pairs, gap_share)
        inside = bootstrap([(10 * kl, 10 * base) for kl, base in pairs], gap_share)
        assert (inside.low, inside.high) == pytest.approx((alone.low, alone.high))
        as_clusters = bootstrap(pairs * 10, gap_share)
        assert as_clusters.high - as_clusters.low < 0.6 * (alone.high - alone.low)

    def test_the_share_of_the_gap(self):
        assert gap_share([(0.0, 0.4), (0.0, 0.1)]) == 1.0
        assert gap_share([(0.4, 0.4), (0.1, 0.1)]) == 0.0
        assert gap_share([(0.1, 0.4), (0.1, 0.0)]) == pytest.approx(0.5)
        assert gap_share([(0.6, 0.4)]) < 0
        assert math.isnan(gap_share([(0.1, 0.0)]))

    def test_no_cluster_is_refused(self):
        with pytest.raises(ValueError, match="at least one cluster"):
            bootstrap([], statistics.fmean)


def test_percentiles_are_values_that_were_measured():
    values = list(range(1, 101))
    assert [percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)] == [50, 95, 99, 100]
    assert percentile([7.0], 0.5) == percentile([7.0], 0.99) == 7.0


def test_ratios_are_of_arms_within_one_round():
    slow_machine = {0: 10.0, 1: 100.0, 2: 1000.0}
    assert paired_ratio({r: v / 4 for r, v in slow_machine.items()}, slow_machine).value == 0.25
    with pytest.raises(ValueError, match="no round measured both"):
        paired_ratio({0: 1.0}, {1: 1.0})


class TestMemory:
    def grow(self, per_second):
        return [{"seconds": float(s), "rss_mb": 1000 + per_second * s} for s in range(0, 1200, 5)]

    def test_a_flat_server_passes_and_a_growing_one_does_not(self):
        assert growth_problems(self.grow(0.0)) == []
        assert len(growth_problems(self.grow(0.5))) == 1

    def test_the_slope_is_per_hour(self):
        assert memory_slope(self.grow(0.5)) == pytest.approx(1800)
        assert slope_per_hour([0, 1, 2], [5, 5, 5]) == 0


ENVIRONMENT = {
    "hardware": {"cpu": "x", "cores": 2, "memory_gib": 24, "gpu": None},
    "packages": {"sglang": "1", "torch": "2"},
    "commit": "c",
    "python": "3",
    "time": "2026-12-01T00",
}
CONTEXT = Context("A/0", "A", Prompt(tuple(range(400)), (40, 140, 140, 300, 300, 390), (0, 1, 2), "", ""), ())


class TestProblems:
    def test_a_measurement_that_reused_all_it_could_is_one(self):
        assert problem(CONTEXT, MeterArm("seam", 0.05), usage(), homes=HOMES["leading"]) is None
        for name in HOMES.keys() - {"leading"}:
            found = usage(reused_tokens=340, prefix_tokens=40)
            assert problem(CONTEXT, MeterArm("none", 0.0), found, homes=HOMES[name]) is None

    def test_a_first_block_may_begin_as_another_document_and_no_more(self):
        arm, homes = MeterArm("none", 0.0), HOMES["library-2"]
        assert problem(CONTEXT, arm, usage(reused_tokens=335, prefix_tokens=45), homes=homes) is None
        assert "345 reused" in problem(CONTEXT, arm, usage(reused_tokens=335, prefix_tokens=44), homes=homes)
        found = problem(CONTEXT, arm, usage(reused_tokens=240, prefix_tokens=140), homes=homes)
        assert found == "140 tokens are an exact prefix, and with them the first block"

    @pytest.mark.parametrize(
        ("found", "message"),
        [
            (usage(skipped_reason="not_cached"), "reuse was skipped: not_cached"),
            (usage(reused_tokens=200), "210 reused and repaired tokens, but the blocks have 250"),
            (usage(policy="head"), "policy head chose what was repaired, not seam"),
            (None, "no meta_info.blockreuse"),
        ],
        ids=["skipped", "longer prefix", "another policy", "stock server"],
    )
    def test_others_are_none(self, found, message):
        assert message in problem(CONTEXT, MeterArm("seam", 0.05), found, homes=HOMES["leading"])


def test_a_control_is_measured_at_a_share_of_its_own():
    arms = quality.arms_of(["query", "random@0.05"], [0.0, 0.05, 0.1])
    assert [arm.name for arm in arms] == ["none 0", "query 0.05", "query 0.1", "random 0.05"]


class TestGate:
    bounds = Bounds(max_kl=0.15, min_top1=0.9, min_first=0.8)

    def test_close_answers_pass(self):
        verdict = judge([measurement(f"A/{i}") for i in range(6)], self.bounds)
        assert verdict.green
        assert verdict.mean_kl == pytest.approx(0.02)

    @pytest.mark.parametrize(
        ("planted", "message"),
        [
            ({"kl": 4.0}, "mean KL is"),
            ({"same": False}, "top-1 agrees"),
            ({"problem": "reuse was skipped: not_cached"}, "not_cached"),
        ],
        ids=["distributions differ", "answers differ", "nothing was reused"],
    )
    def test_one_planted_answer_turns_it_red(self, planted, message):
        sample = [measurement(f"A/{i}") for i in range(4)]
        verdict = judge([*sample, measurement("A/4", **planted)], self.bounds)
        assert not verdict.green
        assert any(message in text for text in verdict.problems)

    def test_nothing_compared_is_red(self):
        assert not judge([], self.bounds).green

    def test_every_timed_request_must_have_reused(self):
        assert outcome_problems({"reused": 20, "exact_prefix": 4}, 24) == []
        assert outcome_problems({"reused": 18, "no_blocks": 6}, 18) == []
        assert outcome_problems({"reused": 20, "not_cached": 4}, 24) == ["4 requests: not_cached"]
        assert outcome_problems({"reused": 20}, 24) == ["24 marked requests were sent, the server counted 20"]


def serving_records(*, gate_problems=(), round_problems=()):
    run = {
        "record": "serving",
        "environment": {
            "hardware": {"cpu": "x", "cores": 2, "gpu": None},
            "packages": {},
            "commit": "c",
            "time": "t",
        },
        "options": {
            "traffic": "warm",
            "per_prompt": 6,
            "documents": 50,
            "zipf": 1.0,
            "clients": 8,
            "rate": "inf",
            "rounds": 2,
            "requests": 24,
            "new_tokens": 16,
        },
    }
    gate = {
        "record": "gate",
        "arm": "seam",
        "green": not gate_problems,
        "problems": list(gate_problems),
        "num_answers": 6,
        "mean_kl": 0.05,
        "top1": 0.95,
        "same_first": 1.0,
    }
    rounds = []
    for number in range(2):
        for arm, ttft in (("stock", 8000.0), ("seam", 1000.0)):
            rounds.append(
                {
                    "record": "round",
                    "arm": arm,
                    "round": number,
                    "problems": list(round_problems) if arm == "seam" else [],
                    "input_lens": [1500] * 4,
                    "ttfts": [ttft / 1e3] * 4,
                    "median_ttft_ms": ttft,
                    "p95_ttft_ms": ttft,
                    "median_tpot_ms": 50.0,
                    "request_throughput": 1e3 / ttft,
                    "input_throughput": 1e6 / ttft,
                    "hit_share": 0.9,
                    "recomputed_share": 0.05,
                }
            )
    return [run, gate, *rounds]


class TestRefusal:
    def test_a_green_gate_prints_the_speed_up(self):
        text, refused = report_serving.tables(serving_records())
        assert not refused
        assert "| seam | 8.00 |" in text
        assert "of 3 rounds that an interval takes" in text

    def test_three_rounds_have_an_interval(self):
        records = serving_records()
        rounds = [r for r in records if r["record"] == "round"]
        more = [{**r, "round": r["round"] + n} for n in (10, 20, 30) for r in rounds]
        text, refused = report_serving.tables([*records, *more])
        assert not refused
        assert "| seam | 8.00 [8.00, 8.00] |" in text

    @pytest.mark.parametrize(
        "planted",
        [
            {"gate_problems": ["mean KL is 0.9 nats, allowed 0.15"]},
            {"round_problems": ["4 requests: not_cached"]},
        ],
        ids=["answers differ", "skipped under load"],
    )
    def test_a_red_gate_prints_none(self, planted):
        text, refused = report_serving.tables(serving_records(**planted))
        assert refused == ["seam"]
        assert "8.00" not in text
        assert "No ratio for seam" in text
        assert next(iter(planted.values()))[0] in text

    def test_an_arm_that_nobody_judged_is_red(self):
        records = [r for r in serving_records() if r["record"] != "gate"]
        assert report_serving.tables(records)[1] == ["seam"]

    def test_quality_prints_no_share_where_a_measurement_is_none(self):
        fine = [measurement(f"A/{i}", "none", 0.0, kl=0.5, homes="alone") for i in range(3)]
        fine += [measurement(f"A/{i}", "full", 1.0, kl=0.0) for i in range(3)]
        fine += [measurement(f"A/{i}") for i in range(3)]
        text, problems = report_quality.tables(fine)
        assert not problems
        assert "96 [96, 96]" in text
        text, problems = report_quality.tables([*fine, measurement("A/3", problem="reuse was skipped: x")])
        assert len(problems) == 1
        assert "96 [96, 96]" not in text
        assert "No ratios" in text


def test_every_arm_leads_and_trails_in_its_turn():
    arms = [Arm("stock", "stock"), Arm("unmarked", "ours"), Arm("seam", "ours")]
    orders = [turn_order(arms, number) for number in range(6)]
    assert all(set(order) == set(arms) for order in orders)
    assert {order[0] for order in orders} == {order[-1] for order in orders} == set(arms)


def test_shares_are_of_all_prompt_tokens_and_a_stock_server_has_its_prefix_hits():
    result = {"total_input_tokens": 1000, "cached_tokens": [100, 150], "server_info": {}, "errors": []}
    assert account(result, {}, 0)["hit_share"] == 0.25
    done = {"tokens_total prefix": 300, "tokens_total reused": 500, "tokens_total repaired": 50}
    ours = account(result, {**done, "requests_total reused": 2}, 2)
    assert (ours["hit_share"], ours["recomputed_share"], ours["problems"]) == (0.8, 0.05, [])
    assert "server_info" not in ours


def test_answers_may_part_only_where_the_reference_had_no_preference():
    top = [[(-0.5, 7), (-0.50001, 8), (-3.0, 9)]]
    reference = {"output_ids": [7, 1], "meta_info": {"output_top_logprobs": top * 2}}
    assert same_up_to_a_tie({"output_ids": [8, 5]}, reference, tie=2e-4)
    assert not same_up_to_a_tie({"output_ids": [9, 5]}, reference, tie=2e-4)
    assert not same_up_to_a_tie({"output_ids": [6, 5]}, reference, tie=2e-4)


class TestHomesOfTheBenchmark:
    """What is compared, and that only what was measured on the same contexts is."""

    def records(self):
        found = [measurement(f"A/{i}", "none", 0.0, kl=0.5, homes="alone") for i in range(4)]
        found += [measurement(f"A/{i}", "none", 0.0, kl=0.2, homes="library-2") for i in range(4)]
        found += [measurement(f"A/{i}", "query", 0.05, kl=0.05, homes="library-2") for i in range(4)]
        found += [measurement(f"A/{i}", "seam", 0.05, kl=0.1, homes="library-2") for i in range(2)]
        return found + [measurement(f"A/{i}", "query", 0.05, kl=0.15) for i in range(4)]

    def test_a_gain_is_paired_over_the_contexts_that_both_have(self):
        found = self.records()
        _, baseline = report_quality.baseline_of(found)
        arms = ("library-2", "query", 0.05), ("leading", "query", 0.05)
        assert report_quality.gain(found, baseline, *arms).value == pytest.approx(0.2)
        # two contexts in which the other does better count for those two alone
        found += [measurement(f"A/{i}", "head", 0.05, kl=0.01) for i in range(2)]
        other = report_quality.gain(found, baseline, arms[0], ("leading", "head", 0.05))
        assert (other.value, other.num_clusters) == (pytest.approx(-0.08), 2)

    def test_a_cell_of_fewer_contexts_is_left_out_of_the_table(self):
        run = {"record": "quality", "environment": ENVIRONMENT, "options": {"seed": [1, 2]}}
        table = published_tables.quality([run, *self.records()])
        (seam,) = [line for line in table.splitlines() if "| `seam` |" in line]
        assert seam.split("|")[1:6] == [" library-2 ", " 4 ", " `seam` ", " 60 [60, 60] ", " – "]
        assert "gains at 5 %, paired: 20 [20, 20] over `query` behind leading" in table
        assert "seed 1, 2" in table

    def test_the_earlier_prompt_has_the_same_documents_in_another_order(self):
        ids = CONTEXT.prompt.input_ids
        other = reordered(CONTEXT.prompt)
        assert other.spans == (40, 130, 130, 290, 290, 390)
        assert other.input_ids == (*ids[:40], *ids[300:390], *ids[140:300], *ids[40:140], *ids[390:])
        assert HOMES["prompt-2"].earlier(CONTEXT) == other
        assert HOMES["leading"].earlier(CONTEXT) is None

    def test_a_server_is_measured_as_it_is_configured(self):
        assert configured({}).name == f"prompt-{BlocksConfig().company}"
        assert configured({"company": 0}).name == "leading"
        assert configured({"company": "Two typical documents."}).name == "text"
