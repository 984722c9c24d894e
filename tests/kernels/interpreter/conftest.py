"""Kernel tests that run in Triton's interpreter; test_kernels_interpreter.py starts them, with
a third of their parameters, and nightly/test_interpreter.py with all.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is first imported, so these files are only collected
in a process of their own:  TRITON_INTERPRET=1 pytest tests/kernels/interpreter
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable

import pytest
import torch
from tolerances import KERNEL_OUT
from torch import Tensor

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]

MAX_ERRORS: pytest.StashKey[dict[tuple[str, torch.dtype], float]] = pytest.StashKey()

THIN = 3

CheckClose = Callable[[str, torch.dtype, Tensor, Tensor], None]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grid", choices=("whole", "thin"), default="whole", help="which parameters of each test"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The thin grid: the first parameters of each test and a third of the others, spread by a hash over all axes."""
    if config.getoption("grid") == "thin":
        functions = [item.nodeid.partition("[")[0] for item in items]
        items[:] = [
            item
            for at, (item, function) in enumerate(zip(items, functions, strict=True))
            if function not in functions[:at] or zlib.crc32(item.nodeid.encode()) % THIN == 0
        ]


@pytest.fixture(scope="session")
def check_close(pytestconfig: pytest.Config) -> CheckClose:
    """Compares with the float64 reference under the tolerance table and keeps the largest error seen."""
    errors = pytestconfig.stash.setdefault(MAX_ERRORS, {})

    def check(kernel: str, dtype: torch.dtype, got: Tensor, expected: Tensor) -> None:
        got, expected = got.double(), expected.double()
        assert torch.equal(got.isfinite(), expected.isfinite()), (
            f"{kernel}: poison or a wrong -inf in the result"
        )
        finite = expected.isfinite()
        assert torch.equal(got[~finite], expected[~finite])
        error = (got[finite] - expected[finite]).abs()
        if error.numel() == 0:
            return
        absolute, relative = KERNEL_OUT[kernel, dtype]
        excess = error - absolute - relative * expected[finite].abs()
        assert excess.max() <= 0, (
            f"{kernel} {dtype}: error {error.max():.3g}, allowed {absolute} + {relative} |x|"
        )
        errors[kernel, dtype] = max(errors.get((kernel, dtype), 0.0), error.max().item())

    return check


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    errors = config.stash.get(MAX_ERRORS, {})
    for (kernel, dtype), error in sorted(errors.items(), key=str):
        absolute, relative = KERNEL_OUT[kernel, dtype]
        name = f"{kernel} {str(dtype).removeprefix('torch.')}"
        terminalreporter.write_line(
            f"max error {name:32} {error:.2e}  allowed {absolute:g} + {relative:g} |x|"
        )
