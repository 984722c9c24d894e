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
import math
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import launch
import report_quality
import requests
from contexts import CATEGORIES, SPLITS, Context, make_contexts
from records import Log, plain
from tqdm import tqdm

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.client import EndOfTurn, Position, Scored, score
from sglang_blockreuse.demo.compare import kl_divergence
from sglang_blockreuse.demo.run import sigterm_as_exit
from sglang_blockreuse.server_process import Server

BUDGETS = (0.01, 0.025, 0.05, 0.10, 0.15, 0.20)
QUICK = {"per_category": 1, "budgets": [0.05], "new_tokens": 8}
NUM_TOP = 200  # tokens of the oracle that are compared one by one, at most; the others are one event
COVERED = 0.9999  # probability beyond which fewer are enough
EXACT = {"blockreuse_mode": "exact"}


@dataclass(frozen=True)
class Arm:
    """One way to answer."""

    policy: str  # none: nothing is repaired
    budget: float | None  # None: the server's
    alone: bool = False  # homes are compiled without the text before the first block

    @property
    def name(self) -> str:
        budget = "" if self.budget is None else f" {self.budget:g}"
        return f"{self.policy}{budget}{' alone' if self.alone else ''}"


@dataclass(frozen=True)
class Forced:
    """A continuation and the oracle's distributions along it, cut to what is compared."""

    kind: str  # oracle | reference
    ids: tuple[int, ...]
    positions: tuple[Position, ...]

    @property
    def support(self) -> list[int]:
        return sorted({token for position in self.positions for token in position.logprobs} | set(self.ids))


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


class Meter:
    """Measures contexts on one server and writes every measurement to the log."""

    def __init__(self, server: Server, *, end: EndOfTurn, log: Log, label: str) -> None:
        self._server = server
        self._end = end
        self._log = log
        self._label = label
        self._knows_question = knows_question(server)

    def oracle(self, context: Context, num_new_tokens: int) -> list[Forced]:
        """The full prefill's greedy answer and the known one, with its distributions along both.

        Also logs the floor: how far a full prefill is from itself, computed in other pieces.
        """
        self._server.flush_cache()
        answer = self._server.generate(
            input_ids=list(context.prompt.input_ids),
            sampling_params={"temperature": 0, "max_new_tokens": num_new_tokens, "custom_params": EXACT},
        )
        ids = self._end.cut(answer["output_ids"])
        forced = [self._forced(context, "oracle", ids)]
        if context.reference_ids and ids[: len(context.reference_ids)] != context.reference_ids:
            forced.append(self._forced(context, "reference", context.reference_ids))
        self._server.flush_cache()
        again = self._score(context, forced[0], EXACT)
        self._record(context, Arm("full", 1.0), forced[0], again, problem=None, seconds=0.0)
        return forced

    def run(self, contexts: Sequence[Context], oracles: dict[str, list[Forced]], arms: Sequence[Arm]) -> None:
        with tqdm(total=len(contexts) * len(arms), desc="measure", file=sys.stderr) as bar:
            for context in contexts:
                self._server.flush_cache()
                for arm in arms:
                    bar.set_postfix_str(f"{context.name} {arm.name}", refresh=False)
                    for forced in oracles[context.name]:
                        self._measure(context, arm, forced)
                    bar.update()

    def _measure(self, context: Context, arm: Arm, forced: Forced) -> None:
        started = time.perf_counter()
        params = self._params(context, arm)
        scored = self._score(context, forced, params)
        if shrunk(context, arm, scored.usage):
            # an earlier measurement left a longer exact prefix than the documents' first sight has
            self._server.flush_cache()
            scored = self._score(context, forced, params)
        seconds = time.perf_counter() - started
        self._record(
            context, arm, forced, scored, problem=problem(context, arm, scored.usage), seconds=seconds
        )

    def _params(self, context: Context, arm: Arm) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if arm.budget is not None:
            params["blockreuse_budget"] = arm.budget
        if arm.policy != "none":
            params["blockreuse_policy"] = arm.policy
        if self._knows_question:
            # the forced answer behind it is nothing that a policy may look at
            params["blockreuse_question"] = [context.prompt.spans[-1], len(context.prompt.input_ids)]
        return params

    def _score(self, context: Context, forced: Forced, params: dict[str, Any]) -> Scored:
        return score(
            self._server,
            context.prompt,
            forced.ids,
            marked=True,
            num_top=1,
            token_ids=forced.support,
            custom_params=params,
        )

    def _forced(self, context: Context, kind: str, ids: tuple[int, ...]) -> Forced:
        scored = score(
            self._server,
            context.prompt,
            ids,
            marked=True,
            num_top=NUM_TOP,
            token_ids=sorted(set(ids)),
            custom_params=EXACT,
        )
        return Forced(kind, ids, tuple(covering(p) for p in scored.positions))

    def _record(
        self,
        context: Context,
        arm: Arm,
        forced: Forced,
        scored: Scored,
        *,
        problem: str | None,
        seconds: float,
    ) -> None:
        tops = [position.top for position in scored.positions]
        num = len(context.reference_ids)
        known = num > 0 and forced.ids[:num] == context.reference_ids
        self._log.add(
            {
                "record": "measurement",
                "label": self._label,
                "context": context.name,
                "category": context.category,
                "policy": arm.policy,
                "budget": arm.budget,
                "alone": arm.alone,
                "forced": forced.kind,
                "kl": [kl_divergence(p, q) for p, q in zip(forced.positions, scored.positions, strict=True)],
                "same_top": [p.top == q.top for p, q in zip(forced.positions, scored.positions, strict=True)],
                "oracle_exact": [p.top for p in forced.positions][:num] == list(forced.ids[:num])
                if known
                else None,
                "exact": tops[:num] == list(forced.ids[:num]) if known else None,
                "nll": -sum(p.logprobs[t] for p, t in zip(scored.positions, forced.ids, strict=True))
                / len(forced.ids),
                "usage": scored.usage,
                "problem": problem,
                "seconds": round(seconds, 3),
            }
        )


