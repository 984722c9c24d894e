"""Tasks of lm-eval against a running server, answered exactly and with reuse: what reuse costs in task accuracy.

    sglang-blockreuse bench tasks --out DIR [--policies seam query] [--budget 0.1] [--url URL]
    sglang-blockreuse bench tasks --out DIR --url URL --tasks NAME ... --include-path FOLDER    # tasks of your own

The task that ships, `blockreuse_facts`, asks for one fact among several documents that the server cuts at a separator,
over lm-eval's `local-completions`, with no hub asked. Any other task of kind generate_until works if its prompts
carry the separator. Every arm gets the same prompts, `exact` first: its score is what the others are held to, and
differences have a paired bootstrap. An arm in which the server reused nothing gets no score and the status is 1.
Needs `pip install 'lm-eval[api]'`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import shutil
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import launch
from documents import Law, made_source, popularity
from records import Log, plain
from stats import bootstrap

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo import environment
from sglang_blockreuse.server_process import Server

OWN_TASK = "blockreuse_facts"
OWN_FOLDER = Path(__file__).parent / "lm_eval_tasks"
SEPARATOR = "<<<document>>>"
QUICK = {"requests": 3, "per_prompt": 3}


@dataclass(frozen=True)
class Score:
    arm: str
    task: str
    metric: str
    values: list[float]  # of each prompt
    reused_share: float  # of the prompt tokens
    problem: str | None = None

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    if importlib.util.find_spec("lm_eval") is None:
        raise ValueError("lm-eval is not installed, and it runs the tasks. pip install 'lm-eval[api]'")
    options.out.mkdir(parents=True, exist_ok=True)
    log = Log(options.out / "tasks.jsonl")
    log.add({"record": "tasks", "environment": environment.describe(), "options": plain(options)})
    rows = options.out.resolve() / "facts.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in facts(options)))
    scores: list[Score] = []
    with server_of(options) as server:
        for arm, params in arms_of(options).items():
            server.flush_cache()
            scores += evaluate(options, server, rows, arm, params)
            for score in scores[-len(options.tasks) :]:
                log.add({"record": "score", **asdict(score)})
    text = table(scores, log.records[0])
    (options.out / "tasks.md").write_text(text)
    print(text)
    return 1 if any(score.problem for score in scores) else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench tasks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_server_arguments(parser, max_total_tokens=30_000)
    parser.add_argument("--url", help="a running server of ours, with blocks.separator")
    parser.add_argument(
        "--separator", default=SEPARATOR, help=f"of the server at --url (default: {SEPARATOR})"
    )
    parser.add_argument("--tasks", nargs="+", default=[OWN_TASK], metavar="NAME", help=f"default: {OWN_TASK}")
    parser.add_argument("--include-path", type=Path, help="folder with task files of your own")
    parser.add_argument("--limit", type=int, help="prompts of each task")
    parser.add_argument("--policies", nargs="+", default=["seam"], choices=POLICIES)
    parser.add_argument("--budget", type=float, help="recomputed share; default: the server's")
    parser.add_argument("--requests", type=int, default=24, help=f"prompts of {OWN_TASK} (default: 24)")
    parser.add_argument("--per-prompt", type=int, default=6, help="documents of each (default: 6)")
    parser.add_argument("--documents", type=int, default=24, help="in the library (default: 24)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="a few prompts, to see that all works")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    return options


def arms_of(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Arm -> custom_params of its requests."""
    budget = {} if options.budget is None else {"blockreuse_budget": options.budget}
    reuse = {policy: {"blockreuse_policy": policy, **budget} for policy in options.policies}
    return {"exact": {"blockreuse_mode": "exact"}, **reuse}


