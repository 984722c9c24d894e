"""Records of the quality benchmark as a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from stats import Estimate, bootstrap, gap_share

Record = dict[str, Any]
# of policy `none`, in the order in which they are taken
BASELINES = (
    ("no repair, home alone", lambda homes: homes == "alone"),
    ("no repair, home behind the system prompt", lambda homes: homes == "leading"),
    ("no repair", lambda homes: True),
)


def tables(records: Sequence[Record]) -> tuple[str, list[str]]:
    """(Markdown, problems). With a problem there is no ratio: what was skipped was not measured."""
    measured = [r for r in records if r["record"] == "measurement"]
    problems = problems_of(measured)
    parts = [heading(records), counts(measured)]
    if problems:
        shown = "\n".join(f"- {problem}" for problem in problems[:10])
        more = f"\n- and {len(problems) - 10} more" if len(problems) > 10 else ""
        parts.append(f"**No ratios: {len(problems)} measurements are none.**\n\n{shown}{more}")
        return "\n\n".join(parts) + "\n", problems
    name, baseline = baseline_of(measured)
    parts += [main_table(measured, name, baseline), category_table(measured, baseline)]
    return "\n\n".join(parts) + "\n", []


def problems_of(measured: Iterable[Record]) -> list[str]:
    return [f"{r['context']} {arm_name(r)} ({r['forced']}): {r['problem']}" for r in measured if r["problem"]]


def baseline_of(measured: Sequence[Record]) -> tuple[str, dict[str, float]]:
    """The name of the baseline that was measured, and per context its summed KL."""
    for name, is_baseline in BASELINES:
        found = {
            r["context"]: sum(r["kl"])
            for r in measured
            if r["policy"] == "none" and is_baseline(homes_of(r)) and r["forced"] == "oracle"
        }
        if found:
            return name, found
    return "none was measured", {}


def heading(records: Sequence[Record]) -> str:
    run = next((r for r in records if r["record"] == "quality"), None)
    if run is None:
        return "### Quality"
    options = run["options"]
    return (
        f"### Quality: {options['split']} contexts, seed {seeds_of(records)}\n\n"
        f"{machine(run)}; blocks {options['blocks'] or 'default'}"
    )


def seeds_of(records: Sequence[Record]) -> str:
    """The seeds of all runs in these records; a run may have several."""
    seeds = [r["options"]["seed"] for r in records if r["record"] == "quality"]
    flat = [one for seed in seeds for one in (seed if isinstance(seed, list) else [seed])]
    return ", ".join(map(str, dict.fromkeys(flat)))


def machine(run: Record) -> str:
    """Where and with what a run was measured."""
    environment = run["environment"]
    hardware = environment["hardware"]
    packages = ", ".join(f"{name} {version}" for name, version in environment["packages"].items())
    return (
        f"{hardware['cpu']}, {hardware['cores']} cores, GPU {hardware['gpu'] or 'none'}; {packages}; "
        f"commit {environment['commit']}; {environment['time']}"
    )


def counts(measured: Sequence[Record]) -> str:
    contexts = {r["context"]: r["category"] for r in measured}
    full = [r for r in measured if r["policy"] == "full" and r["forced"] == "oracle"]
    tokens = sum(len(r["kl"]) for r in full)
    by_category = ", ".join(
        f"{c} {sum(v == c for v in contexts.values())}" for c in sorted(set(contexts.values()))
    )
    return f"{len(contexts)} contexts ({by_category}), {tokens} answer tokens of the oracle."


def main_table(measured: Sequence[Record], baseline_name: str, baseline: dict[str, float]) -> str:
    lines = [
        f"Gap: KL of *{baseline_name}*. Intervals: 95 %, bootstrap over contexts.",
        "",
        "| homes behind | policy | budget | contexts | recomputed, measured | KL per token | share of the gap (%) "
        "| top-1 (%) | whole answer (%) | exact value (%) | NLL of the value |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for homes, policy, budget in arms_of(measured):
        mine = of_arm(measured, homes, policy, budget)
        oracle = [r for r in mine if r["forced"] == "oracle"]
        known = [r for r in mine if r["exact"] is not None]
        cells = [
            "–" if policy == "full" else homes,
            policy,
            f"{100 * budget:g} %",
            str(len(oracle)),
            f"{100 * statistics.fmean(ratio_of(r) for r in oracle):.1f} %",
            kl_estimate(oracle).text(digits=4),
            share_text(oracle, baseline),
            f"{100 * statistics.fmean(s for r in oracle for s in r['same_top']):.0f}",
            f"{100 * statistics.fmean(all(r['same_top']) for r in oracle):.0f}",
            f"{100 * statistics.fmean(r['exact'] for r in known):.0f}" if known else "–",
            f"{statistics.fmean(r['nll'] for r in known):.3f}" if known else "–",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "`full` is a full prefill against itself in other pieces: the noise floor, and the oracle's exact values.",
    ]
    return "\n".join(lines)


def category_table(measured: Sequence[Record], baseline: dict[str, float]) -> str:
    categories = sorted({r["category"] for r in measured})
    lines = [
        "Share of the gap by category (%):",
        "",
        f"| homes behind | policy | budget | {' | '.join(categories)} |",
        "|---|---|---|" + "---|" * len(categories),
    ]
    for homes, policy, budget in arms_of(measured):
        if policy == "full" or homes == "alone":
            continue
        mine = of_arm(measured, homes, policy, budget, forced="oracle")
        if not is_whole(measured, homes, mine):
            continue
        cells = [share_text([r for r in mine if r["category"] == c], baseline) for c in categories]
        lines.append(f"| {homes} | {policy} | {100 * budget:g} % | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(records: Sequence[Record], path: Path) -> None:
    """Share of the gap over the recomputed share as the server reports it, one line per policy and kind of homes."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    measured = [r for r in records if r["record"] == "measurement"]
    name, baseline = baseline_of(measured)
    curves: dict[tuple[str, str], list[tuple[float, Estimate]]] = {}
    for homes, policy, budget in arms_of(measured):
        mine = of_arm(measured, homes, policy, budget, forced="oracle")
        is_curve = policy != "full" and homes != "alone" and is_whole(measured, homes, mine)
        if is_curve and any(r["context"] in baseline for r in mine):
            point = (100 * statistics.fmean(ratio_of(r) for r in mine), share(mine, baseline))
            curves.setdefault((homes, policy), []).append(point)
    starts = {homes: curves.pop((homes, policy)) for homes, policy in list(curves) if policy == "none"}
    kinds = {homes for homes, _ in curves}
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for (homes, policy), points in sorted(curves.items()):
        points = sorted([*starts.get(homes, []), *points], key=lambda point: point[0])
        xs, ys = [x for x, _ in points], [100 * e.value for _, e in points]
        name = policy if len(kinds) == 1 else f"{policy}, homes {homes}"
        (line,) = axes.plot(xs, ys, marker="o", markersize=4, label=name)
        low, high = [100 * e.low for _, e in points], [100 * e.high for _, e in points]
        axes.fill_between(xs, low, high, color=line.get_color(), alpha=0.12, linewidth=0)
    axes.set(
        xlabel="recomputed share of the tokens up to the last block (%)",
        ylabel=f"share of the KL gap closed (%)\ngap: {name}",
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def is_whole(measured: Sequence[Record], homes: str, mine: Sequence[Record]) -> bool:
    """Whether an arm was measured on the contexts that the others of its homes were, so that it may stand beside them.

    A run that was stopped lacks some arms of its last context.
    """
    return len(mine) >= len(of_arm(measured, homes, "none", 0.0, forced="oracle")) - 1


def share(records: Sequence[Record], baseline: dict[str, float]) -> Estimate:
    pairs = [(sum(r["kl"]), baseline[r["context"]]) for r in records if r["context"] in baseline]
    return bootstrap(pairs, gap_share)


def gain(
    measured: Sequence[Record],
    baseline: dict[str, float],
    mine: tuple[str, str, float],
    other: tuple[str, str, float],
) -> Estimate:
    """How much more of the gap one (homes, policy, budget) closes than another, on the contexts that both have.

    Raises:
        ValueError: they have none in common.
    """
    kl = [
        {r["context"]: sum(r["kl"]) for r in of_arm(measured, *arm, forced="oracle")} for arm in (mine, other)
    ]
    both = sorted(kl[0].keys() & kl[1].keys() & baseline.keys())
    triples = [(kl[0][name], kl[1][name], baseline[name]) for name in both]

    def difference(some: Sequence[tuple[float, float, float]]) -> float:
        return gap_share([(a, base) for a, _, base in some]) - gap_share([(b, base) for _, b, base in some])

    return bootstrap(triples, difference)


def share_text(records: Sequence[Record], baseline: dict[str, float]) -> str:
    if not any(r["context"] in baseline for r in records):
        return "–"
    return share(records, baseline).text(scale=100)


def kl_estimate(records: Sequence[Record]) -> Estimate:
    def mean(some: Sequence[Record]) -> float:
        return sum(sum(r["kl"]) for r in some) / sum(len(r["kl"]) for r in some)

    return bootstrap(records, mean)


def homes_of(record: Record) -> str:
    """What the homes of a measurement were compiled behind, in the words of homes.py."""
    # records of earlier versions know two kinds
    return str(record.get("homes") or ("alone" if record.get("alone") else "leading"))


def arms_of(measured: Iterable[Record]) -> list[tuple[str, str, float]]:
    """(homes, policy, budget): the floor, the baseline, then homes by name, no repair first."""
    arms = {(homes_of(r), r["policy"], r["budget"]) for r in measured}
    rank = {"full": 0, "none": 1}
    return sorted(
        arms, key=lambda arm: (arm[1] != "full", arm[0] != "alone", arm[0], rank.get(arm[1], 2), *arm[1:])
    )


def of_arm(
    measured: Iterable[Record], homes: str, policy: str, budget: float, *, forced: str | None = None
) -> list[Record]:
    return [
        r
        for r in measured
        if (homes_of(r), r["policy"], r["budget"]) == (homes, policy, budget)
        and forced in (None, r["forced"])
    ]


def arm_name(record: Record) -> str:
    return f"{homes_of(record)}, {record['policy']} {record['budget']:g}"


def ratio_of(record: Record) -> float:
    """|T|/N as the server reports it, without the question; a full prefill recomputes all."""
    return 1.0 if record["policy"] == "full" else float(record["usage"]["recompute_ratio"])
