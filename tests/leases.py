"""Servers that test files share: one start for each setting, whoever asks for it.

    with Leases(nursery) as leases, leases.take(setting) as server: ...

A lease begins with an empty tree. Counters and log go on from whoever had the server before; `Leased` says what
has come since.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import requests
from nursery import Nursery

from sglang_blockreuse.server_process import Server

MAX_ALIVE = 2  # of each worker; a start takes seconds, a server a gigabyte


@dataclass(frozen=True)
class Setting:
    """What a server is started with; equal settings share a server."""

    kind: Literal["extended", "stock"]
    model: Path
    flags: tuple[str, ...]
    config: str  # the configuration as JSON; "": the defaults
    plan: str  # name of a shipped layer plan, or the text of another; "": none
    env: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Leased(Server):
    """A server that other files had before and will have again."""

    before: Mapping[str, float]  # counts of block reuse as the lease began
    log_start: int  # characters

    def new_log_text(self) -> str:
        """The log since the lease began; `log_text` begins with the server's start."""
        return self.log_text()[self.log_start :]

    def new_counts(self) -> dict[str, float]:
        """Counters of block reuse that have risen since the lease began, by how much."""
        risen = {name: value - self.before.get(name, 0) for name, value in _counts(self).items()}
        return {name: value for name, value in risen.items() if value}


@dataclass
class _Running:
    server: Server
    stop: contextlib.ExitStack = field(repr=False)
    num_holders: int = 0


class Leases:
    """Keeps the MAX_ALIVE servers that were taken last, and those that somebody holds."""

    def __init__(self, nursery: Nursery) -> None:
        self._nursery = nursery
        self._folder = Path(tempfile.mkdtemp(prefix="blockreuse-leases-"))
        self._running: dict[Setting, _Running] = {}  # the one taken last stands last
        self._num_started = 0

    def __enter__(self) -> Leases:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        for running in self._running.values():
            running.stop.close()
        self._running.clear()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextlib.contextmanager
    def take(self, setting: Setting) -> Iterator[Leased]:
        """The server of this setting with an empty tree; a server that ended is started anew.

        Raises:
            ServerFailed: it did not start.
            requests.HTTPError: whoever had it before left it busy.
        """
        running = self._running.pop(setting, None)
        if running is not None and not self._answers(running.server):
            running.stop.close()
            running = None
        if running is None:
            self._make_room()
            running = self._start(setting)
        self._running[setting] = running
        running.num_holders += 1
        try:
            yield Leased(
                url=running.server.url,
                log=running.server.log,
                pid=running.server.pid,
                before=_counts(running.server) if setting.kind == "extended" else {},
                log_start=len(running.server.log_text()),
            )
        finally:
            running.num_holders -= 1

    def _answers(self, server: Server) -> bool:
        """Empties the tree of a server that lives."""
        if not self._nursery.runs(server):
            return False
        try:
            server.flush_cache()
        except (requests.ConnectionError, requests.Timeout):
            return False
        return True

    def _make_room(self) -> None:
        idle = [setting for setting, running in self._running.items() if not running.num_holders]
        for setting in idle[: max(0, len(self._running) - MAX_ALIVE + 1)]:
            self._running.pop(setting).stop.close()

    def _start(self, setting: Setting) -> _Running:
        folder = self._folder / f"{self._num_started:02}"
        folder.mkdir()
        self._num_started += 1
        flags = setting.flags
        if setting.config:
            config = folder / "blockreuse.json"
            config.write_text(setting.config)
            flags += ("--blockreuse-config", str(config))
        if setting.plan:
            plan = setting.plan
            if "\n" in plan:
                plan = str(folder / "plan.yaml")
                Path(plan).write_text(setting.plan)
            flags += ("--layer-plan", plan)
        start = self._nursery.server if setting.kind == "extended" else self._nursery.stock_server
        stop = contextlib.ExitStack()
        server = stop.enter_context(
            start(setting.model, *flags, log=folder / "server.log", env=dict(setting.env))
        )
        return _Running(server, stop)


def _counts(server: Server) -> dict[str, float]:
    found: dict[str, float] = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return found
