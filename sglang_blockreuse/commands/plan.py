"""Look at layer plans: the shipped ones, whether a file is valid, and what a plan reads per decode step; or begin one.

    sglang-blockreuse plan list
    sglang-blockreuse plan validate PLAN ... [--model MODEL]
    sglang-blockreuse plan explain PLAN --model MODEL [--tokens 8192] [--batch 8] [--json]
    sglang-blockreuse plan preset NAME --layers 30 > mine.yaml

PLAN is the name of a shipped plan or the path of a file, MODEL the folder of a model (its config.json is read).
NAME is a published scheme: indexcache, lisa, lisa-dagger, misa, resmisa, csa2, hysparse, yoco or clsa. A preset is a
structure and no promise that it suits a model: judge what it writes with `calibrate --evaluate`.
"""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

from ..layers.plan import PlanError
from ..layers.plan_loader import load_plan, shipped_plans
from ..layers.preset_names import OPTIONS, PRESETS, Shape, known, named

HELP = "list, validate and explain layer plans, or write one of a known scheme"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "validate", "explain", "preset"))
    parser.add_argument("plans", nargs="*", metavar="PLAN")
    parser.add_argument("--model", type=Path, metavar="DIR", help="folder with the model's config.json")
    parser.add_argument("--tokens", type=int, default=8192, help="history of each row (default: 8192)")
    parser.add_argument("--batch", type=int, default=8, help="rows of a decode step (default: 8)")
    parser.add_argument("--json", action="store_true", help="explain as JSON")
    preset = parser.add_argument_group("preset")
    preset.add_argument("--layers", type=int, metavar="N", help="layers of the model, in place of --model")
    preset.add_argument("--final-k", type=int, default=256, help="positions read per row (default: 256)")
    preset.add_argument("--pool-size", type=int, help="candidates of a pool (default: four times --final-k)")
    preset.add_argument("--full", type=int, nargs="+", metavar="LAYER", help="layers that choose for others")
    preset.add_argument(
        "--kv", type=int, nargs="+", metavar="LAYER", help="csa2: layers with KV of their own"
    )
    preset.add_argument("--self-layers", type=int, metavar="N", help="yoco, clsa: leading layers with own KV")
    preset.add_argument("--routed-heads", type=int, metavar="N", help="misa, resmisa: heads that score (8)")
    preset.add_argument("--trained", action="store_true", help="the checkpoint was trained for the scheme")


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
        )
        for name in _given(arguments)
    ]
    return [json.dumps(x.to_dict()) if arguments.json else x.to_text() for x in found]


def _preset(arguments: argparse.Namespace) -> list[str]:
    """The file, and above it what the scheme is and what of its paper is not in it."""
    if len(arguments.plans) != 1:
        raise ValueError(f"preset needs one name of {', '.join(PRESETS)}, got {arguments.plans}")
    [name] = arguments.plans
    preset, num_layers, architecture = known(name), arguments.layers, None
    if arguments.model is not None:
        found, architecture, _ = _model(arguments.model)
        if num_layers not in (None, found):
            raise ValueError(
                f"--layers is {num_layers}, but {arguments.model} has {found}. Leave --layers out"
            )
        num_layers = found
    if num_layers is None:
        raise ValueError("preset needs the model's number of layers. Give --layers N or --model DIR")
    given = {option: getattr(arguments, option) for option in OPTIONS}
    given = {option: tuple(value) if isinstance(value, list) else value for option, value in given.items()}
    shape = Shape(
        num_layers=num_layers,
        architecture=architecture,
        final_k=arguments.final_k,
        trained=arguments.trained,
        **given,
    )
    plan = named(name, shape)
    notes = [preset.what, *([f"Not in it: {preset.differs}"] if preset.differs else [])]
    return [*(_comment(f"{note}.") for note in notes), plan.to_yaml().rstrip()]


def _comment(text: str) -> str:
    return textwrap.fill(text, 100, initial_indent="# ", subsequent_indent="#   ")


def _given(arguments: argparse.Namespace) -> list[str]:
    if not arguments.plans:
        raise ValueError(f"{arguments.action} needs a plan. Shipped plans: {', '.join(shipped_plans())}")
    return list(arguments.plans)


def _model(folder: Path) -> tuple[int, str, dict[str, Any]]:
    config = json.loads((folder / "config.json").read_text())
    return config["num_hidden_layers"], config["architectures"][0], config


_ACTIONS = {"list": _list, "validate": _validate, "explain": _explain, "preset": _preset}
