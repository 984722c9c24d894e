"""Runs tests/rehearsal/interpreter in Triton's interpreter, in processes of their own (see its conftest.py)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT

FOLDER = Path(__file__).parent / "interpreter"


@pytest.mark.parametrize("file", sorted(FOLDER.glob("test_*.py")), ids=lambda path: path.stem)
def test_rehearsals_in_the_interpreter(file: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-n",
        "0",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        str(file),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, "--show-capture=no"], env=environment, cwd=ROOT, capture_output=True, text=True
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
