"""`sglang-blockreuse top` on real servers: it shows what /metrics has, or says what to do."""

from __future__ import annotations

import re

import pytest
from prompts import Library, ask
from servers import extended_server, lease
from tiny_models import talking_model

from sglang_blockreuse import cli

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=5)


def top(capsys, *words):
    status = cli.main(["top", "--once", *words])
    return status, capsys.readouterr()


class TestOnce:
    @pytest.fixture(scope="class")
    def server(self):
        with lease() as running:
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
        risen = server.new_counts()
        assert (risen["requests_total reused"], risen["requests_total mode_exact"]) == (3, 1)

    def test_pool_and_latency_are_shown(self, server, capsys):
        _, shown = top(capsys, "--url", server.url)
        assert re.search(r"KV pool\s+free", shown.out)
        assert re.search(r"running requests\s+0\s+0.0 %", shown.out)
        assert re.search(r"size\s+16,000\s+100.0 %", shown.out)
        for what in ("mean", "p50", "p95"):
            assert re.search(rf"TTFT {what}\s+\d+ ms", shown.out)


def test_a_server_without_metrics_says_which_flag(tmp_path, capsys):
    flags = ("--dtype", "float32", "--max-total-tokens", "4000")
    with extended_server(talking_model(), *flags, log=tmp_path / "server.log") as server:
        status, shown = top(capsys, "--url", server.url)
    assert (status, shown.out) == (1, "")
    assert "--enable-metrics" in shown.err


def test_a_stock_server_is_named_as_such(capsys):
    with lease("--enable-mixed-chunk", kind="stock") as server:
        status, shown = top(capsys, "--url", server.url)
    assert (status, shown.out) == (1, "")
    assert "--radix-cache-backend blockreuse" in shown.err
