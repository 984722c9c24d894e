"""The demo on real servers, which are forked here; nightly, as users start it, and interrupted."""

from __future__ import annotations

import contextlib
import json

import pytest
from servers import extended_server, stock_server
from tiny_models import talking_model

from sglang_blockreuse.cli import main
from sglang_blockreuse.demo import report

pytestmark = pytest.mark.engine
SMALL = ("--prompts", "2", "--documents", "4", "--per-prompt", "3", "--new-tokens", "4", "--scored", "2")


@contextlib.contextmanager
def forked(command, *, log, on_progress=lambda marks: None, **others):
    """A server of this command, without the seconds that its imports take."""
    start = extended_server if "sglang_blockreuse.cli" in command else stock_server
    flags = command[command.index("--model-path") + 2 :]
    with start(talking_model(), *flags, log=log) as server:
        yield server


def test_a_small_run_writes_its_results(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("sglang_blockreuse.demo.run.running_server", forked)
    words = ("--out", str(tmp_path), "--model-path", str(talking_model()))
    assert main(["demo", *words, *SMALL]) == 0
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["summary"]["reused_tokens_median"] > 0
    for prompt in results["prompts"]:
        usage = prompt["ours"]["usage"]
        assert sum(usage[f"{kind}_tokens"] for kind in report.TOKEN_KINDS) == prompt["num_tokens"]
    assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
    assert "ratio" in capsys.readouterr().out
