"""Families and rotary scalings on the real engine: three of them in one layer; nightly, all of them in every layer."""

from __future__ import annotations

import pytest
from laws.families import Families
from servers import lease
from tiny_models import NUM_LAYERS, REFUSED

from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine


class TestFamilies(Families):
    layers = (NUM_LAYERS - 1,)

    @pytest.fixture(scope="class", params=["llama llama3", "phi partial", "gptj layout"])
    def name(self, request):
        return request.param

    @pytest.fixture
    def layer(self):
        return self.layers[0]


@pytest.mark.parametrize(("model", "says"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_moved_stops_the_server_by_name(tmp_path, model, says):
    with (
        pytest.raises(ServerFailed, match=says),
        lease("--skip-tokenizer-init", model=model.write(tmp_path / "model")),
    ):
        pass
