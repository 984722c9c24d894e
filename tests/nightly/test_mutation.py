"""Every deliberate fault of mutation_check.py is noticed by the tests that it names."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import ROOT


@pytest.mark.nightly(twin="tests/kernels/test_faults.py::test_the_text_to_change_is_there")
def test_every_fault_is_noticed():
    command = [sys.executable, str(ROOT / "tests" / "mutation_check.py")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
