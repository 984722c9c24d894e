"""The demo as users start it, and interrupted by Ctrl-C or a supervisor."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from functools import partial

import psutil
import pytest

from sglang_blockreuse.demo import report

pytestmark = pytest.mark.engine


def demo_command(out, *words):
    return [sys.executable, "-m", "sglang_blockreuse.cli", "demo", "--out", str(out), *words]


class TestRun:
    small = ("--prompts", "2", "--documents", "4", "--per-prompt", "3", "--new-tokens", "4", "--scored", "2")

    @pytest.mark.nightly(twin="tests/engine/test_demo_run.py::test_a_small_run_writes_its_results")
    def test_it_writes_its_results(self, tmp_path, model_path):
        run = subprocess.run(demo_command(tmp_path, *self.small), capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        results = json.loads((tmp_path / "results.json").read_text())
        assert results["summary"]["reused_tokens_median"] > 0
        for prompt in results["prompts"]:
            usage = prompt["ours"]["usage"]
            assert sum(usage[f"{kind}_tokens"] for kind in report.TOKEN_KINDS) == prompt["num_tokens"]
        assert (tmp_path / "ttft.png").read_bytes().startswith(b"\x89PNG")
        assert "ratio" in run.stdout

    @pytest.mark.nightly(twin="tests/unit/test_demo.py::test_every_way_to_fail_has_its_exit_status")
    @pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
    def test_an_interrupted_run_leaves_no_server(self, tmp_path, model_path, number, status):
        # a shell's background job, such as a CI run, ignores SIGINT and would hand that down
        as_in_a_terminal = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        demo = subprocess.Popen(
            demo_command(tmp_path), stderr=subprocess.PIPE, text=True, preexec_fn=as_in_a_terminal
        )
        log = tmp_path / "stock.log"
        _wait_for(lambda: log.exists() and "server_args=" in log.read_text())
        servers = psutil.Process(demo.pid).children(recursive=True)
        assert servers
        demo.send_signal(number)
        assert demo.wait(timeout=60) == status
        assert not [server for server in servers if server.is_running()]


def _wait_for(condition, timeout_s=120.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
