"""How close answers on reused blocks come to a full prefill's, per policy and budget, through the real server.

    sglang-blockreuse bench quality --out DIR [--quick] [--split held-out] [--budgets 0.01 0.05] [--blocks beta=-1]
    sglang-blockreuse bench quality --out DIR --homes leading library-2 prompt-2
    sglang-blockreuse bench quality --out DIR --url http://host:port [--baseline-url http://host:port]

For every context the oracle is a full prefill of the same server (mode exact): its greedy answer is forced on every
policy, and the next-token distributions are compared token by token. Forcing makes one request of each measurement,
and a greedy answer equals a forced one exactly where the most probable tokens agree, so nothing else is generated.

The gap is KL(oracle || no repair, homes compiled alone); a policy's share of it is 1 - KL / KL(no repair). What homes
are compiled behind is a setting of the server, so each of --homes (homes.py has the words) has one of its own, and the
baseline too, which comes first. Nothing is tuned on the held-out contexts.
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
from homes import ALONE, HOMES, Homes, configured
from meter import Arm, Forced, Meter
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
    parser.add_argument(
        "--baseline-url", help="a running server with compile_prefix: none and company: 0, with --url"
    )
    parser.add_argument(
        "--homes",
        nargs="+",
        choices=[name for name in HOMES if name != ALONE.name],
        metavar="NAME",
        help="what homes are compiled behind (default: as the server is configured, documents seen in another order)",
    )
    parser.add_argument(
        "--policies",
        nargs="+",
        default=list(POLICIES),
        metavar="NAME[@SHARE]",
        help="with a share of its own a policy is measured at that one only, as a control is",
    )
    parser.add_argument("--budgets", nargs="+", type=float, default=list(BUDGETS), metavar="SHARE")
    parser.add_argument("--split", choices=SPLITS, default="calibration", help="default: calibration")
    parser.add_argument(
        "--seed", nargs="+", type=int, default=[0], help="of the contexts, within the split (default: 0)"
    )
    parser.add_argument(
        "--per-category", type=int, default=5, help="contexts of each category and seed (default: 5)"
    )
    parser.add_argument("--categories", nargs="+", default=list(CATEGORIES), choices=CATEGORIES)
    parser.add_argument(
        "--new-tokens", type=int, default=24, help="tokens of the oracle's answer (default: 24)"
    )
    parser.add_argument(
        "--oracle-only", action="store_true", help="the known answers are not forced: half of the time"
    )
    parser.add_argument("--label", default="", help="a name for this configuration, kept in the records")
    options = parser.parse_args(argv)
    if options.url and options.homes and len(options.homes) > 1:
        parser.error("--url names one server, so --homes says of one how it compiles them")
    if options.quick:
        vars(options).update(QUICK)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def arms_of(policies: Sequence[str], budgets: Sequence[float]) -> list[Arm]:
    """No repair first: with nothing repaired every policy is the same.

    Raises:
        ValueError: what stands behind a policy's @ is no number.
    """
    arms = [Arm("none", 0.0)]
    for word in policies:
        policy, at, own = word.partition("@")
        arms += [Arm(policy, budget) for budget in ([float(own)] if at else budgets) if budget > 0]
    return arms


def measure_all(options: argparse.Namespace) -> list[dict[str, Any]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(launch.model_of(options))
    contexts = [
        context
        for seed in options.seed
        for context in make_contexts(
            tokenizer,
            split=options.split,
            seed=seed,
            per_category=options.per_category,
            categories=options.categories,
        )
    ]
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
    oracles: dict[str, list[Forced]] = {}
    for homes in arms_of_homes(options):
        with server_of(options, homes) as server:
            meter = Meter(server, homes=homes, end=end, log=log, label=options.label)
            if not oracles:
                oracles = {
                    context.name: meter.oracle(context, options.new_tokens, reference=not options.oracle_only)
                    for context in tqdm(contexts, desc="oracle", file=sys.stderr)
                }
            meter.run(contexts, oracles, arms[:1] if homes is ALONE else arms)
    return log.records


def arms_of_homes(options: argparse.Namespace) -> list[Homes]:
    """The baseline first, so that a run which is stopped has one; none beside a server that has none."""
    given = launch.blocks_section(options.blocks)
    chosen = [HOMES[name] for name in options.homes or ()] or [configured(given)]
    has_baseline = options.baseline_url or not options.url
    return [*([ALONE] if has_baseline else []), *chosen]


@contextlib.contextmanager
def server_of(options: argparse.Namespace, homes: Homes) -> Iterator[Server]:
    """A server that compiles homes so: a running one, or one of our own."""
    url = options.baseline_url if homes is ALONE else options.url
    if url:
        yield launch.running(url)
        return
    offset = 50 * arms_of_homes(options).index(homes)
    blocks = {} if homes is ALONE else launch.blocks_section(options.blocks)
    with launch.ours(options, name=homes.name, offset=offset, blocks={**blocks, **homes.blocks}) as server:
        yield server


if __name__ == "__main__":
    sys.exit(launch.guarded("bench quality", main))
