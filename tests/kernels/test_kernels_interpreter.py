"""Every Triton kernel in Triton's interpreter, a third of the grid; nightly, the whole grid."""

from __future__ import annotations

import interpreter
import pytest


@pytest.mark.parametrize("file", interpreter.FILES, ids=lambda path: path.stem)
def test_kernels_in_the_interpreter(file):
    interpreter.run(file, "--grid", "thin")
