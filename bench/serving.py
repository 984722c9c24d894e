"""A/B of serving: stock SGLang, ours without marks, ours with blocks, in one run, the arms taking turns.

    sglang-blockreuse bench serving --out DIR [--traffic warm|cold] [--policies seam] [--rate 0.5] [--layer-plan P]

    stock        SGLang on our attention kernels, no block reuse
    unmarked     our server, the same requests, no marks
    POLICY       our server, blocks marked, one arm for each policy
    plan         blocks marked (first policy) on a server with --layer-plan

A round gives every arm the same requests on a tree that was flushed and, for warm traffic, shown every document once.
Each round starts with another arm and has other requests; ratios are of arms within a round. Servers that wait their
turn sleep. A speed-up is printed only if the gate is green: the arm's answers on a sample of the prompts, and what the
server says it did with every timed request.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gate
import launch
import report_serving
from contexts import Context
from documents import (
    Composer,
    Law,
    Marking,
    RagRequest,
    made_source,
    read_source,
    requests_of,
    warm_up_prompts,
)
from homes import configured
from meter import Arm as MeterArm
from meter import Meter
from records import Log, plain
from tqdm import tqdm

from sglang_blockreuse.config import POLICIES
from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.client import EndOfTurn
from sglang_blockreuse.demo.prompts import Prompt
from sglang_blockreuse.demo.run import sigterm_as_exit
from sglang_blockreuse.server_process import Server

QUICK = {"requests": 4, "rounds": 1, "documents": 12, "sample": 2, "clients": 2}
GATE_TOKENS = 8


@dataclass(frozen=True)
class Arm:
    name: str
    server: str  # stock | ours | plan
    marking: Marking | None = None


@dataclass(frozen=True)
class Round:
    """What every arm of one round gets."""

    number: int
    warm_up: list[Prompt]
    requests: list[RagRequest]


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    with sigterm_as_exit():
        records = measure(options)
    text, refused = report_serving.tables(records)
    (options.out / "serving.md").write_text(text)
    report_serving.plot(records, options.out / "serving.png")
    print(text)
    return 1 if refused else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="bench serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    launch.add_server_arguments(parser, max_total_tokens=30_000)
    parser.add_argument("--quick", action="store_true", help="a few requests, to see that all works")
    parser.add_argument(
        "--traffic", choices=("warm", "cold"), default="warm", help="cold: no document comes twice"
    )
    parser.add_argument(
        "--arms", nargs="+", help="default: stock, unmarked, every policy, plan if there is one"
    )
    parser.add_argument("--policies", nargs="+", default=["seam"], choices=POLICIES)
    parser.add_argument("--budget", type=float, help="recomputed share; default: the server's")
    parser.add_argument("--layer-plan", metavar="NAME|PATH")
    parser.add_argument(
        "--stock-attention", default="blockreuse", help="attention backend of the stock server"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=24, help="per round and arm (default: 24)")
    parser.add_argument("--clients", type=int, default=8, help="requests in flight at most; 0: no bound")
    parser.add_argument(
        "--rate", type=float, default=math.inf, help="arrivals per second; default: closed loop"
    )
    parser.add_argument("--new-tokens", type=int, default=16, help="tokens of every answer (default: 16)")
    parser.add_argument("--documents", type=int, default=50, help="in the library (default: 50)")
    parser.add_argument("--per-prompt", type=int, default=6)
    parser.add_argument("--zipf", type=float, default=1.0, help="exponent of the popularity; 0: all alike")
    parser.add_argument("--keep-order", action="store_true", help="documents in the order of their ranks")
    parser.add_argument("--unmarked-share", type=float, default=0.0, help="share of requests without marks")
    parser.add_argument("--turns", type=int, default=1, help="turns of a conversation (default: 1)")
    parser.add_argument(
        "--source", type=Path, metavar="JSONL", help="your documents and questions, see documents.py"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--sample", type=int, default=24, help="prompts that the gate compares (default: 24)")
    for field in dataclasses.fields(gate.Bounds):
        parser.add_argument(f"--gate-{field.name.replace('_', '-')}", type=float, default=field.default)
    parser.add_argument("--url", help="a running server of ours")
    parser.add_argument("--stock-url", help="a running stock server")
    options = parser.parse_args(argv)
    if options.quick:
        vars(options).update(QUICK)
    options.out.mkdir(parents=True, exist_ok=True)
    return options


def arms_of(options: argparse.Namespace) -> list[Arm]:
    """The chosen arms. Raises ValueError for a name that is none."""
    markings = [Marking(policy, options.budget) for policy in options.policies]
    arms = [Arm("stock", "stock"), Arm("unmarked", "ours")]
    arms += [Arm(marking.policy, "ours", marking) for marking in markings]
    if options.layer_plan:
        arms.append(Arm("plan", "plan", markings[0]))
    known = {arm.name: arm for arm in arms}
    if unknown := set(options.arms or ()) - known.keys():
        raise ValueError(f"--arms {min(unknown)} is none of {', '.join(known)}")
    return [known[name] for name in options.arms or known]


def turn_order(arms: Sequence[Arm], number: int) -> list[Arm]:
    """Every arm leads in its turn, and every second round runs backwards."""
    start = number % len(arms)
    order = [*arms[start:], *arms[:start]]
    return order[::-1] if number % 2 else order


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    arms = arms_of(options)
    if options.source:  # read first: what is wrong with it is said before anything is loaded
        options.documents = min(options.documents, len(read_source(options.source).documents))
    tokenizer = _tokenizer(options)
    rounds = [make_round(options, tokenizer, number) for number in range(options.rounds)]
    log = Log(options.out / "serving.jsonl")
    log.add({"record": "serving", "environment": environment.describe(), "options": plain(options)})
    with servers_of(options, {arm.server for arm in arms}) as servers:
        asked = [request for one in rounds for request in one.requests]
        check(options, tokenizer, arms, servers, asked, log)
        with tqdm(total=len(rounds) * len(arms), desc="serve", file=sys.stderr) as bar:
            for one in rounds:
                for arm in turn_order(arms, one.number):
                    bar.set_postfix_str(f"round {one.number + 1}, {arm.name}", refresh=False)
                    log.add(run_arm(options, arm, servers[arm.server], one))
                    bar.update()
    return log.records


def make_round(options: argparse.Namespace, tokenizer: Any, number: int) -> Round:
    """The library stays the same over the rounds; what is asked of it does not. Cold rounds have other documents."""
    cold = options.traffic == "cold"
    law = Law(
        num_requests=options.requests,
        num_documents=options.documents,
        per_prompt=options.per_prompt,
        zipf=options.zipf,
        shuffle=not options.keep_order,
        unmarked=options.unmarked_share,
        turns=options.turns,
        unseen=cold,
        seed=options.seed + 1000 * number * cold,
    )
    if options.source:
        source = read_source(options.source)
    else:
        source = made_source(law, lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"]))
    composer = Composer(tokenizer, source)
    asked = dataclasses.replace(law, seed=options.seed + 1000 * number)
    return Round(number, warm_up_prompts(law, source, composer), requests_of(asked, source, composer))


@contextlib.contextmanager
def servers_of(options: argparse.Namespace, names: set[str]) -> Iterator[dict[str, Server]]:
    """All servers that the arms need, alive side by side. A plan is held to the answers of ours without it."""
    names = names | {"ours"} if "plan" in names else names
    with contextlib.ExitStack() as stack:
        found = {}
        if "stock" in names:
            found["stock"] = (
                launch.running(options.stock_url)
                if options.stock_url
                else stack.enter_context(launch.stock(options, attention=options.stock_attention))
            )
        if "ours" in names:
            found["ours"] = (
                launch.running(options.url)
                if options.url
                else stack.enter_context(launch.ours(options, offset=30))
            )
        if "plan" in names:
            plan = ("--layer-plan", options.layer_plan)
            found["plan"] = stack.enter_context(launch.ours(options, name="plan", offset=60, flags=plan))
        yield found


def run_arm(options: argparse.Namespace, arm: Arm, server: Server, one: Round) -> dict[str, Any]:
    """One arm's turn: flush, show the documents, time the requests."""
    from load import rows_of, run_load  # imports SGLang, which takes a while

    server.flush_cache()
    for prompt in one.warm_up:
        marks = {"custom_params": {"blockreuse_spans": list(prompt.spans)}} if arm.marking else {}
        server.generate(
            input_ids=list(prompt.input_ids), sampling_params={"temperature": 0, "max_new_tokens": 1, **marks}
        )
    before = counts(server)
    result = run_load(
        server,
        rows_of(one.requests, arm.marking, num_new_tokens=options.new_tokens),
        model=launch.model_of(options),
        clients=options.clients or None,
        rate=options.rate,
        seed=options.seed,
        log=options.out / "sglang-benchmark.log",
    )
    after = counts(server)
    done = {key: after[key] - before.get(key, 0) for key in after}
    num_marked = sum(request.marked for request in one.requests) if arm.marking else 0
    return {"record": "round", "arm": arm.name, "round": one.number, **account(result, done, num_marked)}


