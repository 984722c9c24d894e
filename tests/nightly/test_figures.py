"""`bench figures --quick`: every stage that README's figures come from still runs."""

from __future__ import annotations

import pytest

from sglang_blockreuse.cli import main


@pytest.mark.engine
@pytest.mark.nightly(twin="tests/unit/test_bench_figures.py::test_a_stage_is_finished_only_with_a_result")
def test_every_stage_runs(tmp_path):
    assert main(["bench", "figures", "--out", str(tmp_path), "--quick"]) == 0
