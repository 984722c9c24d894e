"""`sglang-blockreuse bench`: a front door to scripts that the wheel does not carry."""

from __future__ import annotations

import subprocess
import sys

import pytest
from bench_records import measurement
from report_quality import tables

from sglang_blockreuse import cli
from sglang_blockreuse.commands import bench


@pytest.mark.parametrize("name", bench.BENCHMARKS)
def test_every_benchmark_explains_itself(name, capsys):
    assert cli.main(["bench", name, "--help"]) == 0
    assert f"usage: bench {name}" in capsys.readouterr().out


def test_no_script_takes_the_import_name_of_another_package():
    """bench/ comes first in the path, so a script there would be imported in place of an installed package."""
    code = "import kernels, sys; print(kernels.__file__)"
    folder = bench.find_folder()
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=True
    )
    assert "site-packages" in done.stdout


def test_a_wrong_option_is_the_benchmark_s_own_error(capsys):
    assert cli.main(["bench", "report", "--nonsense"]) == 2
    assert "bench report: error" in capsys.readouterr().err


def test_without_a_clone_it_says_where_it_looked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(bench, "places", lambda: iter([tmp_path / "bench"]))
    assert cli.main(["bench", "quality"]) == 2
    message = capsys.readouterr().err
    assert str(tmp_path / "bench") in message
    assert "pip install -e '.[bench]'" in message


def test_a_report_has_the_tables_of_its_files_and_a_figure(tmp_path, capsys):
    from records import Log

    log = Log(tmp_path / "run" / "quality.jsonl")
    environment = {
        "hardware": {"cpu": "x", "cores": 2, "gpu": None},
        "packages": {},
        "commit": "c",
        "time": "t",
    }
    options = {"split": "calibration", "seed": 0, "blocks": []}
    log.add({"record": "quality", "environment": environment, "options": options})
    for number in range(3):
        log.add(measurement(f"A/{number}", "none", 0.0, kl=0.5, homes="alone"))
        log.add(measurement(f"A/{number}", "full", 1.0, kl=0.0))
        log.add(measurement(f"A/{number}"))
    assert cli.main(["bench", "report", "--out", str(tmp_path / "out"), str(log.path)]) == 0
    text = (tmp_path / "out" / "report.md").read_text()
    assert tables(log.records)[0] in text
    assert "![run-quality](run-quality.png)" in text
    assert (tmp_path / "out" / "run-quality.png").stat().st_size > 0


def test_a_file_that_is_no_run_is_refused(tmp_path):
    import report

    path = tmp_path / "x.jsonl"
    path.write_text('{"record": "round"}\n')
    with pytest.raises(
        ValueError, match="begins with 'round', but a run begins with quality, serving, layer-plan, soak"
    ):
        report.section(path, tmp_path)


def test_runs_with_pages_of_their_own_are_left_out_of_a_report(tmp_path, capsys):
    import report

    path = tmp_path / "retrieval.jsonl"
    path.write_text('{"record": "retrieval"}\n')
    assert report.main(["--out", str(tmp_path / "out"), str(path)]) == 0
    assert "retrieval.jsonl: a run of retrieval has a page of its own" in capsys.readouterr().err


def test_a_mistake_is_a_message_and_no_traceback(tmp_path, capsys):
    assert cli.main(["bench", "report", "--out", str(tmp_path / "out"), str(tmp_path / "none.jsonl")]) == 1
    message = capsys.readouterr().err
    assert message.startswith("bench report: ")
    assert "none.jsonl" in message
