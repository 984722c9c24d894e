"""Start a real SGLang server as a child process, wait until it serves, and never leave it behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import requests

HOST = "127.0.0.1"
POLL_S = 0.25
PR_SET_PDEATHSIG = 1  # linux/prctl.h
STOP_GRACE_S = 10.0
# Lines of SGLang's log, in the order in which a server prints them while it starts.
START_MARKS = (
    "server_args=",
    "Init parallel begin",
    "Load weight begin",
    "KV Cache is allocated",
    "Uvicorn running",
    "ready to roll",
)


class ServerFailed(RuntimeError):
    """The server ended or did not serve in time; the message carries the end of its log."""


@dataclass(frozen=True)
class Server:
    """A server that answers requests."""

    url: str
    log: Path
    pid: int

    def generate(self, *, timeout_s: float = 600.0, **body: Any) -> dict[str, Any]:
        """POST /generate and return the answer.

        Raises:
            requests.HTTPError: the server refused the request; the message carries its answer.
        """
        answer: dict[str, Any] = self.post("/generate", timeout_s=timeout_s, **body)
        return answer

    def post(self, path: str, *, timeout_s: float = 600.0, **body: Any) -> Any:
        response = requests.post(self.url + path, json=body, timeout=timeout_s)
        if not response.ok:
            raise requests.HTTPError(
                f"{path}: HTTP {response.status_code}: {response.text}", response=response
            )
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def get(self, path: str, *, timeout_s: float = 60.0) -> Any:
        response = requests.get(self.url + path, timeout=timeout_s)
        response.raise_for_status()
        return response.json() if "json" in response.headers.get("content-type", "") else response.text

    def flush_cache(self, *, wait_s: float = 30.0) -> None:
        """Forget every cached token.

        The server does so only while it is idle, and a request that was answered may still occupy it for a
        step; tries again for `wait_s`.

        Raises:
            requests.HTTPError: the server was still busy after that.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self.post("/flush_cache")
                return
            except requests.HTTPError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(POLL_S)

    def log_text(self) -> str:
        return self.log.read_text(errors="replace")


def stock_command(arguments: Sequence[str]) -> list[str]:
    """The command of a plain SGLang server."""
    return [sys.executable, "-m", "sglang.launch_server", *arguments]


def extended_command(arguments: Sequence[str]) -> list[str]:
    """The command of a server with this extension."""
    return [sys.executable, "-m", "sglang_blockreuse.cli", "serve", *arguments]


@contextlib.contextmanager
def running_server(
    command: Sequence[str],
    *,
    log: Path,
    port: int | None = None,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 300.0,
    on_progress: Callable[[int], None] = lambda marks: None,
) -> Iterator[Server]:
    """Run `command` (with --host and --port added) until the block is left; its output goes to `log`.

    `on_progress` gets the number of START_MARKS reached, as they are reached.

    Raises:
        ServerFailed: the process ended before it served, or `timeout_s` passed.
    """
    port = port or free_port()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, "--host", HOST, "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **(env or {})},
            # its own group: Ctrl-C reaches us alone, and we stop the server in order
            start_new_session=True,
            preexec_fn=_die_with_parent if sys.platform == "linux" else None,
        )
    server = Server(url=f"http://{HOST}:{port}", log=log, pid=process.pid)
    try:
        _wait_until_ready(server, process, timeout_s=timeout_s, on_progress=on_progress)
        yield server
    finally:
        stop_tree(process)


def free_port() -> int:
    """A port that is free now. SGLang binds others near it, so take a new one for each server."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def stop_tree(process: subprocess.Popen[bytes]) -> None:
    """End a process and all its descendants: politely, then by force. Returns when all are gone."""
    try:
        tree = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        tree = []
    for sig in (signal.SIGTERM, signal.SIGKILL):
        for member in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.send_signal(sig)
        _, tree = psutil.wait_procs(tree, timeout=STOP_GRACE_S)
    # what lost its parent earlier is still in the session's process group
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _die_with_parent() -> None:
    """Runs in the child: have the kernel end it when we are killed and cannot stop it ourselves."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _wait_until_ready(
    server: Server,
    process: subprocess.Popen[bytes],
    *,
    timeout_s: float,
    on_progress: Callable[[int], None],
) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        on_progress(sum(mark in server.log_text() for mark in START_MARKS))
        if process.poll() is not None:
            raise ServerFailed(_failure(server, f"the server ended with status {process.returncode}"))
        with contextlib.suppress(requests.RequestException):
            if requests.get(server.url + "/health", timeout=5).status_code == 200:
                on_progress(len(START_MARKS))
                return
        time.sleep(POLL_S)
    raise ServerFailed(_failure(server, f"the server did not answer within {timeout_s:.0f} s"))


def _failure(server: Server, what: str) -> str:
    lines = server.log_text().splitlines()
    # the cause is an exception's last line, which may stand far above the end of the log
    causes = [
        line for line in lines if re.match(r"(\[[^]]*\] )?\w*(\.\w+)*(Error|Refused|Failed)\b.*:", line)
    ]
    cause = f"\n  {causes[-1].strip()}" if causes else ""
    tail = "\n".join(f"  | {line}" for line in lines[-15:])
    return f"{what}.{cause}\n{tail}\nfull log: {server.log}"
