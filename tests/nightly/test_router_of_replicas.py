"""Two replicas of the 135M model behind SGLang's router."""

from __future__ import annotations

import pytest
from laws.router import Router

pytest.importorskip("sglang_router", reason="pip install sglang-router")
pytestmark = pytest.mark.engine


@pytest.mark.nightly(twin="tests/engine/test_router.py::TestRouter")
class TestRouterOfReplicas(Router):
    model = "smollm2"
