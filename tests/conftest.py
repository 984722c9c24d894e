"""Fixtures that every test file may use, and what a run says at its end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from nursery import STARTS, Nursery
from servers import shared_nursery

from sglang_blockreuse.model import ensure_model

# a busy machine is no failure
settings.register_profile("no deadline", deadline=None)
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the real model, SmolLM2-135M-Instruct in bfloat16; fetched and converted on first use."""
    return ensure_model()


@pytest.fixture(scope="session")
def nursery() -> Nursery:
    """Starts servers in seconds."""
    return shared_nursery()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """A worker tells the run how many servers it started."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["starts"] = dict(STARTS)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    STARTS.update(getattr(node, "workeroutput", {}).get("starts", {}))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    starts: Counter[str] = STARTS
    if starts:
        kinds = ", ".join(f"{num} {kind}" for kind, num in sorted(starts.items()))
        terminalreporter.write_line(f"{starts.total()} servers started: {kinds}")
