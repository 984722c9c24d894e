"""Decode time per token under a layer plan against dense decode, on real servers, turn by turn, and where it goes.

    sglang-blockreuse bench layer-plan [--plan NAME|PATH] [--batch 8] [--context 7500] [--repeats 5] [--stock]
                                       [--out FILE.json] [--bars FILE.jsonl]

Dense turns are requests with `blockreuse_mode: exact` on the very same server, so both sides share weights, pool and
moment; the ratio is the median of paired ratios. A batch shares all of its prompt but the last tokens, which keeps
the prefill short and favours dense decode: its rows read the same keys. The gate comes first: dense turns must count
as exact rows and plan turns as sparse ones. With --stock a second server decodes with SGLang's torch_native backend and
prefills with ours, which would take it minutes; its turns stand between the others.

The breakdown is the server's own (`layers.timing`): ms per token step by part and role, and what is left of the time
per token outside of the attention layers. --bars writes it as one JSON object a line, for plotting.
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import requests
from tqdm import tqdm

from sglang_blockreuse.demo import environment
from sglang_blockreuse.layers.step_clock import PARTS
from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import Server, extended_command, running_server, stock_command

MODES = {"dense": "exact", "plan": "off", "stock": None}
ROLES = ("dense", "full", "reindex", "reuse")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench layer-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="smollm2-135m-three-role")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=7500)
    parser.add_argument("--tokens", type=int, default=24, help="decoded tokens per request and turn")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stock", action="store_true", help="also time SGLang's torch_native decode")
    parser.add_argument("--bars", type=Path, metavar="FILE.jsonl", help="write the breakdown")
    parser.add_argument("--lock", type=Path, help="file to lock: shared, and alone while times are taken")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    with ExitStack() as stack:
        lock = stack.enter_context(options.lock.open("w")) if options.lock else None
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_SH)
        servers = start(stack, options)
        if lock is not None:
            fcntl.flock(lock, fcntl.LOCK_EX)
        times, parts = measure(servers, options)
    ratios = {mode: [a / b for a, b in zip(times["plan"], times[mode], strict=True)] for mode in times}
    for mode, values in times.items():
        shown = f"{min(ratios[mode]):.2f} to {max(ratios[mode]):.2f}, {len(values)} pairs"
        print(
            f"{mode:>6} {statistics.median(values):8.1f} ms per token; plan / {mode} "
            f"{statistics.median(ratios[mode]):.2f} ({shown})"
        )
    print(table(parts, statistics.median(times["plan"])))
    if options.bars:
        lines = [{"plan": options.plan, "part": p, "role": r, "ms": ms} for (p, r), ms in parts.items()]
        options.bars.write_text("".join(json.dumps(line) + "\n" for line in lines))
    if options.out:
        record = {"environment": environment.describe(), "plan": options.plan, "dtype": options.dtype}
        record |= {"batch": options.batch, "context": options.context, "tpot_ms": times, "ratios": ratios}
        record["ms_per_step"] = {" ".join(key): ms for key, ms in parts.items()}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def start(stack: ExitStack, options: Any) -> dict[str, Server]:
    """A server for each mode, warm; dense and plan share one, which has passed the gate."""
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    config = folder / "config.yaml"
    config.write_text(f"layers: {{plan: {options.plan}, timing: true}}\n")
    flags = ["--model-path", str(ensure_model()), "--dtype", options.dtype]
    flags += ["--max-total-tokens", "16000", "--max-running-requests", str(options.batch)]
    command = extended_command([*flags, "--blockreuse-config", str(config)])
    ours = stack.enter_context(running_server(command, log=folder / "ours.log", timeout_s=900))
    servers = {"dense": ours, "plan": ours}
    # a first turn prefills what the others find cached, compiles what is left
    warm = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1)).submit(gate, ours, options)
    if options.stock:
        backends = ["--prefill-attention-backend", "blockreuse", "--decode-attention-backend", "torch_native"]
        command = stock_command([*flags, *backends])
        servers["stock"] = stack.enter_context(
            running_server(command, log=folder / "stock.log", timeout_s=900)
        )
        turn(servers["stock"], "stock", options)
    warm.result()
    return servers


def measure(
    servers: dict[str, Server], options: Any
) -> tuple[dict[str, list[float]], dict[tuple[str, str], float]]:
    """(ms per token by mode, ms per step of plan turns by part and role)."""
    times: dict[str, list[float]] = {mode: [] for mode in servers}
    ours = servers["plan"]
    seconds, steps = seconds_of(ours), rows(ours, "sparse")
    for repeat in tqdm(range(options.repeats), file=sys.stderr):
        for mode in sorted(servers, reverse=bool(repeat % 2)):
            times[mode].append(turn(servers[mode], mode, options))
    steps = (rows(ours, "sparse") - steps) / options.batch
    after = seconds_of(ours)
    return times, {key: 1e3 * (after[key] - seconds.get(key, 0.0)) / steps for key in after}


def seconds_of(server: Server) -> dict[tuple[str, str], float]:
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    found = (name.split() for name in counts if name.startswith("decode_seconds_total"))
    return {(part, role): counts[f"decode_seconds_total {part} {role}"] for _, part, role in found}


def table(parts: dict[tuple[str, str], float], tpot_ms: float) -> str:
    """ms per step, parts down and roles across; `between` is the model's own work, the last line what is outside."""
    lines = [f"{'ms per step':>12} " + " ".join(f"{role:>8}" for role in (*ROLES, "all"))]
    for part in PARTS:
        cells = [parts.get((part, role), 0.0) for role in ROLES]
        if any(cells):
            lines.append(f"{part:>12} " + " ".join(f"{ms:8.2f}" for ms in (*cells, sum(cells))))
    outside = tpot_ms - sum(parts.values())
    return "\n".join([*lines, f"{'outside':>12} {'':35} {outside:8.2f}"])


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
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    if MODES[mode] is not None:
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
