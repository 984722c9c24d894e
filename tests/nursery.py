"""Many short-lived servers: one process imports SGLang, every server is a fork of it.

Importing SGLang in each of a server's processes is nearly all of what a tiny model's server takes to start, and loading
the tokenizer in each of them most of the rest; both are done before the fork. What runs in the fork is the command
line of `sglang-blockreuse serve`, with SGLang's processes forked instead of spawned; nothing else of the host is
replaced. Environment variables that are read at import time keep the nursery's values, but for those that make the
scheduler retract requests.

    with Nursery() as nursery, nursery.server(model_path, "--dtype", "float32", log=log) as server: ...
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import json
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import requests

from sglang_blockreuse.server_process import HOST, POLL_S, PR_SET_PDEATHSIG, Server, ServerFailed

START_TIMEOUT_S = 300.0
# OpenMP reads its environment as it is loaded, so what the server sets for itself comes too late in a fork: its
# threads would spin at their barriers, each on a core that another worker's server needs.
ONE_THREAD = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
LOG_TAIL = 6000  # characters of a failed server's log
STARTS: Counter[str] = Counter()  # servers that this test run has started, by how
# Two processes that ask the kernel for a free port at the same time may be given the same one, and two of SGLang's
# servers share a port without a word: so each worker has ports of its own, below those that the kernel hands out.
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw9").removeprefix("gw"))
_PORTS = itertools.cycle(range(20_000 + 1_000 * _WORKER, 21_000 + 1_000 * _WORKER, 20))


class Nursery:
    """Forks servers on demand; `close` ends those that still run.

    env: for what SGLang reads while it is imported; a server's own comes on top.
    """

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**ONE_THREAD, **os.environ, **(env or {})},
        )

    def __enter__(self) -> Nursery:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def server(
        self, model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Server]:
        """`sglang-blockreuse serve`, ready. Raises ServerFailed with the end of its log."""
        return self._server("serve", model_path, flags, log, env)

    def stock_server(
        self, model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Server]:
        """SGLang without block reuse on the same attention kernels, ready. Raises ServerFailed."""
        return self._server("stock", model_path, ("--attention-backend", "blockreuse", *flags), log, env)

    @contextlib.contextmanager
    def _server(
        self, kind: str, model_path: Path, flags: Sequence[str], log: Path, env: Mapping[str, str] | None
    ) -> Iterator[Server]:
        STARTS["forked"] += 1
        port = _free_port()
        arguments = ["--model-path", str(model_path), *flags, "--host", HOST, "--port", str(port)]
        pid = self._ask(start=arguments, kind=kind, log=str(log), env=dict(env or {}))
        server = Server(url=f"http://{HOST}:{port}", log=log, pid=pid)
        try:
            self._wait_until_ready(server)
            yield server
        finally:
            self._ask(stop=pid)

    def runs(self, server: Server) -> bool:
        """Whether this server of ours has not ended."""
        return bool(self._ask(runs=server.pid))

    def _wait_until_ready(self, server: Server) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.runs(server):
            with contextlib.suppress(requests.RequestException):
                if requests.get(server.url + "/health", timeout=5).status_code == 200:
                    return
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
        raise ServerFailed(f"the server did not come up:\n{server.log_text()[-LOG_TAIL:]}")

    def _ask(self, **message: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


def _free_port() -> int:
    """The next of this worker's ports that nobody has; SGLang binds others near it."""
    for port in _PORTS:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # what waits to be closed is free
            probe.bind((HOST, port))
            return port
    raise AssertionError("a cycle has no end")


def main() -> None:
    """Serve a `Nursery`: one JSON message per line in, one answer per line out."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what imports print is no answer
    _import_everything()
    _share_tokenizers()
    running: set[int] = set()
    for line in sys.stdin:
        message = json.loads(line)
        if "start" in message:
            _load_tokenizer(message["start"])
            answer: Any = _fork(message["kind"], message["start"], message["log"], message["env"])
            running.add(answer)
        elif "runs" in message:
            answer = (
                os.waitpid(message["runs"], os.WNOHANG) == (0, 0) if message["runs"] in running else False
            )
            if not answer:
                running.discard(message["runs"])
        else:
            answer = _stop(message["stop"]) if message["stop"] in running else None
            running.discard(message["stop"])
        print(json.dumps(answer), file=answers, flush=True)
    for pid in running:
        _stop(pid)


def _import_everything() -> None:
    import sglang.launch_server
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler
    import sglang.srt.models.registry  # noqa: F401  imports every model

    import sglang_blockreuse.cli
    import sglang_blockreuse.layers.cpu_backend
    import sglang_blockreuse.radix_cache  # noqa: F401


def _share_tokenizers() -> None:
    """SGLang loads the tokenizer up to five times in the processes of a server; all get the one that stands here."""
    from sglang.srt.utils import hf_transformers

    load = hf_transformers.get_tokenizer
    known: dict[tuple[Any, ...], Any] = {}

    @functools.wraps(load)
    def get_tokenizer(*args: Any, **kwargs: Any) -> Any:
        key = (*args, *sorted(kwargs.items()))
        if key not in known:
            known[key] = load(*args, **kwargs)
        return known[key]

    for module in list(sys.modules.values()):
        if getattr(module, "get_tokenizer", None) is load:
            module.get_tokenizer = get_tokenizer


def _load_tokenizer(arguments: list[str]) -> None:
    """As a server with these arguments will ask for it; one that asks otherwise loads its own."""
    from sglang.srt.utils.hf_transformers import get_tokenizer

    folder = Path(arguments[arguments.index("--model-path") + 1])
    if (folder / "tokenizer.json").is_file() and "--skip-tokenizer-init" not in arguments:
        get_tokenizer(
            str(folder),
            tokenizer_mode="auto",
            trust_remote_code=False,
            revision=None,
            tokenizer_backend="huggingface",
        )
    # a fork's collections would otherwise walk, and so copy, every page of what stands here
    gc.collect()
    gc.freeze()


def _fork(kind: str, arguments: list[str], log: str, env: dict[str, str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(output, stream)
        os.environ.update(env)
        sys.path[:0] = env.get("PYTHONPATH", "").split(os.pathsep)
        _read_again()
        multiprocessing.set_start_method("fork", force=True)
        multiprocessing.set_start_method = lambda *args, **kwargs: None  # SGLang asks for spawn
        status = _run(kind, arguments)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _read_again() -> None:
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def _run(kind: str, arguments: list[str]) -> int:
    if kind == "serve":
        from sglang_blockreuse.cli import main as serve

        return serve(["serve", *arguments]) or 0
    sys.argv = ["sglang.launch_server", *arguments]
    runpy.run_module("sglang.launch_server", run_name="__main__")
    return 0


def _stop(pid: int) -> None:
    members = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
