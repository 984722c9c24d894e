"""Benchmarks: quality, tasks, serving, retrieval, soak, scale, kernels, limits, all figures, reports of results.

They live in bench/ of the source repository and are no part of the wheel: the folder is looked for beside the
installed package (a clone installed with `pip install -e '.[bench]'`), then in the current folder. Every benchmark
explains itself: `sglang-blockreuse bench quality --help`.
"""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HELP = "measure quality, serving and endurance (from a clone of the repository)"
BENCHMARKS = (
    "quality",
    "tasks",
    "serving",
    "retrieval",
    "soak",
    "scale",
    "kernels",
    "attention",
    "layer-plan",
    "repair",
    "limits",
    "figures",
    "report",
)
# `kernels` is an import name that SGLang's own dependency owns, and bench/ comes first in the path of every benchmark
SCRIPTS = {
    "kernels": "kernel_times.py",
    "attention": "cpu_attention.py",
    "layer-plan": "layer_plan.py",
    "repair": "sparse_repair.py",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    # an own --help per benchmark, so everything behind the name is handed on
    parser.add_argument("benchmark", choices=BENCHMARKS)
    parser.add_argument("words", nargs=argparse.REMAINDER, metavar="...", help="its own options")


def run(arguments: argparse.Namespace) -> int:
    return run_script(arguments.benchmark, arguments.words)


def run_script(name: str, words: Sequence[str]) -> int:
    """Run bench/NAME.py with these words; 2, with where it was looked for, if there is no such folder."""
    folder = find_folder()
    if folder is None:
        searched = ", ".join(str(place) for place in places())
        print(
            f"sglang-blockreuse bench: there is no bench/{script_of(name)} in {searched}. Benchmarks are not "
            "part of the wheel: clone the repository and run this there, or `pip install -e '.[bench]'` in the clone.",
            file=sys.stderr,
        )
        return 2
    script = folder / script_of(name)
    # as `python bench/quality.py` would have it: the script's folder comes first
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
    before, sys.argv = sys.argv, [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    finally:
        sys.argv = before
    return 0


def script_of(name: str) -> str:
    return SCRIPTS.get(name, f"{name}.py")


def places() -> Iterator[Path]:
    """Folders that may be bench/, first match wins."""
    yield Path(__file__).resolve().parents[2] / "bench"
    yield Path.cwd() / "bench"


def find_folder() -> Path | None:
    return next(
        (place for place in places() if all((place / script_of(b)).is_file() for b in BENCHMARKS)), None
    )
