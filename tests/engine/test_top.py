"""`sglang-blockreuse top` on real servers: it shows what /metrics has, or says what to do."""

from __future__ import annotations

import dataclasses
import re

import pytest
from prompts import Library, ask
from servers import extended_server, stock_server
from tiny_models import VOCAB, TinyModel

from sglang_blockreuse import cli
from sglang_blockreuse.server_process import free_port
from sglang_blockreuse.top import Scrape, lines, quantile

FLAGS = ("--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", "4000")
LIBRARY = Library(seed=5, ids=range(10, VOCAB - 10))


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory):
    return TinyModel("llama").write(tmp_path_factory.mktemp("llama"))


def top(capsys, *words):
    status = cli.main(["top", "--once", *words])
    return status, capsys.readouterr()


@pytest.mark.engine
class TestOnce:
    @pytest.fixture(scope="class")
    def server(self, tiny_path, tmp_path_factory):
        log = tmp_path_factory.mktemp("top") / "server.log"
        with extended_server(tiny_path, *FLAGS, "--enable-metrics", log=log) as running:
            for order in ([0, 1, 2, 3], [2, 1, 0, 3], [3, 0, 1]):
                ids, spans = LIBRARY.prompt(order)
                ask(running, ids, blockreuse_spans=spans)
            ask(running, LIBRARY.prompt([1, 3])[0], blockreuse_mode="exact")
            yield running

    def test_the_table_has_the_counts_of_metrics(self, server, capsys):
        status, shown = top(capsys, "--url", server.url + "/")
        assert status == 0, shown.err
        exported = re.findall(
            r'sglang:blockreuse_(tokens|requests|blocks)_total\{.*?(?:kind|outcome|found)="(\w+)".*\} (\S+)',
            server.get("/metrics"),
        )
        assert {"tokens", "requests", "blocks"} == {name for name, *_ in exported}
        for _, label, value in exported:
            assert re.search(rf"\b{label}\s+{float(value):,.0f}\b", shown.out), (label, value, shown.out)
        assert re.search(r"reused\s+3\b", shown.out)
        assert re.search(r"mode_exact\s+1\b", shown.out)

    def test_pool_and_latency_are_shown(self, server, capsys):
        _, shown = top(capsys, "--url", server.url)
        assert re.search(r"KV pool\s+free", shown.out)
        assert re.search(r"running requests\s+0\s+0.0 %", shown.out)
        assert re.search(r"size\s+4,000\s+100.0 %", shown.out)
        for what in ("mean", "p50", "p95"):
            assert re.search(rf"TTFT {what}\s+\d+ ms", shown.out)


@pytest.mark.engine
def test_a_server_without_metrics_says_which_flag(tiny_path, tmp_path, capsys):
    with extended_server(tiny_path, *FLAGS, log=tmp_path / "server.log") as server:
        status, shown = top(capsys, "--url", server.url)
    assert (status, shown.out) == (1, "")
    assert "--enable-metrics" in shown.err


@pytest.mark.engine
def test_a_stock_server_is_named_as_such(tiny_path, tmp_path, capsys):
    with stock_server(tiny_path, *FLAGS, "--enable-metrics", log=tmp_path / "server.log") as server:
        status, shown = top(capsys, "--url", server.url)
    assert (status, shown.out) == (1, "")
    assert "--radix-cache-backend blockreuse" in shown.err


def test_nobody_there(capsys):
    url = f"http://127.0.0.1:{free_port()}"
    status, shown = top(capsys, "--url", url)
    assert (status, shown.out) == (1, "")
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


@pytest.mark.parametrize(
    ("q", "expected"),
    [(0.25, 0.5), (0.5, 1.0), (0.75, 2 + 2 * (6 - 4) / 3), (0.99, 4.0)],
    ids=["low", "edge", "inside", "above"],
)
def test_quantiles_are_linear_inside_a_bucket(q, expected):
    buckets = [(1.0, 4.0), (2.0, 4.0), (4.0, 7.0), (float("inf"), 8.0)]
    assert quantile(buckets, q) == pytest.approx(expected)
