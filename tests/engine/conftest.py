"""Every engine test begins with an empty tree."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def empty_tree(request: pytest.FixtureRequest) -> None:
    """Of the file's `server`, where the test has one."""
    if "server" in request.fixturenames:
        request.getfixturevalue("server").flush_cache()
