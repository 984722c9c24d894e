"""The example without a server, as it stands."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from places import ROOT
from tiny_models import talking_model

pytestmark = pytest.mark.engine


@pytest.mark.nightly(twin="tests/engine/test_offline.py::test_the_offline_engine_reuses_blocks")
def test_the_second_order_of_its_documents_is_reused():
    command = [sys.executable, str(ROOT / "examples" / "offline_engine.py"), str(talking_model())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (eval(found) for found in re.findall(r"\{'mode'.*?\}", done.stdout))
    assert first["skipped_reason"] is second["skipped_reason"] is None
    assert second["reused_tokens"] > 0
