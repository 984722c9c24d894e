"""Times every kernel against the plain PyTorch reference that is its law, on the device that is there.

    sglang-blockreuse bench kernels --out DIR [--context 4096] [--batch 4] [--dtype bfloat16] [--quick]

On a CPU the compiled CPU kernels, on CUDA the Triton kernels behind the dispatcher, both on a shuffled synthetic pool.
Kernel and reference take turns; a ratio is the median over turns. An operation is timed only after its output passed
the gate, else its times are missing and the status is 1. The reference is written to be read, so the ratio is no
measure of quality: for that see cpu_attention.py (against SGLang's backend), sparse_decode.py and gpu_check.py (against
the bytes that must move).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import launch
import torch
from kernel_cases import DTYPES, Operation, Sizes, operations
from records import Log, plain
from tqdm import tqdm

from sglang_blockreuse.demo import environment

QUICK = {"context": 512, "batch": 2, "repeats": 2}


@dataclass(frozen=True)
class Timing:
    operation: str
    kernel: str
    error: float
    bound: float
    kernel_ms: float | None = None  # medians; None where the gate is red
    reference_ms: float | None = None
    speed_up: float | None = None  # median over turns of reference / kernel

    @property
    def passed(self) -> bool:
        return self.error <= self.bound


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(options.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = Sizes(options.context, options.batch, options.q_heads, options.kv_heads, options.head_dim)
    log = Log(options.out / "kernels.jsonl")
    log.add(
        {
            "record": "kernels",
            "environment": environment.describe(),
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "options": plain(options),
        }
    )
    timings = []
    for operation in tqdm(operations(device, sizes, DTYPES[options.dtype]), desc="kernels", file=sys.stderr):
        timings.append(measure(operation, options.repeats, device))
        log.add({"record": "kernel", **asdict(timings[-1])})
    text = table(timings, log.records[0])
    (options.out / "kernels.md").write_text(text)
    print(text)
    return 0 if all(timing.passed for timing in timings) else 1


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench kernels", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--context", type=int, default=4096, help="tokens of a row (default: 4096)")
    parser.add_argument("--batch", type=int, default=4, help="rows (default: 4)")
    parser.add_argument("--q-heads", type=int, default=9)
    parser.add_argument("--kv-heads", type=int, default=3)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7, help="turns (default: 7)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="small sizes, two turns, to see that all works")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    return options


def measure(operation: Operation, repeats: int, device: str) -> Timing:
    """Gate, then turns. A first call compiles and is not timed."""
    error = operation.error(operation.kernel(), operation.reference())
    gated = Timing(operation.name, operation.kernel_name, error, operation.bound)
    if not gated.passed:
        return gated
    pairs = [(clock(operation.kernel, device), clock(operation.reference, device)) for _ in range(repeats)]
    return Timing(
        operation.name,
        operation.kernel_name,
        error,
        operation.bound,
        kernel_ms=statistics.median(ours for ours, _ in pairs),
        reference_ms=statistics.median(law for _, law in pairs),
        speed_up=statistics.median(law / ours for ours, law in pairs),
    )


def clock(call: Callable[[], Any], device: str) -> float:
    """Milliseconds of one call, the device's work included."""
    if device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    call()
    if device == "cuda":
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def table(timings: Sequence[Timing], run: dict[str, Any]) -> str:
    from report_quality import machine

    o = run["options"]
    lines = [
        f"### Kernels: {o['batch']} rows of {o['context']:,} tokens, {o['dtype']}, {run['device']}\n",
        f"{machine(run)}\n",
        "| operation | kernel | error | bound | kernel ms | reference ms | reference / kernel |",
        "|---|---|---|---|---|---|---|",
    ]
    for t in timings:
        times = "**gate red**, not timed | | |"
        if t.passed:
            times = f"{t.kernel_ms:.2f} | {t.reference_ms:.2f} | {t.speed_up:.1f} |"
        lines.append(f"| {t.operation} | {t.kernel} | {t.error:.1e} | {t.bound:.1e} | {times}")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(launch.guarded("bench kernels", main))
