"""Hours of mixed traffic on a pool too small for it: nothing may crash, leak, grow or become inexact.

    sglang-blockreuse bench soak --minutes 20 --out DIR

Requests arrive at random: reuse with every policy and several budgets, exact, unmarked, malformed; some are aborted,
some clients go away. The pool is so small that requests are retracted and homes evicted, prefill comes in chunks and
mixes with decode. Exact and unmarked answers are compared with answers that were taken before the load. The exit status
is 1 if anything failed; a progress line comes every 30 s.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import launch
import psutil
from documents import Composer, Law, made_source, requests_of
from mixed import WEIGHTS, MixedTraffic, Outcome, leaks, num_retracted, state_of, take_references
from records import Log, plain
from stats import slope_per_hour

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.run import sigterm_as_exit
from sglang_blockreuse.server_process import Server

FLAGS = (
    "--dtype",
    "float32",
    "--max-running-requests",
    "8",
    "--chunked-prefill-size",
    "64",
    "--enable-mixed-chunk",
)
# on top of what the small pool forces, every n-th decode step retracts somebody
RETRACT = {"SGLANG_TEST_RETRACT": "true", "SGLANG_TEST_RETRACT_INTERVAL": "20"}
TIE = 2e-4  # nats: twice what float32 log-probabilities differ by in other batches
SAMPLE_S = 5.0
PROGRESS_S = 30.0
MAX_GROWTH = 0.05  # of the resident memory, second half against the first after the warm-up


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    log = Log(options.out / "soak.jsonl")
    log.add({"record": "soak", "environment": environment.describe(), "options": plain(options)})
    with sigterm_as_exit(), server_of(options) as server:
        summary = soak(options, server, log)
    log.add({"record": "soak_result", **summary})
    print(summary_text(summary))
    return 1 if summary["problems"] else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_server_arguments(parser, max_total_tokens=2600)
    parser.add_argument("--minutes", type=float, default=20.0, help="of load (default: 20)")
    parser.add_argument("--rate", type=float, default=2.0, help="arrivals per second on average (default: 2)")
    parser.add_argument("--clients", type=int, default=12, help="requests in flight at most (default: 12)")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), choices=POLICIES)
    parser.add_argument("--prompts", type=int, default=15, help="different prompts (default: 15)")
    parser.add_argument("--new-tokens", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--url", help="a running server of ours, in float32; its memory is not watched")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[Server]:
    if options.url:
        yield launch.running(options.url)
        return
    with launch.ours(options, flags=FLAGS, env=RETRACT) as server:
        yield server


def soak(options: argparse.Namespace, server: Server, log: Log) -> dict[str, Any]:
    """References, load, drain, accounts. Returns the summary; its `problems` are empty where all held."""
    cases = take_references(server, prompts_of(options), options.new_tokens)
    traffic = MixedTraffic(
        server,
        cases,
        policies=options.policies,
        num_new_tokens=options.new_tokens,
        tie=TIE,
        seed=options.seed,
    )
    outcomes: list[Outcome] = []
    samples: list[dict[str, float]] = []
    watch = Watch(server, outcomes, samples, log)
    drive(traffic.run, outcomes, options, watch.look)
    problems = [outcome.problem for outcome in outcomes if outcome.problem]
    problems += leaks(server)
    problems += log_problems(server)
    if missing := set(WEIGHTS) - {outcome.kind for outcome in outcomes}:
        problems.append(f"never sent: {', '.join(sorted(missing))}; run longer")
    if server.pid and not num_retracted(server):
        problems.append("nobody was retracted, so the pool was not tight; lower --max-total-tokens")
    problems += growth_problems(samples)
    counts = state_of(server)["counts"]
    if counts.get("errors_total"):
        problems.append(f"the server counted {counts['errors_total']:.0f} errors of ours")
    return {
        "problems": problems,
        "requests": dict(Counter(outcome.kind for outcome in outcomes)),
        "retracted": num_retracted(server),
        "rss_mb_first": samples[0]["rss_mb"] if samples else None,
        "rss_mb_last": samples[-1]["rss_mb"] if samples else None,
        "rss_mb_per_hour": memory_slope(samples),
        "counts": counts,
    }


def prompts_of(options: argparse.Namespace) -> list[tuple[list[int], list[int]]]:
    """Prompts of a few short documents, of which several fit into the pool at once but never all."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(launch.model_of(options))
    law = Law(
        num_requests=options.prompts,
        num_documents=8,
        per_prompt=4,
        zipf=0.5,
        min_tokens=90,
        max_tokens=150,
        seed=options.seed,
    )
    source = made_source(law, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    requests = requests_of(law, source, Composer(tokenizer, source))
    return [(list(request.prompt.input_ids), list(request.prompt.spans)) for request in requests]


def drive(
    send: Callable[[int], Outcome],
    outcomes: list[Outcome],
    options: argparse.Namespace,
    look: Callable[[float], None],
) -> None:
    """Poisson arrivals for the given minutes, no more than `clients` in flight; returns when all are answered."""
    rng = random.Random(f"{options.seed}/arrivals")
    started = time.monotonic()
    deadline = started + 60 * options.minutes
    in_flight: set[concurrent.futures.Future[Outcome]] = set()
    number = 0
    with concurrent.futures.ThreadPoolExecutor(options.clients) as pool:
        arrival = started
        while time.monotonic() < deadline or in_flight:
            now = time.monotonic()
            done = {future for future in in_flight if future.done()}
            outcomes += [future.result() for future in done]
            in_flight -= done
            if now < deadline and now >= arrival and len(in_flight) < options.clients:
                in_flight.add(pool.submit(send, number))
                number += 1
                # arrivals that found no room are not made up for
                arrival = now + rng.expovariate(options.rate)
            look(now - started)
            time.sleep(0.05)


class Watch:
    """Samples the server's memory and says every 30 s how the run goes."""

    def __init__(
        self, server: Server, outcomes: list[Outcome], samples: list[dict[str, float]], log: Log
    ) -> None:
        self._server, self._outcomes, self._samples, self._log = server, outcomes, samples, log
        self._next_sample = self._next_line = 0.0

    def look(self, elapsed_s: float) -> None:
        if elapsed_s >= self._next_sample and self._server.pid:
            self._next_sample = elapsed_s + SAMPLE_S
            self._samples.append({"seconds": elapsed_s, "rss_mb": resident_mb(self._server.pid)})
        if elapsed_s >= self._next_line:
            self._next_line = elapsed_s + PROGRESS_S
            self._say(elapsed_s)

    def _say(self, elapsed_s: float) -> None:
        kinds = Counter(outcome.kind for outcome in self._outcomes)
        failed = [asdict(outcome) for outcome in self._outcomes if outcome.problem]
        rss = self._samples[-1]["rss_mb"] if self._samples else None
        line = {
            "record": "soak_progress",
            "seconds": round(elapsed_s),
            "requests": dict(kinds),
            "rss_mb": rss,
        }
        self._log.add({**line, "failed": failed})
        memory = "" if rss is None else f", {rss:,.0f} MB"
        shown = ", ".join(f"{kind} {num}" for kind, num in sorted(kinds.items()))
        print(
            f"soak: {elapsed_s:5.0f} s, {len(self._outcomes)} answered ({shown}), {len(failed)} failed{memory}, "
            f"{num_retracted(self._server)} retracted",
            file=sys.stderr,
            flush=True,
        )


def resident_mb(pid: int) -> float:
    """Resident memory of a process and its descendants."""
    root = psutil.Process(pid)
    total = 0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total / 1e6


def settled(samples: Sequence[dict[str, float]]) -> list[dict[str, float]]:
    """Samples without the first quarter, in which caches and allocators fill."""
    return list(samples[len(samples) // 4 :])


def memory_slope(samples: Sequence[dict[str, float]]) -> float | None:
    """Growth in MB per hour; None where there are too few samples to tell."""
    kept = settled(samples)
    if len(kept) < 4:
        return None
    return slope_per_hour([s["seconds"] for s in kept], [s["rss_mb"] for s in kept])


def growth_problems(samples: Sequence[dict[str, float]]) -> list[str]:
    kept = settled(samples)
    if len(kept) < 4:
        return []
    half = len(kept) // 2
    early, late = (statistics.median(s["rss_mb"] for s in part) for part in (kept[:half], kept[half:]))
    if late <= early * (1 + MAX_GROWTH):
        return []
    return [f"resident memory grew from {early:,.0f} MB to {late:,.0f} MB, allowed {MAX_GROWTH:.0%}"]


def log_problems(server: Server) -> list[str]:
    return ["the server's log has a traceback"] if "Traceback" in server.log_text() else []


def summary_text(summary: dict[str, Any]) -> str:
    lines = [
        f"{sum(summary['requests'].values())} requests: "
        + ", ".join(f"{kind} {num}" for kind, num in sorted(summary["requests"].items())),
        f"{summary['retracted']} retracted",
    ]
    if summary["rss_mb_per_hour"] is not None:
        lines.append(
            f"resident memory {summary['rss_mb_first']:,.0f} MB at first, {summary['rss_mb_last']:,.0f} MB at last; "
            f"slope after the first quarter {summary['rss_mb_per_hour']:+,.0f} MB/h"
        )
    lines += [f"FAILED: {problem}" for problem in summary["problems"][:20]]
    lines.append(f"{len(summary['problems'])} problems" if summary["problems"] else "all held")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(launch.guarded("bench soak", main))
