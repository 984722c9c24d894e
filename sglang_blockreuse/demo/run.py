"""Run the demo from start to end: model, prompts, stock server, our server, results."""

from __future__ import annotations

import json
import signal
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from ..model import ensure_model
from ..server_process import START_MARKS, Server, extended_command, running_server, stock_command
from . import environment, report
from .client import EndOfTurn
from .documents import make_documents
from .measure import NUM_BOUND_PROMPTS, Workload, run_extended, run_stock
from .prompts import PromptMaker, measured_prompts, warm_up_prompts

T = TypeVar("T")


@dataclass(frozen=True)
class Options:
    """The command's options, as given."""

    out: Path
    model_path: Path | None  # None: the small model, made if missing
    num_prompts: int
    num_documents: int  # size of the pool
    per_prompt: int  # documents in one prompt
    num_new_tokens: int
    num_scored: int
    seed: int
    stock_attention: str
    server_flags: tuple[str, ...]  # for both servers


class NothingReused(RuntimeError):
    """The measurement worked, but our server reused nothing, so it shows nothing."""


def run(options: Options) -> dict[str, Any]:
    """Measure, print the table, write results.json and ttft.png; return the summary.

    Raises:
        NothingReused: our server did not reuse a single token.
        ServerFailed, ModelError, requests.HTTPError: a step failed; servers are stopped in any case.
    """
    options.out.mkdir(parents=True, exist_ok=True)
    model_path = options.model_path or ensure_model()
    work = make_workload(options, model_path)
    flags = ["--model-path", str(model_path), *options.server_flags]
    stock_words = stock_command([*flags, "--attention-backend", options.stock_attention])
    extended_words = extended_command(flags)
    with sigterm_as_exit():
        stock = with_server("stock", stock_words, options.out, work, lambda s, tick: run_stock(s, work, tick))
        ttft_ms = statistics.median(timed.ttft_ms for timed in stock.timed)
        tqdm.write(
            f"stock: TTFT {ttft_ms:,.0f} ms (median); now the same prompts with reuse", file=sys.stderr
        )
        ours = with_server(
            "ours", extended_words, options.out, work, lambda s, tick: run_extended(s, work, stock, tick)
        )
    rows = report.make_rows(work, stock, ours)
    summary = report.summarise(rows, stock, ours)
    print(report.table(rows), report.summary_text(summary), sep="\n\n")
    title = f"{model_path.name}, {options.per_prompt} documents, {environment.cpu_name()}"
    labels = {"stock": f"stock SGLang, attention {options.stock_attention}", "ours": "with document reuse"}
    report.plot(rows, options.out / "ttft.png", title=title, labels=labels)
    results = {
        "summary": summary,
        "options": {**asdict(options), "out": str(options.out), "model_path": str(model_path)},
        "commands": {"stock": stock_words, "ours": extended_words},
        "environment": environment.describe(),
        "warm_up_ttft_ms": {
            name: [t.ttft_ms for t in p.warm_up] for name, p in (("stock", stock), ("ours", ours))
        },
        "bound": asdict(ours.bound) if ours.bound else None,
        "prompts": report.as_records(rows),
    }
    (options.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    print(f"\nwritten  {options.out / 'results.json'}, {options.out / 'ttft.png'}")
    reason = report.nothing_reused(rows)
    if reason is not None:
        raise NothingReused(f"{reason} (log: {options.out / 'ours.log'})")
    return summary


def make_workload(options: Options, model_path: Path) -> Workload:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def num_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False)["input_ids"])

    documents = make_documents(options.num_documents, seed=options.seed, num_tokens=num_tokens)
    maker = PromptMaker(tokenizer, documents)
    measured = measured_prompts(
        maker, documents, num_prompts=options.num_prompts, per_prompt=options.per_prompt, seed=options.seed
    )
    return Workload(
        warm_up=tuple(warm_up_prompts(maker, options.num_documents, per_prompt=options.per_prompt)),
        measured=tuple(measured),
        num_new_tokens=options.num_new_tokens,
        num_scored=options.num_scored,
        end=EndOfTurn(tokenizer.eos_token_id, tokenizer.eos_token),
    )


def with_server(
    name: str,
    command: Sequence[str],
    out: Path,
    work: Workload,
    measure: Callable[[Server, Callable[[str], None]], T],
) -> T:
    """Start a server, measure, stop it; a bar for the start and one for the requests."""
    with progress(f"{name}: start", len(START_MARKS)) as starting:

        def show(marks: int) -> None:
            starting.update(marks - starting.n)

        with running_server(command, log=out / f"{name}.log", on_progress=show) as server:
            starting.close()
            with progress(f"{name}: requests", num_requests(work, name)) as requests:

                def tick(what: str) -> None:
                    requests.set_postfix_str(what, refresh=False)
                    requests.update()

                return measure(server, tick)


def num_requests(work: Workload, name: str) -> int:
    """Requests that one pass sends: warm-up, timed, scored, and on our server those of the bound."""
    return len(work.warm_up) + 2 * len(work.measured) + (1 + NUM_BOUND_PROMPTS if name == "ours" else 0)


@contextmanager
def progress(what: str, total: int) -> Iterator[Any]:
    with tqdm(total=total, desc=f"{what:<15}", file=sys.stderr, mininterval=0.5) as bar:
        yield bar


@contextmanager
def sigterm_as_exit() -> Iterator[None]:
    """Turn SIGTERM into SystemExit, so that servers are stopped on this way out too."""

    def leave(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
