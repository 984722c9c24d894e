"""How close answers on reused blocks come to a full prefill's, per policy and budget, through the real server.

    sglang-blockreuse bench quality --out DIR [--quick] [--split held-out] [--budgets 0.01 0.05] [--blocks beta=-1]
    sglang-blockreuse bench quality --out DIR --url http://host:port [--baseline-url http://host:port]

For every context the oracle is a full prefill of the same server (mode exact): its greedy answer is forced on every
policy, and the next-token distributions are compared token by token. Forcing makes one request of each measurement,
and a greedy answer equals a forced one exactly where the most probable tokens agree, so nothing else is generated.

The gap is KL(oracle || no repair, homes compiled alone); a policy's share of it is 1 - KL / KL(no repair). The
baseline needs a server of its own, with `compile_prefix: none`. Nothing is tuned on the held-out contexts.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import launch
import report_quality
from contexts import CATEGORIES, SPLITS, make_contexts
from meter import Arm, Meter
from records import Log, plain
from tqdm import tqdm

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.client import EndOfTurn
from sglang_blockreuse.demo.run import sigterm_as_exit
from sglang_blockreuse.server_process import Server

BUDGETS = (0.01, 0.025, 0.05, 0.10, 0.15, 0.20)
QUICK = {"per_category": 1, "budgets": [0.05], "new_tokens": 8}


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with sigterm_as_exit():
        records = measure_all(options)
    text, problems = report_quality.tables(records)
    (options.out / "quality.md").write_text(text)
    if not problems:
        report_quality.plot(records, options.out / "quality.png")
    print(text)
    return 1 if problems else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench quality", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_server_arguments(parser, max_total_tokens=12_000)
    parser.add_argument(
        "--quick", action="store_true", help="one context per category, one budget, short answers"
    )
    parser.add_argument("--url", help="a running server of ours, instead of starting one")
    parser.add_argument("--baseline-url", help="a running server with compile_prefix: none, with --url")
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), metavar="NAME")
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS), metavar="SHARE")
    parser.add_argument("--split", choices=SPLITS, default="calibration", help="default: calibration")
    parser.add_argument("--seed", type=int, default=0, help="of the contexts, within the split")
    parser.add_argument("--per-category", type=int, default=5, help="contexts of each category (default: 5)")
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=CATEGORIES)
    parser.add_argument(
        "--new-tokens", type=int, default=24, help="tokens of the oracle's answer (default: 24)"
    )
    parser.add_argument("--label", default="", help="a name for this configuration, kept in the records")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def arms_of(policies: Sequence[str], budgets: Sequence[float]) -> list[Arm]:
    """No repair first: with nothing repaired every policy is the same."""
    return [
        Arm("none", 0.0),
        *(Arm(policy, budget) for budget in budgets if budget > 0 for policy in policies),
    ]


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(launch.model_of(options))
    contexts = make_contexts(
        tokenizer,
        split=options.split,
        seed=options.seed,
        per_category=options.per_category,
        categories=options.categories,
    )
    end = EndOfTurn(tokenizer.eos_token_id, tokenizer.eos_token)
    arms = arms_of(options.policies, options.budgets)
    log = Log(options.out / "quality.jsonl")
    log.add(
        {
            "record": "quality",
            "environment": environment.describe(),
            "options": plain(options),
        }
    )
    with server_of(options, alone=False) as server:
        assert server is not None
        meter = Meter(server, end=end, log=log, label=options.label)
        oracles = {
            context.name: meter.oracle(context, options.new_tokens)
            for context in tqdm(contexts, desc="oracle", file=sys.stderr)
        }
        meter.run(contexts, oracles, arms)
    with server_of(options, alone=True) as server:
        if server is not None:
            meter = Meter(server, end=end, log=log, label=options.label)
            meter.run(contexts, oracles, [Arm("none", 0.0, alone=True)])
    return log.records


@contextlib.contextmanager
def server_of(options: argparse.Namespace, *, alone: bool) -> Iterator[Server | None]:
    """The server to measure or the baseline's; None where --url has no baseline beside it."""
    url = options.baseline_url if alone else options.url
    if url:
        yield launch.running(url)
    elif alone and options.url:
        yield None
    elif alone:
        with launch.ours(options, name="alone", offset=50, blocks={"compile_prefix": "none"}) as server:
            yield server
    else:
        with launch.ours(options) as server:
            yield server


if __name__ == "__main__":
    sys.exit(launch.guarded("bench quality", main))
