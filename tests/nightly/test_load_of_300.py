"""Three hundred mixed requests to a language model, on a server as users start it."""

from __future__ import annotations

import pytest
from laws.load import ENV, FLAGS, Load
from servers import spawned_server

pytestmark = pytest.mark.engine


@pytest.mark.nightly(twin="tests/engine/test_load.py::TestLoad")
class TestLoadOf300(Load):
    num_requests = 300
    num_prompts = 15

    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        flags = ("--dtype", "float32", "--max-running-requests", "8", *FLAGS)
        log = tmp_path_factory.mktemp("load") / "server.log"
        with spawned_server(model_path, *flags, log=log, env=ENV) as running:
            yield running
