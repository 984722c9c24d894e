"""A recorded decode step under a three-role plan, run again at many more sets of rows, lengths and values."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from places import ROOT

FILE = ROOT / "tests" / "rehearsal" / "interpreter" / "test_plans.py"
NUM_SETS = 60


@pytest.mark.nightly(
    twin="tests/rehearsal/test_bases_in_the_interpreter.py::test_rehearsals_in_the_interpreter"
)
def test_sixty_replays_equal_the_law():
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "BLOCKREUSE_REPLAYS": str(NUM_SETS)}
    done = subprocess.run(
        [*command, "-k", "other_rows_lengths", str(FILE)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:]
