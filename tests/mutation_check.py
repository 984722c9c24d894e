"""Puts one deliberate fault at a time into a copy of the tree and demands that a test of the default tier fails.

    python tests/mutation_check.py [--only WORD] [--jobs N]

The working tree is not touched. A fault that every test survives is a hole in the tests; the exit status is then 1.
pytest runs in forks of two processes that have imported what takes long, one of them with Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock, Thread

from faults import Fault
from faults_blocks import BLOCK_FAULTS
from faults_kernels import INTERPRETER, KERNEL_FAULTS
from faults_layers import LAYER_FAULTS
from faults_tiers import TIER_FAULTS
from nursery import ONE_THREAD
from places import ROOT

FAULTS = [*KERNEL_FAULTS, *BLOCK_FAULTS, *LAYER_FAULTS, *TIER_FAULTS]
PYTEST = ("-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-W", "ignore")
REPORT_LEN = 2000  # characters
# Imports what is the same in every copy of the tree, then answers each line, a job, with a line: its exit status.
WARM = """
import json, os, sys
import hypothesis, numba, numpy, psutil, pytest, requests, torch, triton, yaml
from threading import Thread

answers = os.fdopen(os.dup(1), "w")

def wait(pid, number):
    print(json.dumps([number, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])]), file=answers, flush=True)

for line in sys.stdin:
    number, folder, report, words = json.loads(line)
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        output = os.open(report, os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1), os.dup2(output, 2)
        os.chdir(folder)
        sys.path.insert(0, folder)
        os.environ["PYTHONPATH"] = folder
        os._exit(pytest.main(words))
    Thread(target=wait, args=(pid, number)).start()
"""


class Warm:
    """Runs pytest in forks of one process."""

    def __init__(self, **env: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", WARM],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **ONE_THREAD, "PYTHONDONTWRITEBYTECODE": "1", **env},
        )
        self._jobs: dict[int, Future[int]] = {}
        self._lock = Lock()
        Thread(target=self._read, daemon=True).start()

    def run(self, folder: Path, tests: str) -> tuple[int, str]:
        """(exit status, end of the report) of these pytest arguments in this copy of the tree."""
        assert self._process.stdin is not None
        report = folder / "report.txt"
        with self._lock:
            number, done = len(self._jobs), Future[int]()
            self._jobs[number] = done
            job = number, str(folder), str(report), [*PYTEST, *tests.split()]
            print(json.dumps(job), file=self._process.stdin, flush=True)
        return done.result(), report.read_text()[-REPORT_LEN:]

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            number, status = json.loads(line)
            self._jobs[number].set_result(status)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


class Runner:
    """Runs tests in copies of the tree, each with one text exchanged or with none."""

    def __init__(self) -> None:
        self._plain, self._interpreter = Warm(), Warm(TRITON_INTERPRET="1")

    def run(self, tests: str, fault: Fault | None = None) -> tuple[int, str]:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            copy_of_the_tree(folder)
            if fault is not None:
                file = folder / fault.file
                file.write_text(file.read_text().replace(fault.old, fault.new))
            if INTERPRETER in tests:
                return self._interpreter.run(folder, f"--grid thin {tests}")
            return self._plain.run(folder, tests)

    def close(self) -> None:
        for warm in (self._plain, self._interpreter):
            warm.close()


def copy_of_the_tree(folder: Path) -> None:
    # the symlinks are relative, so the copied package reaches the copied kernels
    for name in ("kernels", "layer_plans", "sglang_blockreuse", "tests", "bench", "examples"):
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis", "results")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def survives(runner: Runner, fault: Fault) -> str | None:
    """None if the tests notice the fault, else why it does not count."""
    if (ROOT / fault.file).read_text().count(fault.old) == 0:
        return f"the text to change is not in {fault.file}: {fault.old}"
    status, report = runner.run(fault.tests, fault)
    # 1 is a failed test, a negative status a crash; anything else says that the tests did not run
    if status == 1 or status < 0:
        return None
    return "no test failed" if status == 0 else f"pytest did not run (status {status}): {report}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name or file contains this word")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in f"{fault.file} {fault.name}"]
    started = time.monotonic()
    runner = Runner()
    with ThreadPoolExecutor(args.jobs) as pool:
        selections = sorted({fault.tests for fault in faults})
        for tests, (status, report) in zip(selections, pool.map(runner.run, selections), strict=True):
            if status != 0:
                print(f"without a fault these tests do not pass: {tests}\n{report}")
                return 2
        noticed = 0
        for fault, reason in zip(
            faults, pool.map(lambda fault: survives(runner, fault), faults), strict=True
        ):
            noticed += reason is None
            verdict = "noticed " if reason is None else "SURVIVED"
            print(f"{verdict}  {fault.file}: {fault.name}" + (f": {reason}" if reason else ""), flush=True)
    runner.close()
    print(f"{noticed} of {len(faults)} faults noticed in {time.monotonic() - started:.0f} s")
    return 0 if noticed == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
