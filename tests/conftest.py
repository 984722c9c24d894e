"""Fixtures that every test file may use, the tiers of the suite, and what a run says at its end.

The default tier is everything outside tests/nightly. `pytest -m nightly` runs the rest, and so does naming its files.
With several workers, tests of one file stay together, and those of files that share servers: see workers.py.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from nursery import ONE_THREAD, STARTS, Nursery
from places import ROOT
from servers import shared_nursery

from sglang_blockreuse.model import ensure_model

pytest.register_assert_rewrite("laws", "looks", "sparse_checks")

# a busy machine is no failure
settings.register_profile("ci", deadline=None, derandomize=True)
settings.register_profile("nightly", deadline=None, print_blob=True)
settings.load_profile("ci")  # `--hypothesis-profile nightly` loads the other one; see drawn.py


def pytest_configure(config: pytest.Config) -> None:
    """One thread for each worker and its servers; workers take this process's environment."""
    if getattr(config.option, "numprocesses", None):
        for name, value in ONE_THREAD.items():
            os.environ.setdefault(name, value)


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the real model, SmolLM2-135M-Instruct in bfloat16; fetched and converted on first use."""
    return ensure_model()


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """Starts servers in seconds."""
    return shared_nursery()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the nightly tier out unless it is asked for."""
    asked = "nightly" in config.option.markexpr or any("nightly" in word for word in config.args)
    left_out = [item for item in items if not asked and is_nightly(item)]
    # those that take long go first, so that no worker is left with one at the end
    items[:] = sorted(
        (item for item in items if item not in left_out),
        key=lambda item: item.get_closest_marker("engine") is None,
    )
    if left_out:
        config.hook.pytest_deselected(items=left_out)


def is_nightly(item: pytest.Item) -> bool:
    return item.path.is_relative_to(ROOT / "tests" / "nightly")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the run how many servers it started."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["starts"] = dict(STARTS)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    if config.getvalue("dist") != "loadfile":
        return None  # somebody asked for another one
    from workers import ByServer

    return ByServer(config, log)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    STARTS.update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if STARTS:
        kinds = ", ".join(f"{num} {kind}" for kind, num in sorted(STARTS.items()))
        terminalreporter.write_line(f"{STARTS.total()} servers started: {kinds}")
