"""`bench kernels`: every operation of a device passes its gate, and one that does not is not timed."""

from __future__ import annotations

import dataclasses

import kernel_cases
import kernel_times
import pytest
import torch
from kernel_cases import DTYPES, Operation, Sizes, World, operations

SMALL = Sizes(context=192, batch=2, q_heads=4, kv_heads=2, head_dim=64)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_cpu_kernel_passes_its_gate(dtype):
    found = [
        kernel_times.measure(operation, 1, "cpu") for operation in operations("cpu", SMALL, DTYPES[dtype])
    ]
    assert [timing.operation for timing in found if not timing.passed] == []
    assert len(found) == 5
    assert all(timing.speed_up > 0 for timing in found)


def test_the_operands_of_the_cuda_list_are_sound():
    """Without a device only the law can run, which checks its operands."""
    found = list(kernel_cases._cuda(World(SMALL, torch.float32, "cpu")))
    names = ["decode_attention", "extend_attention", "scan", "rerank"]
    assert [operation.name for operation in found] == names
    assert [operation.error(operation.reference(), operation.reference()) for operation in found] == [0.0] * 4


def test_a_wrong_kernel_is_seen_and_not_timed():
    right = operations("cpu", SMALL, torch.float32)
    for operation in right:
        if operation.name in ("scan", "rotate_copy"):
            continue
        wrong = dataclasses.replace(operation, kernel=lambda call=operation.kernel: 1.01 * call())
        timing = kernel_times.measure(wrong, 1, "cpu")
        assert not timing.passed
        assert timing.kernel_ms is None
    scan = next(operation for operation in right if operation.name == "scan")
    shifted = dataclasses.replace(scan, kernel=lambda: scan.kernel() + 1)
    assert not kernel_times.measure(shifted, 1, "cpu").passed


def test_not_a_number_is_a_red_gate():
    nan = torch.full((3,), torch.nan)
    operation = Operation("x", "y", lambda: nan, lambda: torch.ones(3), kernel_cases._rms, 1.0)
    assert not kernel_times.measure(operation, 1, "cpu").passed


def test_the_command_writes_a_table_and_says_red_by_its_status(tmp_path, monkeypatch, capsys):
    good = Operation("good", "k", lambda: torch.ones(3), lambda: torch.ones(3), kernel_cases._rms, 1e-6)
    bad = dataclasses.replace(good, name="bad", kernel=lambda: torch.zeros(3))
    monkeypatch.setattr(kernel_times, "operations", lambda *_: [good])
    assert kernel_times.main(["--out", str(tmp_path), "--quick"]) == 0
    assert "| good | k |" in capsys.readouterr().out
    monkeypatch.setattr(kernel_times, "operations", lambda *_: [good, bad])
    assert kernel_times.main(["--out", str(tmp_path), "--quick"]) == 1
    assert "| bad | k | 1.0e+00 | 1.0e-06 | **gate red**" in capsys.readouterr().out
    assert (tmp_path / "kernels.jsonl").read_text().count('"record": "kernel"') == 2
