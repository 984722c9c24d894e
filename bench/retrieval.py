"""Needles and key-value pairs through the real server: does a layer plan answer as dense decode does?

    sglang-blockreuse bench retrieval --out DIR [--plan NAME|PATH] [--cases 50] [--quick]

Both arms are requests to one server with the plan; dense ones say `blockreuse_mode: exact`. Cases are drawn until
dense decode was right on --cases of each kind, and only those count: same is the share of them that the plan answers
in the same words. retrieval_cases.py says what is asked. The gate: decode steps must be counted as exact and as sparse
rows where they are taken for that. DIR gets retrieval.jsonl, retrieval.md and the server's log.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import launch
from records import Log, plain
from retrieval_cases import KINDS, NUM_DIGITS, Case, cases_of, is_right, said
from tqdm import tqdm

from sglang_blockreuse.demo import environment
from sglang_blockreuse.server_process import Server

QUICK = {"cases": 4}
MODES = {"dense": "exact", "plan": "off"}
ROWS = {"dense": "exact", "plan": "sparse"}
NUM_NEW_TOKENS = NUM_DIGITS + 4  # the space before the digits, and what ends the answer


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    log = Log(options.out / "retrieval.jsonl")
    log.add({"record": "retrieval", "environment": environment.describe(), "options": plain(options)})
    flags = ("--layer-plan", options.plan)
    with launch.ours(options, flags=flags) as server:
        for kind in KINDS:
            measure(server, made_cases(kind, options), options, log)
    text = table(log.records)
    (options.out / "retrieval.md").write_text(text)
    print(text)
    return 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench retrieval", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_server_arguments(parser, max_total_tokens=8000)
    parser.add_argument("--plan", default="smollm2-135m-three-role-256", metavar="NAME|PATH")
    parser.add_argument(
        "--cases", type=int, default=50, help="of each kind, that dense decode answers (default: 50)"
    )
    parser.add_argument(
        "--tries", type=int, default=4, help="cases drawn at most, as a multiple of --cases (default: 4)"
    )
    parser.add_argument("--lengths", type=int, nargs=2, default=(1500, 3000), metavar=("LOW", "HIGH"))
    parser.add_argument("--per-context", type=int, default=5, help="questions on one context (default: 5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few cases, for a look")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    return options


def made_cases(kind: str, options: Any) -> Iterable[Case]:
    """What is asked, as many cases as may be drawn."""
    low, high = options.lengths
    endless = cases_of(
        kind,
        seed=options.seed,
        num_tokens=token_counter(launch.model_of(options)),
        low=low,
        high=high,
        per_context=options.per_context,
    )
    return itertools.islice(endless, options.tries * options.cases)


def token_counter(folder: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def measure(server: Server, cases: Iterable[Case], options: Any, log: Log) -> None:
    """Ask until dense decode was right often enough.

    Raises:
        RuntimeError: the server decoded a request in another way than this arm stands for.
    """
    num_right = 0
    with tqdm(total=options.cases, file=sys.stderr) as bar:
        for case in cases:
            bar.set_description(case.kind)
            record = {"record": "case", **vars(case), "dense": ask(server, case, "dense")}
            del record["prompt"]
            record["right"] = is_right(case, record["dense"])
            if record["right"]:
                record["plan"] = ask(server, case, "plan")
                record["same"] = said(record["plan"]) == said(record["dense"])
                num_right += 1
                bar.update()
            log.add(record)
            if num_right == options.cases:
                return


def ask(server: Server, case: Case, arm: str) -> str:
    """A greedy answer of one arm, its decode steps checked."""
    before = decode_rows(server, ROWS[arm])
    answer = server.generate(
        text=case.prompt,
        sampling_params={
            "temperature": 0,
            "max_new_tokens": NUM_NEW_TOKENS,
            "stop": [".", ",", "\n"],
            "custom_params": {"blockreuse_mode": MODES[arm]},
        },
    )
    num_steps = answer["meta_info"]["completion_tokens"] - 1
    if decode_rows(server, ROWS[arm]) - before < num_steps:
        raise RuntimeError(
            f"a request of the {arm} arm decoded {num_steps} tokens, but not as {ROWS[arm]} rows; give contexts "
            "that are longer than the plan's min_seq_len, and a plan with sparse layers"
        )
    return str(answer["text"])


def decode_rows(server: Server, kind: str) -> float:
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return float(counts.get(f"decode_rows_total {kind}", 0))


def table(records: Sequence[dict[str, Any]]) -> str:
    """Markdown: per kind and together, how often dense is right and the plan says the same."""
    head, *rest = records
    options, made = head["options"], head["environment"]
    lines = [
        f"# Retrieval under {options['plan']}",
        "",
        "cases | drawn | dense right | the plan right too | same answer",
    ]
    lines.append("--- | --- | --- | --- | ---")
    cases = [record for record in rest if record["record"] == "case"]
    for name, kinds in (*((kind, (kind,)) for kind in KINDS), ("all", KINDS)):
        drawn = [record for record in cases if record["kind"] in kinds]
        right = [record for record in drawn if record["right"]]
        too = sum(said(record["plan"]) == record["answer"] for record in right)
        same = sum(record["same"] for record in right)
        shares = (f"{n} of {len(right)} ({n / max(1, len(right)):.0%})" for n in (too, same))
        lines.append(" | ".join([name, str(len(drawn)), str(len(right)), *shares]))
    low, high = options["lengths"]
    lines += ["", f"Contexts of {low} to {high} tokens, {options['per_context']} questions on each at most."]
    packages = ", ".join(f"{name} {version}" for name, version in made["packages"].items())
    return "\n".join([*lines, f"{made['time']}, commit {made['commit']}, {packages}.", ""])


if __name__ == "__main__":
    sys.exit(launch.guarded("bench retrieval", main))
