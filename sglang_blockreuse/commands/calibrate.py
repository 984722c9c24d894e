"""Find a layer plan for a model on the CPU, and judge it on texts that the search did not see.

    sglang-blockreuse calibrate MODEL --full 10 --follower R --out plans/     search, then judge
    sglang-blockreuse calibrate MODEL --evaluate NAME|PATH ... --out DIR      judge plans that exist
    sglang-blockreuse calibrate MODEL --distil NAME|PATH --out DIR            train a scorer for a plan

A search begins with the pattern that loses the least softmax mass (dynamic programming over a table measured in one
dense pass), or with --start, turns full layers into followers until --full are left, moves them about, and lets every
follower choose its lender; every step is measured on the model. With --bytes, layers then read less, the least harmful
first per byte saved, until a step reads that share of the bytes of dense decode: full layers that attend to everything
select, full layers follow, reindex layers reuse. What is found is judged on texts that
the search did not see (--on). The folder gets plan.yaml, report.md, report.json and two plots.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ..layers.plan import BoundPlan, PlanError, Selection
from ..layers.plan_loader import LayerPlan, load_plan

# what a reader needs to repeat a report; paths of this machine are no part of it
ENVIRONMENT = ("time", "commit", "python", "packages", "hardware")

SEARCH_OPTIONS = {"name", "full", "follower", "start", "bytes", "rounds", "min_seq_len", "heads", "attend"}

HELP = "find a layer plan for a model, or judge plans, with a report"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", type=Path, help="folder of a Llama model, see `sglang-blockreuse model --path`"
    )
    parser.add_argument("--out", type=Path, default=Path("calibration"), metavar="DIR")
    parser.add_argument("--name", default="calibrated", help="name of the plan that is found")
    parser.add_argument("--evaluate", nargs="+", metavar="PLAN", help="judge these plans, search nothing")
    parser.add_argument(
        "--k",
        nargs="+",
        type=int,
        metavar="K",
        help="judge at these numbers of chosen positions, pools in proportion, in place of the plans' own",
    )
    parser.add_argument(
        "--on",
        choices=("choice", "held-out"),
        default="held-out",
        help="texts to judge on: those to choose among plans, or those that nothing was chosen on",
    )
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
        "--follower",
        choices=("R", "X", "RX"),
        default="R",
        help="R reuses indices, X reranks in a pool, RX begins with X and chooses (default: R)",
    )
    parser.add_argument(
        "--start", metavar="PATTERN", help="begin with this pattern, one letter of D A F X R per layer"
    )
    parser.add_argument(
        "--heads",
        choices=("layer", "kv_head"),
        default="kv_head",
        help="layers attend by one list, or by one per KV head; what they lend is one list (default: kv_head)",
    )
    parser.add_argument(
        "--attend",
        choices=("selected", "all"),
        default="selected",
        help="full layers attend to what they select, or to everything they score (default: selected)",
    )
    parser.add_argument("--bytes", type=float, metavar="SHARE", help="of dense decode, to end with")
    parser.add_argument("--rounds", type=int, default=3, help="moves of full layers (default: 3)")
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
        "--texts",
        nargs="+",
        default=["2"],
        metavar="N|KIND=N",
        help="texts of each of the five kinds, or of these kinds, searched and judged (default: 2)",
    )
    parser.add_argument(
        "--skip", type=int, default=0, metavar="N", help="leave out the first N texts of each kind"
    )


def run(arguments: argparse.Namespace) -> int:
    from ..layers.calibration.llama import UnsupportedModel

    try:
        if arguments.bytes is not None and not 0 < arguments.bytes < 1:
            raise ValueError(
                f"--bytes is {arguments.bytes}, but it is a share of dense decode's bytes. Use 0.2 for a fifth."
            )
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
        from ..layers.calibration.pattern import EXACT, PER_HEAD
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
        self.scorer = PER_HEAD if arguments.heads == "kv_head" else EXACT

    def run(self) -> None:
        from ..demo import environment
        from ..layers.calibration.report import Report

        report = Report(
            model=self.arguments.model.name,
            options=self._options(),
            environment={key: environment.describe()[key] for key in ENVIRONMENT},
            judged=[],
        )
        plans = [load_plan(name) for name in self.arguments.evaluate or ()] or [self._search(report)]
        self._judge(report, plans)
        report.write(self.arguments.out)
        print(report.to_markdown())

    def _options(self) -> dict[str, str]:
        """What decides the report, as text; options of the search only where one was made."""
        left_out = {"run", "out", "model"}
        if self.arguments.evaluate:
            left_out |= SEARCH_OPTIONS
        return {key: str(value) for key, value in vars(self.arguments).items() if key not in left_out}

    def _wanted(self) -> dict[str, int]:
        """Number of texts by kind."""
        from ..layers.calibration.texts import KINDS

        words = self.arguments.texts
        try:
            if len(words) == 1 and "=" not in words[0]:
                return dict.fromkeys(KINDS, int(words[0]))
            return {kind: int(num) for kind, _, num in (word.partition("=") for word in words)}
        except ValueError:
            raise ValueError(f"--texts {' '.join(words)}: give one number, or KIND=N for each kind") from None

    def _cases(self, first_seed: int, what: str) -> list[Any]:
        from tqdm import tqdm

        from ..layers.calibration.scored_case import ScoredCase

        low, high = self.arguments.lengths
        nums = self._wanted()
        # kinds take turns, so that none has the long texts
        rounds = range(max(nums.values()))
        first_seed += self.arguments.skip
        wanted = [(kind, first_seed + i) for i in rounds for kind, num in nums.items() if i < num]
        step = (high - low) // max(1, len(wanted) - 1)
        return [
            ScoredCase(self.model, kind, self.texts.make(kind, seed, low + i * step), self.arguments.rows)
            for i, (kind, seed) in enumerate(tqdm(wanted, desc=what, file=sys.stderr))
        ]

    def _search(self, report: Any) -> LayerPlan:
        from ..layers.calibration.overlap import collect
        from ..layers.calibration.pattern import plan_of
        from ..layers.calibration.search import Search, prior
        from ..layers.calibration.texts import SEARCH

        arguments = self.arguments
        cases = self._cases(SEARCH, "texts to search on")
        report.overlap = collect(cases, self.selection)
        lead = "A" if arguments.attend == "all" else "F"
        follower = arguments.follower[-1]
        start = arguments.start or prior(report.overlap.loss(follower), arguments.full, follower).replace(
            "F", lead
        )
        search = Search(
            cases, self.selection, self.scorer, lead, report=lambda line: print(line, file=sys.stderr)
        )
        found = search.shrink(start, follower, arguments.full)
        found = search.polish(found.pattern, arguments.rounds)
        if arguments.rounds:
            found = search.exchange(found.pattern, follower, arguments.rounds)
            found = search.sweep(found.pattern, arguments.follower)
        if arguments.bytes:
            found = search.descend(found.pattern, arguments.follower, self._share, arguments.bytes)
            if (share := self._share(found.pattern)) > arguments.bytes:
                print(
                    f"calibrate: --bytes {arguments.bytes} is not reached: no layer can read less at {share:.3f}. "
                    "Lower --final-k or --pool-size.",
                    file=sys.stderr,
                )
        report.history = search.history
        selection = self._served_selection()
        plan = plan_of(
            found.pattern,
            selection,
            name=arguments.name,
            scorer=self.scorer,
            architecture=self.model.architecture,
            evidence="report.md beside this file",
        )
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "plan.yaml").write_text(plan.to_yaml())
        return plan

    def _share(self, pattern: str) -> float:
        """Bytes of a step over those of dense decode, for the longest text."""
        from ..layers.calibration.pattern import bound_of
        from ..layers.plan_explain import explain

        plan = bound_of(pattern, self.selection, self.scorer)
        cost = explain(plan, self._shape(), num_tokens=self.arguments.lengths[1], batch=1)
        return cost.total_bytes / cost.dense_bytes

    def _served_selection(self) -> Selection:
        from msgspec.structs import replace

        return replace(self.selection, min_seq_len=self.arguments.min_seq_len)

    def _judge(self, report: Any, plans: list[LayerPlan]) -> None:
        from tqdm import tqdm

        from ..layers.calibration.ageing import ageing
        from ..layers.calibration.followers import follow
        from ..layers.calibration.judge import at_budget, judge
        from ..layers.calibration.replay import replay
        from ..layers.calibration.texts import CHOICE, HELD_OUT

        on = self.arguments.on
        report.texts = "Held-out texts" if on == "held-out" else "Texts to choose on"
        cases = self._cases(HELD_OUT if on == "held-out" else CHOICE, f"{on} texts")
        bound = {plan.name: plan.bind(self.model.num_layers, self.model.architecture) for plan in plans}
        weights = self._weights(bound.values())
        for case in cases:
            case.weights = weights
        everything = bound | self._beside()
        wanted = [
            (name, plan if k is None else at_budget(plan, k))
            for k in self.arguments.k or [None]
            for name, plan in everything.items()
        ]
        for name, plan in tqdm(wanted, desc="judging", file=sys.stderr):
            report.judged.append(
                judge(name, plan, cases, self._shape(), num_tokens=self.arguments.lengths[1])
            )
        sizes = {
            plan.selection.final_k: plan.selection for plan in bound.values() if plan.selection is not None
        }
        report.ageing = {final_k: ageing(cases, selection) for final_k, selection in sizes.items()}
        report.followers = {name: follow(cases, plan) for name, plan in bound.items()}
        report.replays = {name: replay(cases[0], plan) for name, plan in bound.items()}

    def _weights(self, plans: Iterable[BoundPlan]) -> dict[str, Any]:
        """The maps of each file that a plan names. Raises WeightsError."""
        from ..layers.index_weights import model_identity, read_weights

        named = [plan for plan in plans if plan.weights_file is not None]
        if not named:
            return {}
        identity = model_identity(self.arguments.model)
        return {plan.weights_file or "": read_weights(plan, identity).layers for plan in named}

    def _beside(self) -> dict[str, BoundPlan]:
        """What plans are compared with: every layer for itself, and groups of equal size."""
        from ..layers.calibration.pattern import PER_HEAD, bound_of, uniform

        num_layers = self.model.num_layers
        patterns = {"own lists everywhere": "F" * num_layers}
        patterns |= {f"groups of {n}, reuse": uniform(num_layers, n, "R") for n in (2, 4, 8)}
        patterns |= {"groups of 4, reindex": uniform(num_layers, 4, "X")}
        found = {name: bound_of(pattern, self.selection) for name, pattern in patterns.items()}
        return found | {"own lists per KV head": bound_of("F" * num_layers, self.selection, PER_HEAD)}

    def _shape(self) -> Any:
        from ..layers.plan_explain import KVShape

        return KVShape(num_kv_heads=self.model.num_kv_heads, head_dim=self.model.head_dim)
