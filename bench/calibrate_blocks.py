"""Finds the `blocks` section for a model: policy, budget, alpha, beta and the guard's bound, measured on it.

    sglang-blockreuse calibrate-blocks --out DIR [--model PATH] [--target 0.75] [--max-budget 0.1] [--quick]

Measures the curve of quality over budget for every policy and every pair of alpha and beta, on the calibration
contexts of `bench quality`; takes the smallest budget that reaches the target share of the gap, and where none does
the best one up to the largest budget. The guard's bound is the largest value that it measures on these contexts
under the chosen setting, with a margin. Writes DIR/blocks.yaml for --blockreuse-config and DIR/calibration.md with
the figures behind it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import quality
import report_quality
import yaml
from stats import gap_share

# A bound that nothing exceeds: the guard measures and never acts.
WATCHING = 1e9
# How far above the largest value seen the bound lies: contexts that are worse off than these must not pass.
GUARD_MARGIN = 1.1
CORRECTIONS = ((0.0, 0.0), (0.0, -1.0), (-0.5, 0.0))  # (alpha, beta)
QUICK_CORRECTIONS = ((0.0, 0.0),)


@dataclasses.dataclass(frozen=True)
class Setting:
    """One point of the curve."""

    alpha: float
    beta: float
    policy: str
    budget: float
    share: float  # of the gap
    num_tokens_share: float  # recomputed, as the servers reported it


@dataclasses.dataclass(frozen=True)
class Watched:
    """What the guard measured under the chosen setting."""

    values: tuple[float, ...]  # per context
    divergences: tuple[float, ...]  # summed KL per context, in the same order


def main(argv: Sequence[str] | None = None) -> int:
    options, rest = parse(argv)
    settings: list[Setting] = []
    for alpha, beta in QUICK_CORRECTIONS if options.quick else CORRECTIONS:
        records = measure(options, rest, f"alpha{alpha:g}_beta{beta:g}", {"alpha": alpha, "beta": beta})
        if records is None:
            return 1
        settings += settings_of(records, alpha=alpha, beta=beta)
    chosen = choose(settings, target=options.target, max_budget=options.max_budget)
    only = ["--policies", chosen.policy, "--budgets", str(chosen.budget)]
    # the guard judges the configured policy, so it takes a server that has this one
    records = measure(options, [*rest, *only], "guard", {**setting_keys(chosen), "guard": WATCHING})
    if records is None:
        return 1
    found = section(chosen, watched := watched_in(records, chosen))
    (options.out / "blocks.yaml").write_text(yaml.safe_dump({"blocks": found}, sort_keys=False))
    text = report(settings, chosen, watched, target=options.target)
    (options.out / "calibration.md").write_text(text)
    print(text)
    print(
        f"Written: {options.out / 'blocks.yaml'}. Launch with --blockreuse-config {options.out / 'blocks.yaml'}."
    )
    return 0


def parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="sglang-blockreuse calibrate-blocks",
        description=__doc__,
        epilog="Further options are those of `bench quality`.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument(
        "--target", type=float, default=0.75, help="share of the gap to reach (default: 0.75)"
    )
    parser.add_argument("--max-budget", type=float, default=0.1, help="largest budget allowed (default: 0.1)")
    parser.add_argument("--quick", action="store_true", help="few contexts, no alpha or beta")
    options, rest = parser.parse_known_args(argv)
    if not 0 < options.target <= 1:
        parser.error(f"--target is {options.target}, but it is a share of the gap, above 0 and at most 1")
    if not 0 < options.max_budget <= 1:
        parser.error(
            f"--max-budget is {options.max_budget}, but it is a share of the tokens up to the last block: above 0, "
            "and at most 1"
        )
    return options, rest


def measure(
    options: argparse.Namespace, rest: Sequence[str], name: str, blocks: dict[str, Any]
) -> list[dict[str, Any]] | None:
    """Records of one quality run; None, with the problems printed, where there are problems."""
    folder = options.out / name
    given = [f"{key}={value}" for key, value in blocks.items()]
    words = ["--out", str(folder), "--blocks", *given, *_blocks(rest)]
    words += [*(["--quick"] if options.quick else []), *_without_blocks(rest)]
    chosen = quality.parse(words)
    chosen.budgets = [b for b in chosen.budgets if b <= options.max_budget]
    records = quality.measure_all(chosen)
    text, problems = report_quality.tables(records)
    (folder / "quality.md").write_text(text)
    if problems:
        print(text, file=sys.stderr)
        return None
    return records


def _blocks(rest: Sequence[str]) -> list[str]:
    """What the user gave to --blocks."""
    if "--blocks" not in rest:
        return []
    behind = list(rest)[list(rest).index("--blocks") + 1 :]
    return list(itertools.takewhile(lambda word: not word.startswith("-"), behind))


def _without_blocks(rest: Sequence[str]) -> list[str]:
    if "--blocks" not in rest:
        return list(rest)
    at = list(rest).index("--blocks")
    return [*rest[:at], *rest[at + 1 + len(_blocks(rest)) :]]


def settings_of(records: Sequence[dict[str, Any]], *, alpha: float, beta: float) -> list[Setting]:
    """Points of the curve from the records of one quality run."""
    measured = [r for r in records if r["record"] == "measurement" and r["forced"] == "oracle"]
    _, baseline = report_quality.baseline_of(measured)
    measured = [r for r in measured if report_quality.homes_of(r) != "alone"]
    arms = {(r["policy"], r["budget"]) for r in measured} - {("none", 0.0), ("full", 1.0)}
    found = []
    for policy, budget in sorted(arms):
        mine = [r for r in measured if (r["policy"], r["budget"]) == (policy, budget)]
        mine = [r for r in mine if r["context"] in baseline]
        found.append(
            Setting(
                alpha,
                beta,
                policy,
                budget,
                share=gap_share([(sum(r["kl"]), baseline[r["context"]]) for r in mine]),
                num_tokens_share=sum(r["usage"]["recompute_ratio"] for r in mine) / len(mine),
            )
        )
    return found


def choose(settings: Sequence[Setting], *, target: float, max_budget: float) -> Setting:
    """The smallest budget that reaches the target, the best one otherwise; the control `random` is no candidate.

    Raises:
        ValueError: nothing was measured up to `max_budget`.
    """
    candidates = [s for s in settings if s.budget <= max_budget and s.policy != "random"]
    if not candidates:
        raise ValueError(f"no policy was measured at a budget up to {max_budget}; give --budgets")
    reached = [s for s in candidates if s.share >= target]
    if reached:
        return min(reached, key=lambda s: (s.budget, -s.share))
    return max(candidates, key=lambda s: s.share)


def watched_in(records: Sequence[dict[str, Any]], chosen: Setting) -> Watched:
    mine = [
        r
        for r in records
        if r["record"] == "measurement"
        and (r["policy"], r["budget"], r["forced"]) == (chosen.policy, chosen.budget, "oracle")
    ]
    return Watched(tuple(r["usage"]["guard"]["value"] for r in mine), tuple(sum(r["kl"]) for r in mine))


def setting_keys(chosen: Setting) -> dict[str, Any]:
    return {"policy": chosen.policy, "budget": chosen.budget, "alpha": chosen.alpha, "beta": chosen.beta}


def section(chosen: Setting, watched: Watched) -> dict[str, Any]:
    return {**setting_keys(chosen), "guard": round(GUARD_MARGIN * max(watched.values), 4)}


def report(settings: Sequence[Setting], chosen: Setting, watched: Watched, *, target: float) -> str:
    reached = "reaches" if chosen.share >= target else "does not reach"
    lines = [
        "# Calibration of document blocks",
        "",
        f"Chosen: `{section(chosen, watched)}`.",
        f"It closes {chosen.share:.2f} of the gap and {reached} the target of {target:g}.",
        "",
        "| alpha | beta | policy | budget | recomputed | share of the gap |",
        "|---|---|---|---|---|---|",
    ]
    for s in sorted(settings, key=lambda s: -s.share):
        lines.append(
            f"| {s.alpha:g} | {s.beta:g} | {s.policy} | {100 * s.budget:g} % | {100 * s.num_tokens_share:.1f} % "
            f"| {s.share:.2f} |"
        )
    correlation = spearman(watched.values, watched.divergences)
    lines += [
        "",
        f"Guard: its measure under the chosen setting goes from {min(watched.values):.3f} to "
        f"{max(watched.values):.3f}; the bound is {GUARD_MARGIN:g} times the largest. Over contexts this measure "
        f"and the divergence of the answers have a rank correlation of {correlation:.2f}: the nearer to 1, the more "
        "the guard knows about answers; near 0 it only catches contexts unlike all of these.",
    ]
    return "\n".join(lines) + "\n"


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Rank correlation; NaN where one side does not vary."""
    x, y = ranks(a), ranks(b)
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    covariance = sum((i - mean_x) * (j - mean_y) for i, j in zip(x, y, strict=True))
    spread = math.sqrt(sum((i - mean_x) ** 2 for i in x) * sum((j - mean_y) ** 2 for j in y))
    return covariance / spread if spread else float("nan")


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 0; equal values share their mean rank."""
    ordered = sorted(values)
    return [(ordered.index(v) + len(ordered) - 1 - ordered[::-1].index(v)) / 2 for v in values]


if __name__ == "__main__":
    sys.exit(main())
