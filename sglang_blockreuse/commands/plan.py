"""Look at layer plans: the shipped ones, whether a file is valid, and what a plan reads per decode step.

    sglang-blockreuse plan list
    sglang-blockreuse plan validate PLAN ... [--model MODEL]
    sglang-blockreuse plan explain PLAN --model MODEL [--tokens 8192] [--batch 8] [--listed N] [--json]

PLAN is the name of a shipped plan or the path of a file, MODEL the folder of a model (its config.json is read).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from ..layers.plan import PlanError
from ..layers.plan_loader import load_plan, shipped_plans

HELP = "list, validate and explain layer plans"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "validate", "explain"))
    parser.add_argument("plans", nargs="*", metavar="PLAN")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the model's config.json")
    parser.add_argument("--tokens", type=int, default=8192, help="history of each row (default: 8192)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a decode step (default: 8)")
    parser.add_argument(
        "--listed",
        type=float,
        metavar="N",
        help="positions of a list, where a threshold decides (default: final_k, the most)",
    )
    parser.add_argument("--json", action="store_true", help="explain as JSON")


def run(arguments: argparse.Namespace) -> int:
    try:
        for line in _ACTIONS[arguments.action](arguments):
            print(line)
    except (PlanError, ValueError, OSError) as error:
        print(f"sglang-blockreuse plan: {error}", file=sys.stderr)
        return 1
    return 0


def _list(arguments: argparse.Namespace) -> list[str]:
    plans = [load_plan(name) for name in shipped_plans()]
    width = max(len(plan.name) for plan in plans)
    return [f"{plan.name:<{width}}  {plan.fingerprint[:12]}  {plan.spec.evidence}" for plan in plans]


def _validate(arguments: argparse.Namespace) -> list[str]:
    lines = []
    for name in _given(arguments):
        plan = load_plan(name)
        lines.append(f"{plan.source}: valid, fingerprint {plan.fingerprint}")
        if arguments.model is not None:
            bound = plan.bind(*_model(arguments.model)[:2])
            lines += [f"{plan.source}: warning: {warning}" for warning in bound.warnings]
    return lines


def _explain(arguments: argparse.Namespace) -> list[str]:
    from ..layers.plan_explain import KVShape, explain

    if arguments.model is None:
        raise ValueError("explain needs the sizes of a model. Give --model DIR, a folder with a config.json")
    num_layers, architecture, config = _model(arguments.model)
    found = [
        explain(
            load_plan(name).bind(num_layers, architecture),
            KVShape.of_config(config),
            num_tokens=arguments.tokens,
            batch=arguments.batch,
            listed=arguments.listed,
        )
        for name in _given(arguments)
    ]
    return [json.dumps(x.to_dict()) if arguments.json else x.to_text() for x in found]


def _given(arguments: argparse.Namespace) -> list[str]:
    if not arguments.plans:
        raise ValueError(f"{arguments.action} needs a plan. Shipped plans: {', '.join(shipped_plans())}")
    return list(arguments.plans)


def _model(folder: Path) -> tuple[int, str, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return config["num_hidden_layers"], config["architectures"][0], config


_ACTIONS = {"list": _list, "validate": _validate, "explain": _explain}
