"""Child servers: failures carry the log, and nothing is left behind. Stand-ins take the place of slow servers."""

import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from sglang_blockreuse.server_process import ServerFailed, free_port, running_server, stop_tree

# a parent with a child, both deaf to SIGTERM; prints the child's pid
STUBBORN = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"])
print("child", child.pid, flush=True)
time.sleep(600)
"""
ANSWERING = """
import http.server, sys
class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404); self.end_headers()
port = int(sys.argv[sys.argv.index("--port") + 1])
print("ready to roll", flush=True)
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


def is_alive(pid):
    """Whether the process still runs; one that ended counts as gone even before init has reaped it."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def python(code):
    return [sys.executable, "-c", code]


@pytest.fixture
def short_grace(monkeypatch):
    monkeypatch.setattr("sglang_blockreuse.server_process.STOP_GRACE_S", 1.0)


def test_a_server_that_ends_is_reported_with_status_cause_and_log(tmp_path):
    code = "print('first line'); raise ValueError('a bad flag')"
    with (
        pytest.raises(
            ServerFailed, match=r"status 1.\n  ValueError: a bad flag\n(.|\n)*first line(.|\n)*s.log"
        ),
        running_server(python(code), log=tmp_path / "s.log"),
    ):
        pass


def test_a_server_that_never_answers_is_stopped_with_all_its_children(tmp_path, short_grace):
    log = tmp_path / "s.log"
    with (
        pytest.raises(ServerFailed, match="did not answer within 3 s"),
        running_server(python(STUBBORN), log=log, timeout_s=3),
    ):
        pass
    child = int(log.read_text().split()[1])
    assert not is_alive(child)


def test_a_server_that_answers_is_yielded_once_and_stopped_on_an_exception(tmp_path):
    seen = []
    pids = []

    def fail():
        with running_server(python(ANSWERING), log=tmp_path / "s.log", on_progress=seen.append) as server:
            pids.append(server.pid)
            assert is_alive(server.pid)
            raise RuntimeError("in the block")

    with pytest.raises(RuntimeError, match="in the block"):
        fail()
    assert not is_alive(pids[0])
    assert seen == sorted(seen)
    assert seen[-1] > 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's parent-death signal is Linux only")
def test_a_server_ends_when_its_owner_is_killed(tmp_path):
    owner = subprocess.Popen(
        python(
            f"import os, sys; from pathlib import Path; from sglang_blockreuse.server_process import running_server\n"
            f"with running_server([sys.executable, '-c', {ANSWERING!r}], log=Path({str(tmp_path / 's.log')!r})) as s:\n"
            f"    print(s.pid, flush=True); os.kill(os.getpid(), 9)"
        ),
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(owner.communicate()[0])
    deadline = time.monotonic() + 10
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_alive(pid)


def test_stopping_what_is_gone_already_is_no_error():
    process = subprocess.Popen(python("pass"), start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    stop_tree(process)
    assert process.returncode in (0, -signal.SIGTERM)


def test_free_ports_are_usable():
    assert 1024 < free_port() < 65536