def account(result: dict[str, Any], done: dict[str, float], num_marked: int) -> dict[str, Any]:
    """SGLang's result under its own names, and beside it what became of the prompt tokens.

    done: our server's counts of the run; empty for a stock server.
    """
    kept = {k: v for k, v in result.items() if k not in ("server_info", "generated_texts", "errors")}
    total = result["total_input_tokens"]
    tokens = {k: done.get(f"tokens_total {k}", 0) for k in ("prefix", "reused", "repaired", "fresh")}
    hits = tokens["prefix"] + tokens["reused"] if done else sum(result["cached_tokens"])
    outcomes = {k.partition(" ")[2]: v for k, v in done.items() if k.startswith("requests_total ")}
    return {
        **kept,
        "hit_share": hits / total,
        "recomputed_share": tokens["repaired"] / total,
        "blockreuse_tokens": tokens,
        "blockreuse_home_tokens": done.get("home_tokens_total", 0),
        "blockreuse_outcomes": outcomes,
        "problems": gate.outcome_problems(outcomes, num_marked) if num_marked else [],
    }


def counts(server: Server) -> dict[str, float]:
    """Our server's counters; empty for a stock server."""
    state = server.get("/server_info")["internal_states"][0].get("blockreuse") or {}
    return dict(state.get("counts", {}))


