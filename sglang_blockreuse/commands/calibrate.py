"""Find a layer plan for a model on the CPU, and judge it on texts that the search did not see.

    sglang-blockreuse calibrate MODEL --full 10 --follower R --out plans/     search, then judge
    sglang-blockreuse calibrate MODEL --evaluate NAME|PATH ... --out DIR      judge plans that exist
    sglang-blockreuse calibrate MODEL --distil NAME|PATH --out DIR            train a scorer for a plan

A search begins with the pattern that loses the least softmax mass (dynamic programming over a table measured in one
dense pass), or with --start, turns full layers into followers until --full are left, and then moves them about; every
step is measured on the model. The folder gets plan.yaml, report.md, report.json and two plots.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from ..layers.plan import BoundPlan, PlanError, Selection
from ..layers.plan_loader import LayerPlan, load_plan

# what a reader needs to repeat a report; paths of this machine are no part of it
ENVIRONMENT = ("time", "commit", "python", "packages", "hardware")

HELP = "find a layer plan for a model, or judge plans, with a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, help="folder of a Llama model, see `sglang-blockreuse model --path`"
    )
    parser.add_argument("--out", type=Path, default=Path("calibration"), metavar="DIR")
    parser.add_argument("--name", default="calibrated", help="name of the plan that is found")
    parser.add_argument("--evaluate", nargs="+", metavar="PLAN", help="judge these plans, search nothing")
    parser.add_argument(
        "--distil", metavar="PLAN", help="make what a scorer of this plan reads, with a table"
    )
    parser.add_argument(
        "--scorer", choices=("learned", "label_channels"), default="learned", help="with --distil"
    )
    parser.add_argument(
        "--channels", type=int, default=32, help="with --distil: of a learned key (default: 32)"
    )
    parser.add_argument("--full", type=int, default=10, help="full layers to end with (default: 10)")
    parser.add_argument(
        "--follower", choices=("R", "X"), default="R", help="R reuses indices, X reranks in a pool"
    )
    parser.add_argument(
        "--start", metavar="PATTERN", help="begin with this pattern, one letter of D F X R per layer"
    )
    parser.add_argument("--rounds", type=int, default=3, help="moves of full layers at the end (default: 3)")
    parser.add_argument(
        "--final-k", type=int, default=196, help="positions read per row, sinks and window included"
    )
    parser.add_argument("--pool-size", type=int, default=324)
    parser.add_argument("--sink", type=int, default=4)
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument("--min-seq-len", type=int, default=1024, help="of the plan that is written")
    parser.add_argument("--rows", type=int, default=32, help="forced decode rows per text (default: 32)")
    parser.add_argument("--lengths", type=int, nargs=2, default=(2000, 3600), metavar=("LOW", "HIGH"))
    parser.add_argument(
        "--texts", type=int, default=2, help="texts of each kind, searched and judged (default: 2)"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..layers.calibration.llama import UnsupportedModel

    try:
        if arguments.distil is not None:
            _distil(arguments)
        else:
            _Run(arguments).run()
    except (PlanError, UnsupportedModel, ValueError, OSError) as error:
        print(f"sglang-blockreuse calibrate: {error}", file=sys.stderr)
        return 1
    return 0


def _distil(arguments: argparse.Namespace) -> None:
    from ..layers.calibration import distil_run

    distil_run.run(
        arguments.model,
        arguments.distil,
        arguments.out,
        lengths=tuple(arguments.lengths),
        kind=arguments.scorer,
        num_channels=arguments.channels,
    )
    print((arguments.out / "distil.md").read_text())


class _Run:
    def __init__(self, arguments: argparse.Namespace) -> None:
        from ..layers.calibration.llama import Llama
        from ..layers.calibration.texts import Texts

        self.arguments = arguments
        self.model = Llama(arguments.model)
        self.texts = Texts(arguments.model)
        self.selection = Selection(
            final_k=arguments.final_k,
            pool_size=arguments.pool_size,
            sink=arguments.sink,
            window=arguments.window,
        )

    def run(self) -> None:
        from ..demo import environment
        from ..layers.calibration.report import Report

        report = Report(
            model=self.arguments.model.name,
            options={k: str(v) for k, v in vars(self.arguments).items() if k not in ("run", "out", "model")},
            environment={key: environment.describe()[key] for key in ENVIRONMENT},
            judged=[],
        )
        plans = [load_plan(name) for name in self.arguments.evaluate or ()] or [self._search(report)]
        self._judge(report, plans)
        report.write(self.arguments.out)
        print(report.to_markdown())

    def _cases(self, first_seed: int, what: str) -> list[Any]:
        from tqdm import tqdm

        from ..layers.calibration.case import Case
        from ..layers.calibration.texts import KINDS

        low, high = self.arguments.lengths
        wanted = [(kind, first_seed + i) for i in range(self.arguments.texts) for kind in KINDS]
        step = (high - low) // max(1, len(wanted) - 1)
        return [
            Case(self.model, kind, self.texts.make(kind, seed, low + i * step), self.arguments.rows)
            for i, (kind, seed) in enumerate(tqdm(wanted, desc=what, file=sys.stderr))
        ]

    def _search(self, report: Any) -> LayerPlan:
        from ..layers.calibration.overlap import collect
        from ..layers.calibration.pattern import plan_of
        from ..layers.calibration.search import Search, prior

        arguments = self.arguments
        cases = self._cases(0, "texts to search on")
        report.overlap = collect(cases, self.selection)
        start = arguments.start or prior(
            report.overlap.loss(arguments.follower), arguments.full, arguments.follower
        )
        search = Search(cases, self.selection, report=lambda line: print(line, file=sys.stderr))
        found = search.shrink(start, arguments.follower, arguments.full)
        found = search.polish(found.pattern, arguments.rounds)
        report.history = search.history
        selection = self._served_selection()
        plan = plan_of(
            found.pattern,
            selection,
            name=arguments.name,
            architecture=self.model.architecture,
            evidence="report.md beside this file",
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "plan.yaml").write_text(plan.to_yaml())
        return plan

    def _served_selection(self) -> Selection:
        from msgspec.structs import replace

        return replace(self.selection, min_seq_len=self.arguments.min_seq_len)

    def _judge(self, report: Any, plans: list[LayerPlan]) -> None:
        from tqdm import tqdm

        from ..layers.calibration.pattern import bound_of, uniform
        from ..layers.calibration.replay import replay
        from ..layers.calibration.report import judge
        from ..layers.calibration.texts import HELD_OUT

        cases = self._cases(HELD_OUT, "held-out texts")
        num_layers = self.model.num_layers
        bound: dict[str, BoundPlan] = {
            plan.name: plan.bind(num_layers, self.model.architecture) for plan in plans
        }
        beside = {"own lists everywhere": "F" * num_layers}
        beside |= {f"groups of {n}, reuse": uniform(num_layers, n, "R") for n in (2, 4, 8)}
        beside |= {"groups of 4, reindex": uniform(num_layers, 4, "X")}
        everything = bound | {name: bound_of(pattern, self.selection) for name, pattern in beside.items()}
        for name, plan in tqdm(everything.items(), desc="judging", file=sys.stderr):
            report.judged.append(
                judge(name, plan, cases, self._shape(), num_tokens=self.arguments.lengths[1])
            )
        report.replays = {name: replay(cases[0], plan) for name, plan in bound.items()}

    def _shape(self) -> Any:
        from ..layers.plan_explain import KVShape

        return KVShape(num_kv_heads=self.model.num_kv_heads, head_dim=self.model.head_dim)
