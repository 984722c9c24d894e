"""How throughput and hit rate grow with replicas, documents and cache size, from measured costs.

    sglang-blockreuse bench scale --out DIR --costs results/serving/serving.jsonl
    sglang-blockreuse bench scale --out DIR --prefill-ms 1.8 --decode-ms 49

Costs come from a run of `bench serving` (whose stock arm and policies tell prefill from decode) or from flags. With a
run, the workload is the run's, and the simulator says first how well it predicts the rounds that it was not fitted to.
What it leaves out stands in scale_model.py and docs/scale.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch
import records
from scale_model import ROUTINGS, Costs, Fleet, Outcome, Server, Workload, simulate

Record = dict[str, Any]
SYSTEM_LEN, QUESTION_LEN = 45, 20  # tokens, of the prompts that `bench serving` makes


@dataclass(frozen=True)
class Prediction:
    """One measured round and what a simulator that has not seen it says."""

    arm: str
    round: int
    throughput: float
    predicted_throughput: float
    computed: float  # tokens per request, homes included
    predicted_computed: float

    @property
    def error(self) -> float:
        return self.predicted_throughput / self.throughput - 1


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    workload, costs, fleet = given(options)
    sections = []
    if options.costs:
        sections.append(validation_table(validate(records.read([options.costs]))))
    log = records.Log(options.out / "scale.jsonl")
    log.add({"record": "scale", "workload": dataclasses.asdict(workload), "costs": dataclasses.asdict(costs)})
    for row in sweep(options, workload, costs, fleet):
        log.add(row)
    sections.append(tables(log.of(record="point"), workload, costs))
    text = "\n".join(sections)
    (options.out / "scale.md").write_text(text)
    plot(log.of(record="point"), options.out / "scale.png")
    print(text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--costs", type=Path, metavar="JSONL", help="a run of bench serving with a stock arm and a policy"
    )
    parser.add_argument("--prefill-ms", type=float, help="per computed prompt token")
    parser.add_argument("--decode-ms", type=float, help="per answer token, at the load that is meant")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--documents", type=int, nargs="+", default=[50, 200, 1000])
    parser.add_argument("--pool-tokens", type=int, nargs="+", default=[30_000, 60_000, 120_000])
    parser.add_argument("--tensor-parallel", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument(
        "--efficiency", type=float, default=0.8, help="of a further device under tensor parallelism"
    )
    parser.add_argument("--threshold", type=float, default=0.3, help="--cache-threshold of SGLang's router")
    parser.add_argument(
        "--requests", type=int, default=1000, help="simulated requests of a point (default: 1000)"
    )
    parser.add_argument("--budget", type=float, default=0.1)
    for field in ("per_prompt", "doc_len", "answer_len", "seed"):
        parser.add_argument(
            f"--{field.replace('_', '-')}", type=int, help="default: the run's, or 6, 250, 16, 0"
        )
    parser.add_argument("--zipf", type=float)
    options = parser.parse_args(argv)
    if options.costs is None and None in (options.prefill_ms, options.decode_ms):
        parser.error("costs are needed: --costs FILE, or --prefill-ms and --decode-ms")
    return options


def given(options: argparse.Namespace) -> tuple[Workload, Costs, Fleet]:
    """What the flags and the measured run say together; flags win."""
    workload, fleet = Workload(), Fleet()
    costs = Costs((options.prefill_ms or 0) / 1000, (options.decode_ms or 0) / 1000)
    if options.costs:
        found = records.read([options.costs])
        workload, fleet = run_of(found)
        costs = fit(rounds_of(found), workload.answer_len)
    for name in ("per_prompt", "doc_len", "answer_len", "seed", "zipf"):
        if getattr(options, name) is not None:
            workload = dataclasses.replace(workload, **{name: getattr(options, name)})
    workload = dataclasses.replace(workload, num_requests=options.requests, shown=False)
    fleet = dataclasses.replace(fleet, efficiency=options.efficiency, prefix_threshold=options.threshold)
    return workload, costs, fleet


def run_of(found: Sequence[Record]) -> tuple[Workload, Fleet]:
    """Workload and fleet of a run of `bench serving`.

    Raises:
        ValueError: the file is none, or its workload has turns, unmarked requests or arrivals by a rate.
    """
    if not found or found[0].get("record") != "serving":
        raise ValueError("--costs takes serving.jsonl of `bench serving`, whose first record is `serving`")
    o = found[0]["options"]
    if o["turns"] != 1 or o["unmarked_share"] or o["rate"] != "inf" or o["traffic"] != "warm":
        raise ValueError(
            "the simulator knows closed loops of warm, marked requests of one turn; run that for costs"
        )
    mean = statistics.mean(r["total_input_tokens"] / r["completed"] for r in found if r["record"] == "round")
    workload = Workload(
        num_requests=o["requests"],
        num_documents=o["documents"],
        per_prompt=o["per_prompt"],
        zipf=o["zipf"],
        doc_len=round((mean - SYSTEM_LEN - QUESTION_LEN) / o["per_prompt"]),
        system_len=SYSTEM_LEN,
        question_len=QUESTION_LEN,
        answer_len=o["new_tokens"],
        shown=True,
        seed=o["seed"],
    )
    return workload, Fleet(pool_len=o["max_total_tokens"], running=o["clients"])


def rounds_of(found: Sequence[Record]) -> list[Record]:
    return [r for r in found if r["record"] == "round" and r["arm"] != "unmarked"]


def computed(one: Record) -> float:
    """Prompt tokens that a measured round computed, homes included."""
    if one["arm"] == "stock":
        return float(one["total_input_tokens"] * (1 - one["hit_share"]))
    tokens = one["blockreuse_tokens"]
    return float(tokens["repaired"] + tokens["fresh"] + one["blockreuse_home_tokens"])


def fit(rounds: Sequence[Record], answer_len: int) -> Costs:
    """Least squares of duration = prefill_s * computed + decode_s * answered over measured rounds.

    Raises:
        ValueError: the rounds cannot tell the two apart, which takes a stock arm and one that reuses.
    """
    import numpy as np

    rows = np.array([[computed(one), one["completed"] * answer_len] for one in rounds])
    durations = np.array([one["duration"] for one in rounds])
    (prefill_s, decode_s), _, rank, _ = np.linalg.lstsq(rows, durations, rcond=None)
    if rank < 2 or prefill_s <= 0 or decode_s < 0:
        raise ValueError(
            f"prefill and decode cannot be told apart in these rounds ({prefill_s:.2g} s and {decode_s:.2g} s per "
            "token); take a run with the arms stock and seam, or give --prefill-ms and --decode-ms"
        )
    return Costs(float(prefill_s), float(decode_s))


def validate(found: Sequence[Record]) -> list[Prediction]:
    """Every round, predicted by costs fitted to the other rounds. Empty where there is but one."""
    workload, fleet = run_of(found)
    rounds = rounds_of(found)
    budget = found[0]["options"]["budget"] or 0.05
    predictions = []
    for one in rounds:
        others = [r for r in rounds if r["round"] != one["round"]]
        if not others:
            return []
        costs = fit(others, workload.answer_len)
        server = Server(None if one["arm"] == "stock" else budget)
        outcome = simulate(dataclasses.replace(workload, seed=1000 * one["round"]), costs, fleet, server)
        predictions.append(
            Prediction(
                one["arm"],
                one["round"],
                one["completed"] / one["duration"],
                outcome.throughput,
                computed(one) / one["completed"],
                outcome.computed_per_request,
            )
        )
    return predictions


def sweep(options: argparse.Namespace, workload: Workload, costs: Costs, fleet: Fleet) -> list[Record]:
    """Points of three questions: cache size over documents, replicas by routing, devices as replicas or as ranks."""
    points: list[Record] = []

    def add(question: str, workload: Workload, fleet: Fleet, server: Server) -> None:
        outcome: Outcome = simulate(workload, costs, fleet, server)
        points.append(
            {
                "record": "point",
                "question": question,
                "documents": workload.num_documents,
                "arm": "stock" if server.budget is None else "blocks",
                **dataclasses.asdict(fleet),
                **dataclasses.asdict(outcome),
            }
        )

    arms = (Server(None), Server(options.budget))
    for documents in options.documents:
        library = dataclasses.replace(workload, num_documents=max(documents, workload.per_prompt))
        for pool in options.pool_tokens:
            for server in arms:
                add("cache", library, dataclasses.replace(fleet, pool_len=pool), server)
        for replicas in options.replicas:
            for routing in ROUTINGS:
                one = dataclasses.replace(fleet, replicas=replicas, routing=routing)
                add("replicas", library, one, arms[1])
    largest = dataclasses.replace(workload, num_documents=max(*options.documents, workload.per_prompt))
    devices = max(options.tensor_parallel)
    for ranks in options.tensor_parallel:
        if devices % ranks == 0:
            one = dataclasses.replace(
                fleet, replicas=devices // ranks, tensor_parallel=ranks, routing="blocks"
            )
            add("ranks", largest, one, arms[1])
    return points


def validation_table(predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return "Not validated: the run has one round only.\n"
    rows = [
        f"| {p.arm} | {p.round} | {p.throughput:.2f} | {p.predicted_throughput:.2f} | {100 * p.error:+.0f} % "
        f"| {p.computed:,.0f} | {p.predicted_computed:,.0f} |"
        for p in predictions
    ]
    worst = max(abs(p.error) for p in predictions)
    head = "| arm | round | requests/s | predicted | error | computed tokens per request | predicted |"
    return "\n".join(
        [
            "### Against the measured run, each round predicted from the others\n",
            head,
            "|---|---|---|---|---|---|---|",
            *rows,
            f"\nLargest error of the throughput: {100 * worst:.0f} %.\n",
        ]
    )


def tables(points: Sequence[Record], workload: Workload, costs: Costs) -> str:
    title = (
        f"Costs: {1000 * costs.prefill_s:.2f} ms per computed token, {1000 * costs.decode_s:.1f} ms per answer token. "
        f"{workload.num_requests} requests of {workload.per_prompt} documents of {workload.doc_len} tokens, "
        f"Zipf {workload.zipf:g}, cold start.\n"
    )
    out = [title]
    out += [
        "### One replica: documents and cache\n",
        "| documents | pool | arm | requests/s | computed tokens per request | documents found |",
    ]
    out += ["|---|---|---|---|---|---|"]
    for p in points:
        if p["question"] == "cache":
            out.append(
                f"| {p['documents']:,} | {p['pool_len']:,.0f} | {p['arm']} | {p['throughput']:.2f} "
                f"| {p['computed_per_request']:,.0f} | {100 * p['document_hits']:.0f} % |"
            )
    out += ["\n### Replicas and routing, with blocks\n"]
    out += [
        "| documents | replicas | routing | requests/s | documents found | busiest / mean |",
        "|---|---|---|---|---|---|",
    ]
    for p in points:
        if p["question"] == "replicas":
            out.append(
                f"| {p['documents']:,} | {p['replicas']} | {p['routing']} | {p['throughput']:.2f} "
                f"| {100 * p['document_hits']:.0f} % | {p['imbalance']:.2f} |"
            )
    out += ["\n### The same devices as replicas or as tensor-parallel ranks\n"]
    out += ["| replicas | ranks each | requests/s | documents found |", "|---|---|---|---|"]
    for p in points:
        if p["question"] == "ranks":
            out.append(
                f"| {p['replicas']} | {p['tensor_parallel']} | {p['throughput']:.2f} "
                f"| {100 * p['document_hits']:.0f} % |"
            )
    return "\n".join(out) + "\n"


def plot(points: Sequence[Record], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    cache = [p for p in points if p["question"] == "cache"]
    for arm, style in (("stock", "--"), ("blocks", "-")):
        for i, pool in enumerate(sorted({p["pool_len"] for p in cache})):
            line = [p for p in cache if p["pool_len"] == pool and p["arm"] == arm]
            xs, ys = [p["documents"] for p in line], [p["throughput"] for p in line]
            left.plot(xs, ys, style, marker="o", color=f"C{i}", label=f"{arm}, {pool:,.0f} tokens")
    left.set(xscale="log", xlabel="documents", ylabel="requests/s, one replica", ylim=(0, None))
    spread = [p for p in points if p["question"] == "replicas"]
    documents = max(p["documents"] for p in spread)
    for routing in ROUTINGS:
        line = [p for p in spread if p["routing"] == routing and p["documents"] == documents]
        right.plot([p["replicas"] for p in line], [p["throughput"] for p in line], marker="o", label=routing)
    right.set(xlabel="replicas", ylabel=f"requests/s, {documents:,} documents", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(launch.guarded("bench scale", main))
