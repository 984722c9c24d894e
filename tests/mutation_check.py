"""Puts one deliberate fault at a time into a copy of the kernels and demands that a test fails.

    python tests/mutation_check.py [--only WORD] [--jobs N]

The working tree is not touched. A fault that every test survives is a hole in the tests; the exit status is then 1.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from places import ROOT


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # in kernels/
    old: str  # must stand in the file
    new: str
    tests: str  # pytest arguments that must notice


INTERPRETER = "tests/kernels/interpreter/"
DECODE, EXTEND = INTERPRETER + "test_decode_attention.py", INTERPRETER + "test_extend_attention.py"
ROTATE, SELECT = INTERPRETER + "test_rotate_copy.py", INTERPRETER + "test_select.py"
FLASHINFER = "tests/kernels/test_kernels_flashinfer.py"

FAULTS = [
    Fault(
        "wrong delta sign",
        "rotate_copy.py",
        "sin = tl.load(sin_table + angle, mask=pair, other=0.0)",
        "sin = -tl.load(sin_table + angle, mask=pair, other=0.0)",
        f"{ROTATE} -k one_angle",
    ),
    Fault(
        "gptj pairs taken for neox pairs",
        "rotate_copy.py",
        "first, second = 2 * i, 2 * i + 1",
        "first, second = i, i + F",
        f"{ROTATE} -k gptj-torch.float32",
    ),
    Fault(
        "channels past the rotary dim left behind",
        "rotate_copy.py",
        "if NUM_STILL > 0:",
        "if NUM_STILL < 0:",
        f"{ROTATE} -k pass_through",
    ),
    Fault(
        "a rotation by zero goes through arithmetic",
        "rotate_copy.py",
        "still = (sin == 0.0) & (cos == 1.0)",
        "still = (sin != sin) & (cos == 1.0)",
        f"{ROTATE} -k by_zero",
    ),
    Fault(
        "only the first layer",
        "rotate_copy.py",
        "layer = tl.program_id(1)",
        "layer = 0",
        f"{ROTATE} -k table",
    ),
    Fault(
        "mask off by one",
        "extend_attention.py",
        "(j[None, :] <= position[:, None])",
        "(j[None, :] < position[:, None])",
        f"{EXTEND} -k own_position",
    ),
    Fault(
        "last key of a tile lost",
        "extend_attention.py",
        "end = num_keys - num_queries + last_query + 1",
        "end = num_keys - num_queries + last_query",
        f"{EXTEND} -k own_position",
    ),
    Fault(
        "tag ignored in extend",
        "extend_attention.py",
        "if HAS_TAGS:",
        "if False:",
        f"{EXTEND} -k own_tag_bit",
    ),
    Fault(
        "tag ignored in decode",
        "decode_attention.py",
        "if HAS_TAGS:",
        "if False:",
        f"{DECODE} -k own_tag_bit",
    ),
    Fault("tag ignored in the scan", "scan.py", "if HAS_TAGS:", "if False:", f"{SELECT} -k test_splits"),
    Fault(
        "wrong group mapping",
        "decode_attention.py",
        "q_head = head * G + g",
        "q_head = head + g * tl.num_programs(1)",
        f"{DECODE} -k over_group",
    ),
    Fault(
        "wrong group mapping in extend",
        "extend_attention.py",
        "q_head = head * G + m % G",
        "q_head = head + m % G * tl.num_programs(1)",
        f"{EXTEND} -k over_group",
    ),
    Fault(
        "the first row's list for every row",
        "decode_attention.py",
        "stride_indices_head + first",
        "stride_indices_head",
        f"{DECODE} -k 64-torch.float32",
    ),
    Fault(
        "stale index: the block before",
        "extend_attention.py",
        "load_entry(entries, j, live, PAGE_SIZE)",
        "load_entry(entries, tl.maximum(j - BLOCK_N, 0), live, PAGE_SIZE)",
        f"{EXTEND} -k own_position",
    ),
    Fault(
        "length of a fixed-width list ignored",
        "triton_common.py",
        "if HAS_LENS:",
        "if False:",
        f"{DECODE} -k fixed_width",
    ),
    Fault(
        "lost tail of a split",
        "triton_common.py",
        "tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_N) * BLOCK_N",
        "(num_keys // NUM_SPLITS) // BLOCK_N * BLOCK_N",
        f"{DECODE} -k lose_no_key",
    ),
    Fault(
        "splits added without weights",
        "decode_attention.py",
        "tl.sum(part * weight[:, None], 0)",
        "tl.sum(part, 0)",
        f"{DECODE} -k lose_no_key",
    ),
    Fault(
        "page offset dropped",
        "triton_common.py",
        "return page, position % PAGE_SIZE",
        "return page, position * 0",
        f"{DECODE} -k any_size_and_layout",
    ),
    Fault(
        "scale forgotten",
        "decode_attention.py",
        "SOFT_BITS) * scale_log2e",
        "SOFT_BITS) * 1.4426950408889634",
        f"{DECODE} -k 64-torch.float32",
    ),
    Fault(
        "sink bit confused with local bit",
        "triton_common.py",
        "tl.where(tag & 1 != 0, alpha, 0.0) + tl.where(tag & 2 != 0, beta, 0.0)",
        "tl.where(tag & 2 != 0, alpha, 0.0) + tl.where(tag & 1 != 0, beta, 0.0)",
        f"{DECODE} -k own_tag_bit",
    ),
    Fault(
        "log-sum-exp left in base 2",
        "decode_attention.py",
        "(top + tl.log2(total)) * 0.6931471805599453",
        "(top + tl.log2(total))",
        f"{DECODE} -k 64-torch.float32",
    ),
    Fault(
        "32-bit addresses",
        "triton_common.py",
        "mask=mask, other=0).to(tl.int64)",
        "mask=mask, other=0).to(tl.int32)",
        f"{EXTEND} -k two_to_the_31",
    ),
    Fault(
        "int4 halves swapped",
        "scan.py",
        "(codes & 15).to(tl.float32)",
        "(codes >> 4).to(tl.float32)",
        f"{SELECT} -k 96-int4",
    ),
    Fault(
        "range of the other int4 half",
        "scan.py",
        "step, low = _half_range(packed, 32)",
        "step, low = _half_range(packed, 0)",
        f"{SELECT} -k 96-int4",
    ),
    Fault(
        "scores pooled before the softmax",
        "scan.py",
        "tl.exp2(logits - (lse * 1.4426950408889634)[:, None])",
        "tl.exp2(logits)",
        f"{SELECT} -k summed_over",
    ),
    Fault(
        "the pool's list ignored",
        "scan.py",
        "position = tl.load(listed, mask=live, other=0)",
        "position = position + 0",
        f"{SELECT} -k only_the_pool",
    ),
    Fault(
        "tie broken the other way",
        "top_k.py",
        "(tied & (tie_rank <= remaining))",
        "(tied & (tie_rank > 1) & (tie_rank <= remaining + 1))",
        f"{SELECT} -k exact_with_ties",
    ),
    Fault(
        "-0 below +0",
        "top_k.py",
        'float("inf"), score) + 0.0',
        'float("inf"), score)',
        f"{SELECT} -k exact_with_ties",
    ),
    Fault(
        "window shorter by one",
        "top_k.py",
        "position >= row_len - window",
        "position > row_len - window",
        f"{SELECT} -k exact_with_ties",
    ),
    Fault(
        "candidates of a short chunk misplaced",
        "top_k.py",
        "num_columns // MERGED_CHUNK_LEN * kept +",
        "(num_columns + MERGED_CHUNK_LEN - 1) // MERGED_CHUNK_LEN * kept +",
        f"{SELECT} -k exact_with_ties",
    ),
    Fault(
        "FlashInfer's base 2 taken for base e",
        "flashinfer_attention.py",
        "lses = [lse / LOG2E + bias",
        "lses = [lse + bias",
        FLASHINFER,
    ),
    Fault(
        "class bias with the wrong sign",
        "flashinfer_attention.py",
        "lses = [lse / LOG2E + bias",
        "lses = [lse / LOG2E - bias",
        FLASHINFER,
    ),
    Fault(
        "custom mask lets a query see one key more",
        "flashinfer_attention.py",
        "<= rows.first_query_R[row_M] + query_M",
        "<= 1 + rows.first_query_R[row_M] + query_M",
        FLASHINFER,
    ),
    Fault(
        "length of an empty row misread by FlashInfer",
        "flashinfer_attention.py",
        "torch.ones_like(lens_R).int() if masked else lens_R.clamp(max=1).int()",
        "lens_R.clamp(max=1).int()",
        FLASHINFER,
    ),
]


def copy_of_the_tree(folder: Path) -> None:
    # the symlinks are relative, so the copied package reaches the copied kernels
    shutil.copytree(ROOT / "kernels", folder / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(ROOT / "layer_plans", folder / "layer_plans")
    for name in ("sglang_blockreuse", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".hypothesis")
        shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=ignored)
    shutil.copy(ROOT / "pyproject.toml", folder)


def run_tests(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        "-W",
        "ignore",
        *tests.split(),
    ]
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    if INTERPRETER in tests:
        environment["TRITON_INTERPRET"] = "1"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def survives(fault: Fault) -> str | None:
    """None if the tests notice the fault, else why it does not count."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        copy_of_the_tree(folder)
        file = folder / "kernels" / fault.file
        source = file.read_text()
        if fault.old not in source:
            return f"the text to change is not in {fault.file}: {fault.old}"
        file.write_text(source.replace(fault.old, fault.new))
        done = run_tests(folder, fault.tests)
    # 1 is a failed test, a negative status a crash; anything else says that the tests did not run
    if done.returncode == 1 or done.returncode < 0:
        return None
    return (
        "no test failed"
        if done.returncode == 0
        else f"pytest did not run: {done.stdout[-400:]}{done.stderr[-400:]}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="faults whose name contains this word")
    parser.add_argument("--jobs", type=int, default=2)
    args = parser.parse_args()
    faults = [fault for fault in FAULTS if args.only in fault.name]
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(args.jobs) as pool:
        copy_of_the_tree(Path(name))
        selections = sorted({fault.tests for fault in faults})
        for tests, done in zip(
            selections, pool.map(lambda t: run_tests(Path(name), t), selections), strict=True
        ):
            if done.returncode != 0:
                print(f"without a fault these tests do not pass: {tests}\n{done.stdout[-2000:]}")
                return 2
        results = list(pool.map(survives, faults))
    for fault, reason in zip(faults, results, strict=True):
        print(
            f"{'noticed ' if reason is None else 'SURVIVED'}  {fault.name}"
            + (f": {reason}" if reason else "")
        )
    noticed = results.count(None)
    print(f"{noticed} of {len(faults)} faults noticed in {time.monotonic() - started:.0f} s")
    return 0 if noticed == len(faults) else 1


if __name__ == "__main__":
    sys.exit(main())
