"""Every Triton kernel in Triton's interpreter, the whole grid."""

from __future__ import annotations

import interpreter
import pytest


@pytest.mark.nightly(twin="tests/kernels/test_kernels_interpreter.py::test_kernels_in_the_interpreter")
@pytest.mark.parametrize("file", interpreter.FILES, ids=lambda path: path.stem)
def test_kernels_in_the_whole_grid(file):
    interpreter.run(file, "--grid", "whole", "--hypothesis-profile", "nightly")
