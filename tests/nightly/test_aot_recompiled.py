"""Launches compiled anew give what kernels/aot_table.json says."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import triton
from places import ROOT


@pytest.mark.nightly(twin="tests/kernels/test_kernels_aot.py::test_the_table_was_made_from_this_code")
def test_a_sample_compiles_to_what_the_table_says():
    table = json.loads((ROOT / "kernels" / "aot_table.json").read_text())
    if table["triton"] != triton.__version__:
        pytest.skip(f"the table was made with triton {table['triton']}, this is {triton.__version__}")
    command = [sys.executable, str(ROOT / "bench" / "kernel_aot.py"), "--check", "7", "--targets", "80", "90"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
