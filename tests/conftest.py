"""Fixtures that every test file may use."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from nursery import Nursery
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
