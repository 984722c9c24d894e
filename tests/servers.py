"""Real servers for tests. Nothing is mocked: every helper starts SGLang, all but one as forks of one import of it.

    with stock_server(model_path, log=tmp_path / "stock.log") as server:
        answer = server.generate(input_ids=[...], sampling_params={"temperature": 0, "max_new_tokens": 8})

Both servers run the attention backend `blockreuse` by default, so that a difference between them comes from
block reuse and from nothing else; any SGLang flag may follow the model path and wins.
"""

from __future__ import annotations

import atexit
import functools
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

from nursery import Nursery
from places import PLUGIN

from sglang_blockreuse.server_process import Server, extended_command, running_server

__all__ = [
    "Server",
    "extended_server",
    "shared_nursery",
    "spawned_server",
    "stock_server",
    "with_test_plugin",
]

START_TIMEOUT_S = 300.0


def with_test_plugin() -> dict[str, str]:
    """Environment of a server that loads `tests/plugin` besides what this process sees."""
    paths = [str(PLUGIN), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


@functools.cache
def shared_nursery() -> Nursery:
    """The one process of this test run that has imported SGLang; servers are forks of it."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def stock_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """SGLang without block reuse."""
    return shared_nursery().stock_server(model_path, *flags, log=log, env=env)


def extended_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """`sglang-blockreuse serve`."""
    return shared_nursery().server(model_path, *flags, log=log, env=env)


def spawned_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """`sglang-blockreuse serve` as users start it: processes of its own, each importing SGLang."""
    command = extended_command(["--model-path", str(model_path), *flags])
    return running_server(command, log=log, env=env, timeout_s=START_TIMEOUT_S)
