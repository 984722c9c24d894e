"""`sglang-blockreuse top`: rates, latencies and quantiles of what it scraped, and what it says where nobody is."""

from __future__ import annotations

import dataclasses

import pytest

from sglang_blockreuse import cli
from sglang_blockreuse.server_process import free_port
from sglang_blockreuse.top import Scrape, lines, quantile


def test_nobody_there(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    assert cli.main(["top", "--once", "--url", url]) == 1
    shown = capsys.readouterr()
    assert shown.out == ""
    assert f"{url} is not reachable" in shown.err


def scraped(at_s, fresh, buckets=()):
    name = "sglang:time_to_first_token_seconds"
    return Scrape(
        at_s,
        {
            "sglang:blockreuse_tokens_total": {frozenset({("kind", "fresh")}): fresh},
            f"{name}_bucket": {frozenset({("le", le)}): count for le, count in buckets},
            f"{name}_count": {frozenset(): buckets[-1][1]} if buckets else {},
            f"{name}_sum": {frozenset(): 1.0},
        },
        dict.fromkeys(("free", "evictable", "protected", "size"), 1),
    )


def test_rates_are_of_the_time_between_two_looks():
    (line,) = [x for x in lines(scraped(14.0, 500.0), scraped(10.0, 100.0)) if x.name == "fresh"]
    assert (line.total, line.now, line.share) == (500.0, 100.0, 1.0)


def test_latencies_are_of_the_window_and_of_all_time():
    early, late = scraped(0.0, 0, [("1", 2.0), ("+Inf", 2.0)]), scraped(2.0, 0, [("1", 3.0), ("+Inf", 4.0)])
    shown = {line.name: (line.total, line.now) for line in lines(late, early)}
    assert shown["TTFT mean"] == (250.0, 0.0)
    assert shown["TTFT p50"] == (pytest.approx(2000 / 3), 1000.0)
    idle = dataclasses.replace(late, at_s=4.0)
    assert {line.now for line in lines(idle, late) if line.unit} == {None}
    assert shown["TPOT mean"] == (None, None)


def test_host_memory_is_shown_where_there_is_some():
    plain = scraped(0.0, 0)
    tiers = {frozenset({("tier", tier)}): num for tier, num in (("host", 30.0), ("device", 10.0))}
    tiered = dataclasses.replace(
        plain,
        series={**plain.series, "sglang:blockreuse_tier_tokens_total": tiers},
        pool={**plain.pool, "host_free": 6, "host_size": 8},
    )
    shown = {(line.group, line.name): (line.total, line.share) for line in lines(tiered)}
    assert shown["host memory", "exact KV"] == (2, 0.25)
    assert shown["homes by tier", "host"] == (30.0, 0.75)
    assert not {line.group for line in lines(plain)} & {"host memory", "homes by tier"}


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 2 + 2 * (6 - 4) / 3), (0.99, 4.0)],
    ids=["low", "edge", "inside", "above"],
)
def test_quantiles_are_linear_inside_a_bucket(q, expected):
    buckets = [(1.0, 4.0), (2.0, 4.0), (4.0, 7.0), (float("inf"), 8.0)]
    assert quantile(buckets, q) == pytest.approx(expected)
