"""Fixtures that every test file may use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from nursery import Nursery

from sglang_blockreuse.model import ensure_model


@pytest.fixture(scope="session")
def model_path() -> Path:
    """Folder of the real model, SmolLM2-135M-Instruct in bfloat16; fetched and converted on first use."""
    return ensure_model()


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Starts servers of tiny models in seconds."""
    with Nursery() as running:
        yield running