def facts(options: argparse.Namespace) -> Iterator[dict[str, str]]:
    """Rows of the task that ships: documents of the benchmark's library, a question about one of them."""
    law = Law(num_documents=options.documents, per_prompt=options.per_prompt, seed=options.seed)
    source = made_source(law, lambda text: len(text) // 4)  # about four letters a token
    rng = random.Random(f"{options.seed}/tasks")
    weights = popularity(options.documents, law.zipf)
    for _ in range(options.requests):
        asked = rng.choices(range(options.documents), weights)[0]
        others = rng.sample([i for i in range(options.documents) if i != asked], options.per_prompt - 1)
        order = [asked, *others]
        rng.shuffle(order)
        question = rng.choice(source.about(asked))
        documents = [source.documents[i] for i in order]
        text = options.separator.join(
            ["Answer from the documents.\n", *documents, f"\nQuestion: {question.text}\nAnswer:"]
        )
        yield {"prompt": text, "answer": question.answer}


@contextlib.contextmanager
def server_of(options: argparse.Namespace) -> Iterator[Server]:
    if options.url:
        yield launch.running(options.url)
        return
    options.blocks = [*options.blocks, f"separator={options.separator!r}"]
    with launch.ours(options) as server:
        yield server


def evaluate(
    options: argparse.Namespace, server: Server, rows: Path, arm: str, params: dict[str, Any]
) -> list[Score]:
    """One arm's scores, a task each."""
    # set before the first import of the hub's client, which reads them once
    os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    folders = [str(folder) for folder in (own_folder(rows), options.include_path) if folder]
    before = tokens_of(server)
    results = simple_evaluate(
        model="local-completions",
        model_args={
            "model": "default",
            "base_url": f"{server.url}/v1/completions",
            "tokenizer_backend": "None",  # text goes to the server, which cuts and encodes it
            "tokenized_requests": False,
            "num_concurrent": 1,
        },
        tasks=options.tasks,
        task_manager=TaskManager(include_path=folders),
        gen_kwargs={"custom_params": params, "temperature": 0},
        limit=options.limit,
        bootstrap_iters=0,
    )
    done = {kind: n - before[kind] for kind, n in tokens_of(server).items()}
    share = done["reused"] / max(1, sum(done.values()))
    problem = "the server reused nothing" if arm != "exact" and share == 0 else None
    return [score_of(name, results["samples"][name], arm, share, problem) for name in options.tasks]


def own_folder(rows: Path) -> Path:
    """A folder beside the rows with our task, which names them: lm-eval reads files and merges nothing into them."""
    folder = rows.parent / "lm_eval_tasks"
    shutil.copytree(OWN_FOLDER, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    kwargs = json.dumps({"data_files": str(rows)})
    (folder / "facts.yaml").write_text(f"{(OWN_FOLDER / 'facts.yaml').read_text()}dataset_kwargs: {kwargs}\n")
    return folder


def score_of(
    task: str, samples: Sequence[dict[str, Any]], arm: str, share: float, problem: str | None
) -> Score:
    """Scores by prompt, in the order of the task. The first of its metrics counts."""
    metric = samples[0]["metrics"][0]
    ordered = sorted(samples, key=lambda sample: sample["doc_id"])
    return Score(arm, task, metric, [float(sample[metric]) for sample in ordered], share, problem)


def tokens_of(server: Server) -> dict[str, float]:
    """Prompt tokens by kind, all that the server has counted."""
    state = server.get("/server_info")["internal_states"][0].get("blockreuse")
    if state is None:
        raise ValueError(f"{server.url} runs without block reuse; start it with `sglang-blockreuse serve`")
    return {k: state["counts"].get(f"tokens_total {k}", 0) for k in ("prefix", "reused", "repaired", "fresh")}


def table(scores: Sequence[Score], run: dict[str, Any]) -> str:
    from report_quality import machine

    lines = [f"### Tasks: exact answers and reused ones\n\n{machine(run)}\n"]
    lines += [
        "| task | arm | score | difference to exact [95 %] | reused share of the prompts |",
        "|---|---|---|---|---|",
    ]
    exact = {score.task: score for score in scores if score.arm == "exact"}
    for score in scores:
        shown, difference = f"{100 * score.mean:.1f} % {score.metric}", ""
        if score.problem:
            shown = f"**none: {score.problem}**"
        elif score.arm != "exact":
            pairs = [a - b for a, b in zip(score.values, exact[score.task].values, strict=True)]
            found = bootstrap(pairs, statistics.fmean)
            difference = f"{100 * found.value:+.1f} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"
        lines.append(
            f"| {score.task} | {score.arm} | {shown} | {difference} | {100 * score.reused_share:.0f} % |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(launch.guarded("bench tasks", main))
