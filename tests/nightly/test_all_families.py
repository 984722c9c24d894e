"""Every family and rotary scaling on the real engine, every layer of it."""

from __future__ import annotations

import pytest
from laws.families import Families
from tiny_models import NUM_LAYERS, SUPPORTED

pytestmark = pytest.mark.engine


@pytest.mark.nightly(twin="tests/engine/test_families.py::TestFamilies")
class TestAllFamilies(Families):
    @pytest.fixture(scope="class", params=SUPPORTED)
    def name(self, request):
        return request.param

    @pytest.fixture(params=range(NUM_LAYERS))
    def layer(self, request):
        return request.param
