"""Decode time per token under a layer plan against dense decode, on one real server, turn by turn.

    python bench/layer_plan.py [--plan NAME|PATH] [--batch 8] [--context 7500] [--repeats 5] [--out FILE.json]

Dense turns are requests with `blockreuse_mode: exact` on the very same server, so both sides share weights, pool and
moment; the ratio is the median of paired ratios. A batch shares all of its prompt but the last tokens, which keeps
the prefill short and favours dense decode: its rows read the same keys. The gate comes first: dense turns must count
as exact rows and plan turns as sparse ones.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import fcntl
import json
import random
import statistics
import sys
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from sglang_blockreuse.demo import environment
from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import Server, extended_command, running_server

MODES = {"dense": "exact", "plan": "off"}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="smollm2-135m-three-role")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=7500)
    parser.add_argument("--tokens", type=int, default=24, help="decoded tokens per request and turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--lock", type=Path, help="file to lock while times are taken")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    flags = ["--model-path", str(ensure_model()), "--dtype", options.dtype, "--layer-plan", options.plan]
    flags += ["--max-total-tokens", "16000", "--max-running-requests", str(options.batch)]
    with (
        tempfile.TemporaryDirectory() as logs,
        running_server(extended_command(flags), log=Path(logs) / "server.log", timeout_s=600) as server,
    ):
        for mode in MODES:
            turn(server, mode, options)  # prefills what the others find cached, compiles what is left
        gate(server, options)
        with options.lock.open("w") if options.lock else nullcontext() as lock:
            if lock is not None:
                fcntl.flock(lock, fcntl.LOCK_EX)
            times = measure(server, options)
    ratios = [a / b for a, b in zip(times["plan"], times["dense"], strict=True)]
    for mode, values in times.items():
        print(f"{mode:>6} {statistics.median(values):8.1f} ms per token")
    print(
        f" ratio {statistics.median(ratios):8.2f}  ({min(ratios):.2f} to {max(ratios):.2f}, {len(ratios)} pairs)"
    )
    if options.out:
        record = {"environment": environment.describe(), "plan": options.plan, "dtype": options.dtype}
        record |= {"batch": options.batch, "context": options.context, "tpot_ms": times, "ratios": ratios}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def measure(server: Server, options: Any) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in tqdm(range(options.repeats), file=sys.stderr):
        for mode in sorted(MODES, reverse=bool(repeat % 2)):
            times[mode].append(turn(server, mode, options))
    return times


def gate(server: Server, options: Any) -> None:
    """Raise SystemExit unless the server decoded each side as this benchmark takes it."""
    for mode, kind in (("dense", "exact"), ("plan", "sparse")):
        before = rows(server, kind)
        turn(server, mode, options)
        decoded = options.batch * (options.tokens - 1)
        if rows(server, kind) - before < decoded / 2:
            raise SystemExit(
                f"gate: of {decoded} decode rows only {rows(server, kind) - before:.0f} were {kind}"
            )


def rows(server: Server, kind: str) -> float:
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return float(counts.get(f"decode_rows_total {kind}", 0))


def turn(server: Server, mode: str, options: Any) -> float:
    """ms per token: the median over a batch of the mean time between tokens."""
    rng = random.Random(options.context)
    ids = [rng.randrange(100, 40_000) for _ in range(options.context - 8)]
    prompts = [[*ids, *range(1000 + 8 * i, 1008 + 8 * i)] for i in range(options.batch)]
    with concurrent.futures.ThreadPoolExecutor(options.batch) as pool:
        return statistics.median(
            pool.map(lambda prompt: tpot_ms(server, prompt, mode, options.tokens), prompts)
        )


def tpot_ms(server: Server, ids: list[int], mode: str, num_tokens: int) -> float:
    sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    sampling["custom_params"] = {"blockreuse_mode": MODES[mode]}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    arrivals = []
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=900) as response:
        response.raise_for_status()
        for line in response.iter_lines(chunk_size=None):
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    return 1e3 * (arrivals[-1] - arrivals[0]) / max(1, len(arrivals) - 1)


if __name__ == "__main__":
    sys.exit(main())
