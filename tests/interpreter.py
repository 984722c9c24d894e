"""Runs the files of tests/kernels/interpreter in Triton's interpreter, each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from places import ROOT

FILES = sorted((ROOT / "tests" / "kernels" / "interpreter").glob("test_*.py"))


def run(file: Path, *words: str) -> None:
    """Raises AssertionError with pytest's report where a test fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore"]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [*command, *words, str(file)], env=environment, cwd=ROOT, capture_output=True, text=True, check=False
    )
    print(done.stdout[-2000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