def covering(position: Position) -> Position:
    """The most probable tokens that hold COVERED of the probability."""
    ordered = sorted(position.logprobs.items(), key=lambda item: -item[1])
    kept, mass = {}, 0.0
    for token, value in ordered:
        kept[token] = value
        mass += math.exp(value)
        if mass >= COVERED:
            break
    return Position(kept, position.top)


def local_tokens(context: Context, arm: Arm) -> int:
    """Tokens that only a home can serve: all blocks, but not the first where it continues the compile prefix."""
    spans = context.prompt.spans
    lengths = [end - start for start, end in zip(spans[::2], spans[1::2], strict=True)]
    return sum(lengths if arm.alone else lengths[1:])


def shrunk(context: Context, arm: Arm, usage: dict[str, Any] | None) -> bool:
    return usage is not None and usage["reused_tokens"] + usage["repaired_tokens"] != local_tokens(
        context, arm
    )


def problem(context: Context, arm: Arm, usage: dict[str, Any] | None) -> str | None:
    """Why a measurement is none; None where it is one."""
    if usage is None:
        return "the server reports no meta_info.blockreuse"
    if usage["skipped_reason"]:
        return f"reuse was skipped: {usage['skipped_reason']}"
    if shrunk(context, arm, usage):
        return (
            f"{usage['reused_tokens']} reused + {usage['repaired_tokens']} repaired tokens, "
            f"but the blocks have {local_tokens(context, arm)}"
        )
    return None


def knows_question(server: Server) -> bool:
    """Whether this server takes the span of the question; an older one refuses the key."""
    try:
        server.generate(
            input_ids=[1, 2, 3, 4],
            sampling_params={
                "max_new_tokens": 1,
                "custom_params": {"blockreuse_mode": "off", "blockreuse_question": [3, 4]},
            },
        )
    except requests.HTTPError as error:
        if "blockreuse_question is unknown" in str(error):
            return False
        raise
    return True


if __name__ == "__main__":
    sys.exit(main())
