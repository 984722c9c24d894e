"""Decode time per token under a layer plan against dense decode, on real servers, turn by turn, and where it goes.

    sglang-blockreuse bench layer-plan --out DIR [--plan NAME|PATH] [--batch 1 8] [--context 2048 7500] [--stock]

Dense turns are requests with `blockreuse_mode: exact` on the very same server, so both sides share weights, pool and
moment; a ratio is the median of paired ratios. A batch shares all of its prompt but the last tokens, which keeps the
prefill short and favours dense decode: its rows read the same keys. Each case, a batch at a context, begins with the
gate: dense turns must count as exact rows and plan turns as sparse ones. With --stock a second server decodes with
SGLang's torch_native backend and prefills with ours, which would take it minutes; its turns stand between the others.

The breakdown is the server's own (`layers.timing`): ms per token step by part and role, and what is left of the time
per token outside of the attention layers. Records go to layer-plan.jsonl as they come; layer-plan.md and .png show
time per token against context and batch, and the breakdown as bars.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import launch
import report_decode
import requests
from records import Log, plain
from tqdm import tqdm

from sglang_blockreuse.demo import environment
from sglang_blockreuse.layers.plan_explain import KVShape, explain
from sglang_blockreuse.layers.plan_loader import load_plan
from sglang_blockreuse.server_process import Server

MODES = {"dense": "exact", "plan": "off", "stock": None}
TAIL = 8  # tokens of a prompt that no other request of its batch has
SPARE = 64  # pool tokens a request may leave behind
TRIES = 3  # of a turn whose stream was not read as it came


@dataclass(frozen=True)
class Case:
    """`batch` requests that decode together, each behind `context` tokens."""

    batch: int
    context: int


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    cases = [Case(batch, context) for context, batch in itertools.product(options.context, options.batch)]
    options.max_total_tokens = options.max_total_tokens or pool_tokens(cases, options.tokens)
    log = Log(options.out / "layer-plan.jsonl")
    log.add({"record": "layer-plan", "environment": environment.describe(), "options": plain(options)})
    with started(options) as servers, tqdm(total=len(cases) * options.repeats, file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(f"{case.batch} x {case.context}")
            measure(servers, case, options, log, bar)
    text = report_decode.tables(log.records)
    (options.out / "layer-plan.md").write_text(text)
    report_decode.plot(log.records, options.out / "layer-plan.png")
    print(text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench layer-plan", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="smollm2-135m-three-role", metavar="NAME|PATH")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batch", type=int, nargs="+", default=[8])
    parser.add_argument("--context", type=int, nargs="+", default=[7500])
    parser.add_argument("--tokens", type=int, default=24, help="decoded tokens per request and turn")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each mode per case")
    parser.add_argument("--stock", action="store_true", help="also time SGLang's torch_native decode")
    parser.add_argument("--quick", action="store_true", help="one turn of a few tokens at a short context")
    launch.add_server_arguments(parser, max_total_tokens=0)
    options = parser.parse_args(argv)
    if options.quick:
        options.context, options.tokens, options.repeats = [1536], 8, 1
    if min(options.context) <= TAIL or min(*options.batch, options.tokens - 2, options.repeats) < 1:
        parser.error(
            f"--context is at least {TAIL + 1}, --tokens at least 3, --batch and --repeats at least 1"
        )
    return options


def pool_tokens(cases: Sequence[Case], num_tokens: int) -> int:
    """KV pool that holds the largest case twice over: what an earlier case left must not be in its way."""
    return 2 * max(case.context + case.batch * (TAIL + num_tokens + SPARE) for case in cases)


@contextlib.contextmanager
def started(options: argparse.Namespace) -> Iterator[dict[str, Server]]:
    """A server for each mode; dense and plan share one."""
    running = ("--max-running-requests", str(max(options.batch)), "--dtype", options.dtype)
    options.server_flags = [*running, *options.server_flags]
    with contextlib.ExitStack() as stack:
        ours = stack.enter_context(launch.ours(options, layers={"plan": options.plan, "timing": True}))
        servers = {"dense": ours, "plan": ours}
        if options.stock:
            flags = ("--prefill-attention-backend", "blockreuse")
            stock = launch.stock(options, offset=30, attention="torch_native", flags=flags)
            servers["stock"] = stack.enter_context(stock)
        yield servers


def measure(
    servers: dict[str, Server], case: Case, options: argparse.Namespace, log: Log, bar: tqdm[Any]
) -> None:
    """One record per turn, and one with what a step of the plan spent where."""
    ours = servers["plan"]
    gate(ours, case, options.tokens)
    if "stock" in servers:  # a first turn prefills what the others find cached
        turn(servers["stock"], "stock", case, options.tokens)
    seconds, steps = seconds_of(ours), rows(ours, "sparse")
    for repeat in range(options.repeats):
        for mode in sorted(servers, reverse=bool(repeat % 2)):
            ms = turn(servers[mode], mode, case, options.tokens)
            log.add({"record": "turn", **vars(case), "repeat": repeat, "mode": mode, "tpot_ms": ms})
        bar.update()
    steps = (rows(ours, "sparse") - steps) / case.batch
    spent = {
        key: 1e3 * (after - seconds.get(key, 0.0)) / steps for key, after in seconds_of(ours).items() if after
    }
    cost = bytes_of(case, options)
    log.add({"record": "breakdown", **vars(case), "steps": steps, "ms_per_step": spent, "bytes": cost})


def bytes_of(case: Case, options: argparse.Namespace) -> dict[str, float]:
    """Keys and values that a step reads, by the plan and by dense decode."""
    config = json.loads((options.model / "config.json").read_text())
    shape = KVShape.of_config(config, kv_element_bytes=4 if options.dtype == "float32" else 2)
    plan = load_plan(options.plan).bind(config["num_hidden_layers"], config["architectures"][0])
    cost = explain(plan, shape, num_tokens=case.context, batch=case.batch)
    return {"plan": cost.total_bytes, "dense": cost.dense_bytes}


def seconds_of(server: Server) -> dict[str, float]:
    """By "part role"."""
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    clock = "decode_seconds_total "
    return {name.removeprefix(clock): s for name, s in counts.items() if name.startswith(clock)}


def gate(server: Server, case: Case, num_tokens: int) -> None:
    """Raise RuntimeError unless the server decoded each side as this benchmark takes it."""
    for mode, kind in (("dense", "exact"), ("plan", "sparse")):
        before = rows(server, kind)
        turn(server, mode, case, num_tokens)
        decoded, found = case.batch * (num_tokens - 1), rows(server, kind) - before
        if found < decoded / 2:
            raise RuntimeError(
                f"gate: of {decoded} decode rows of {case} only {found:.0f} were {kind}; a plan whose "
                "min_seq_len or final_k exceeds the context decodes dense"
            )


def rows(server: Server, kind: str) -> float:
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return float(counts.get(f"decode_rows_total {kind}", 0))


def turn(server: Server, mode: str, case: Case, num_tokens: int) -> float:
    """ms per token: the median over a batch of the mean time between tokens.

    Raises:
        RuntimeError: the streams came in heaps again and again, so that their times are the reader's.
    """
    for _ in range(TRIES):
        arrivals = batch_arrivals(server, mode, case, num_tokens)
        if not any(len(t) <= num_tokens or in_heaps(t) for t in arrivals):
            return statistics.median(1e3 * (t[-1] - t[1]) / (len(t) - 2) for t in arrivals)
    raise RuntimeError(
        f"{mode}, {case}: in {TRIES} turns tokens arrived in heaps and not one by one; time on an idle machine, and "
        "without --stream-interval"
    )


def in_heaps(arrivals: Sequence[float]) -> bool:
    """Most tokens came together although the request took its time: a stalled reader, or a server that gathers.

    `arrivals` in seconds: when the request was sent, then when each of its tokens came.
    """
    mean = (arrivals[-1] - arrivals[0]) / (len(arrivals) - 1)
    gaps = [b - a for a, b in itertools.pairwise(arrivals[1:])]
    return sum(gap < mean / 10 for gap in gaps) > len(gaps) / 2


def batch_arrivals(server: Server, mode: str, case: Case, num_tokens: int) -> list[list[float]]:
    """Of each request of the batch, see `in_heaps`."""
    rng = random.Random(case.context)
    ids = [rng.randrange(100, 40_000) for _ in range(case.context - TAIL)]
    tails = (range(1000 + TAIL * i, 1000 + TAIL * (i + 1)) for i in range(case.batch))
    with concurrent.futures.ThreadPoolExecutor(case.batch) as pool:
        return list(pool.map(lambda tail: arrivals_of(server, [*ids, *tail], mode, num_tokens), tails))


def arrivals_of(server: Server, ids: list[int], mode: str, num_tokens: int) -> list[float]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    if MODES[mode] is not None:
        sampling["custom_params"] = {"blockreuse_mode": MODES[mode]}
    body = {"input_ids": ids, "sampling_params": sampling, "stream": True}
    arrivals = [time.perf_counter()]
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=900) as response:
        response.raise_for_status()
        for line in response.iter_lines(chunk_size=None):
            if line.startswith(b"data: {"):
                arrivals.append(time.perf_counter())
    return arrivals


if __name__ == "__main__":
    sys.exit(launch.guarded("bench layer-plan", main))