def check(
    options: argparse.Namespace,
    tokenizer: Any,
    arms: Sequence[Arm],
    servers: dict[str, Server],
    requests: Sequence[RagRequest],
    log: Log,
) -> None:
    """Judge every arm on a sample of the prompts and log the verdicts. Stock is what the others are held to."""
    sample = [request.prompt for request in requests[: options.sample]]
    contexts = [Context(f"prompt {i}", "rag", prompt, ()) for i, prompt in enumerate(sample)]
    bounds = gate.Bounds(options.gate_max_kl, options.gate_min_top1, options.gate_min_first)
    end = EndOfTurn(tokenizer.eos_token_id, tokenizer.eos_token)
    meters = {
        name: Meter(
            server,
            homes=configured(launch.blocks_section(options.blocks)),
            end=end,
            log=log,
            label=f"gate {name}",
        )
        for name, server in servers.items()
        if name != "stock"
    }
    oracles = {}
    if any(arm.marking for arm in arms):
        oracles = {context.name: meters["ours"].oracle(context, GATE_TOKENS) for context in contexts}
    for arm in arms:
        if arm.marking:
            wanted = MeterArm(arm.marking.policy, arm.marking.budget)
            # a layer plan acts in decode, which a forced answer does not go through
            meters[arm.server].run(contexts, oracles, [wanted], decode=arm.server == "plan")
            verdict = gate.judge(log.of(label=f"gate {arm.server}", policy=wanted.policy), bounds)
        elif arm.name == "unmarked" and "stock" in servers:
            verdict = gate.same_answers(servers["stock"], servers["ours"], sample, num_new_tokens=GATE_TOKENS)
        else:
            continue
        log.add(
            {"record": "gate", "arm": arm.name, "bounds": dataclasses.asdict(bounds), **verdict.as_dict()}
        )


def _tokenizer(options: argparse.Namespace) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(launch.model_of(options))


if __name__ == "__main__":
    sys.exit(launch.guarded("bench serving", main))
