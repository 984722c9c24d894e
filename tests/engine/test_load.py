"""Mixed requests under retraction and eviction; nightly, three hundred of them on the 135M model."""

from __future__ import annotations

import pytest
from laws.load import ENV, FLAGS, Load
from servers import lease

pytestmark = pytest.mark.engine


class TestLoad(Load):
    num_requests = 80
    num_prompts = 6

    @pytest.fixture(scope="class")
    def server(self):
        with lease(*FLAGS, env=ENV) as running:
            yield running
