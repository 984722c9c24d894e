"""Two replicas behind SGLang's router; nightly, with the 135M model."""

from __future__ import annotations

import pytest
from laws.router import Router

pytest.importorskip("sglang_router", reason="pip install sglang-router")
pytestmark = pytest.mark.engine


class TestRouter(Router):
    model = "tiny"
