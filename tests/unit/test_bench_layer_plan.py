"""`bench layer-plan`: what its records become, and what its options refuse. `bench figures` runs it on real servers."""

from __future__ import annotations

import layer_plan
import published_tables
import pytest
import report
import report_decode
from records import Log

ENVIRONMENT = {
    "hardware": {"cpu": "x", "cores": 2, "gpu": None, "memory_gib": 8.0},
    "packages": {"sglang": "1", "torch": "2"},
    "python": "3",
    "commit": "0123456789",
    "time": "2026-01-01T00:00:00+0000",
}
OPTIONS = {"plan": "some-plan", "dtype": "bfloat16", "repeats": 3, "tokens": 8}


@pytest.fixture
def log(tmp_path):
    """Dense is slower in every round, and the machine grows slower from round to round."""
    log = Log(tmp_path / "run" / "layer-plan.jsonl")
    log.add({"record": "layer-plan", "environment": ENVIRONMENT, "options": OPTIONS})
    for batch, context in ((1, 2000), (8, 4000)):
        for repeat, speed in enumerate((1.0, 2.0, 9.0)):
            for mode, ms in (("plan", 100.0), ("dense", 250.0), ("stock", 500.0)):
                turn = {"batch": batch, "context": context, "repeat": repeat, "mode": mode}
                log.add({"record": "turn", **turn, "tpot_ms": ms * speed})
        spent = {"scan full": 30.0, "attention full": 5.0, "attention reuse": 15.0, "between reuse": 90.0}
        read = {"plan": 200e6, "dense": 1000e6}
        step = {"batch": batch, "context": context, "steps": 24, "ms_per_step": spent, "bytes": read}
        log.add({"record": "breakdown", **step})
    return log


def test_ratios_are_those_of_pairs(log):
    for case in ((1, 2000), (8, 4000)):
        assert report_decode.ratio(log.records, case, "dense").value == pytest.approx(0.4)
        assert report_decode.ratio(log.records, case, "stock").value == pytest.approx(0.2)


def test_a_turn_without_its_partner_is_not_compared(log):
    """Negative control: a run that was stopped within a round."""
    case = {"batch": 1, "context": 2000, "repeat": 3, "mode": "plan"}
    log.add({"record": "turn", **case, "tpot_ms": 1.0})
    assert report_decode.ratio(log.records, (1, 2000), "dense").low == pytest.approx(0.4)


def test_the_breakdown_adds_up_to_the_time_per_token(log):
    found = report_decode.by_part(log.records, (8, 4000))
    assert found == {"scan": 30.0, "attention": 20.0, "between": 90.0, "outside": 60.0}
    assert sum(found.values()) == 200.0  # the median of 100, 200 and 900


def test_the_report_has_both_tables_and_the_figure(log, tmp_path):
    text = report.section(log.path, tmp_path)
    assert "| 8 × 4,000 | 200 | 500 | 1,000 | **0.40 [0.40, 0.40]** | **0.20 [0.20, 0.20]** |" in text
    assert "| attention | 5.00 | 15.00 | 20.00 |" in text
    assert "reads 200 MB of keys and values under the plan and 1,000 MB dense" in text
    assert "is the plan's: 50.0 ms, 4.0 GB/s" in text
    assert (tmp_path / "run-layer-plan.png").stat().st_size > 0
    assert "![run-layer-plan](run-layer-plan.png)" in text


def test_readme_shows_every_case_and_the_step_of_the_largest(log):
    text = published_tables.layer_plan(log.records)
    assert "| 1 × 2,000 |" in text
    assert "A step at 8 × 4,000 by the server's own clock, ms: between 90, outside 60, scan 30" in text


@pytest.mark.parametrize("words", [["--context", "8"], ["--tokens", "2"], ["--batch", "0"]])
def test_sizes_that_measure_nothing_are_refused(words, tmp_path, capsys):
    with pytest.raises(SystemExit):
        layer_plan.parse(["--out", str(tmp_path), *words])
    assert "--context is at least 9" in capsys.readouterr().err


def test_a_stream_that_was_read_in_one_piece_is_no_measurement():
    """What a stalled reader sees: 24 tokens within 40 ms, 2.4 s after the request was sent."""
    steady = [0.0, *(0.3 + 0.1 * i for i in range(24))]
    assert not layer_plan.in_heaps(steady)
    assert layer_plan.in_heaps([0.0, *(2.4 + 0.0017 * i for i in range(24))])
    slow_first = [0.0, *(2.0 + 0.1 * i for i in range(24))]  # a long prefill is no stall
    assert not layer_plan.in_heaps(slow_first)


def test_the_pool_holds_the_largest_case_twice():
    cases = [layer_plan.Case(1, 9000), layer_plan.Case(8, 7500)]
    assert layer_plan.pool_tokens(cases, 24) >= 2 * (9000 + 8 + 24)
    assert layer_plan.pool_tokens(cases, 24) >= 2 * (7500 + 8 * (8 + 24))
