"""Records of the serving benchmark as tables and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report_quality import machine
from stats import MIN_CLUSTERS, paired_ratio, percentile

Record = dict[str, Any]
BASE = "stock"
# what a ratio to the base is made of: name, key of the record, whether more is better
RATIOS = (
    ("TTFT p50", "median_ttft_ms", False),
    ("TTFT p95", "p95_ttft_ms", False),
    ("TPOT p50", "median_tpot_ms", False),
    ("requests/s", "request_throughput", True),
    ("input tokens/s", "input_throughput", True),
)


def tables(records: Sequence[Record]) -> tuple[str, list[str]]:
    """(Markdown, arms without ratios). An arm whose gate is red has its times shown and no ratio."""
    rounds = [r for r in records if r["record"] == "round"]
    refused = refusals(records)
    parts = [heading(records), times_table(rounds), gate_table(records)]
    fine = [arm for arm in arms_of(rounds) if arm != BASE and arm not in refused]
    if BASE in arms_of(rounds) and fine:
        parts.append(ratio_table(rounds, fine))
    for arm, problems in refused.items():
        shown = "\n".join(f"- {problem}" for problem in problems[:6])
        parts.append(f"**No ratio for {arm}: its gate is red.**\n\n{shown}")
    return "\n\n".join(parts) + "\n", list(refused)


def refusals(records: Sequence[Record]) -> dict[str, list[str]]:
    """Arms that may not be compared, and why. An arm that no gate judged is one of them."""
    verdicts = {r["arm"]: r for r in records if r["record"] == "gate"}
    rounds = [r for r in records if r["record"] == "round"]
    refused = {}
    for arm in arms_of(rounds):
        if arm == BASE:
            continue
        problems = list(verdicts[arm]["problems"]) if arm in verdicts else ["no gate judged this arm"]
        problems += [f"round {r['round']}: {p}" for r in rounds if r["arm"] == arm for p in r["problems"]]
        if problems:
            refused[arm] = problems
    return refused


def heading(records: Sequence[Record]) -> str:
    run = next(r for r in records if r["record"] == "serving")
    o = run["options"]
    loop = f"{o['clients']} clients" + (
        "" if o["rate"] in (float("inf"), "inf") else f", {o['rate']} arrivals/s"
    )
    source = f" of {Path(o['source']).name}" if o.get("source") else ""
    return (
        f"### Serving: {o['traffic']} traffic, {o['per_prompt']} of {o['documents']} documents{source} per prompt, "
        f"Zipf {o['zipf']}, {loop}\n\n"
        f"{o['rounds']} rounds of {o['requests']} requests per arm, {o['new_tokens']} tokens each; {machine(run)}"
    )


def times_table(rounds: Sequence[Record]) -> str:
    lines = [
        "| arm | TTFT p50 (ms) | p95 | p99 | TPOT p50 (ms) | requests/s | input tokens/s | hit share | recomputed |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for arm in arms_of(rounds):
        mine = [r for r in rounds if r["arm"] == arm]
        ttfts = [1e3 * t for r in mine for t in r["ttfts"]]
        cells = [arm, *(f"{percentile(ttfts, share):,.0f}" for share in (0.5, 0.95, 0.99))]
        cells += [f"{statistics.median(r['median_tpot_ms'] for r in mine):,.1f}"]
        cells += [f"{statistics.median(r['request_throughput'] for r in mine):.2f}"]
        cells += [f"{statistics.median(r['input_throughput'] for r in mine):,.0f}"]
        cells += [f"{statistics.fmean(r[k] for r in mine):.1%}" for k in ("hit_share", "recomputed_share")]
        lines.append("| " + " | ".join(cells) + " |")
    lines += [
        "",
        "TTFT over all requests; the others are medians over the rounds. Shares are of all prompt tokens.",
    ]
    return "\n".join(lines)


def gate_table(records: Sequence[Record]) -> str:
    lines = ["| gate | verdict | answers | mean KL | top-1 | same first token |", "|---|---|---|---|---|---|"]
    for r in records:
        if r["record"] != "gate":
            continue
        kl = "–" if r["mean_kl"] is None else f"{r['mean_kl']:.4f}"
        shares = ["–" if r[k] is None else f"{r[k]:.0%}" for k in ("top1", "same_first")]
        verdict = "green" if r["green"] else "**red**"
        lines.append(f"| {r['arm']} | {verdict} | {r['num_answers']} | {kl} | {' | '.join(shares)} |")
    return "\n".join(lines)


def ratio_table(rounds: Sequence[Record], arms: Sequence[str]) -> str:
    num_rounds = len({r["round"] for r in rounds})
    how = "median of the rounds [95 % bootstrap over rounds]"
    if num_rounds < MIN_CLUSTERS:
        how = f"{num_rounds} of {MIN_CLUSTERS} rounds that an interval takes: this shows that all works, and no more"
    lines = [
        f"Better than {BASE} by a factor of (above 1 is faster; {how}):",
        "",
        f"| arm | {' | '.join(name for name, _, _ in RATIOS)} |",
        "|---|" + "---|" * len(RATIOS),
    ]
    for arm in arms:
        cells = []
        for _, key, more_is_better in RATIOS:
            mine, base = ({r["round"]: r[key] for r in rounds if r["arm"] == name} for name in (arm, BASE))
            ratio = paired_ratio(mine, base) if more_is_better else paired_ratio(base, mine)
            cells.append(ratio.text(digits=2))
        lines.append(f"| {arm} | {' | '.join(cells)} |")
    return "\n".join(lines)


def plot(records: Sequence[Record], path: Path) -> None:
    """Time to first token: its distribution, one curve per arm, and against the length of the prompt."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rounds = [r for r in records if r["record"] == "round"]
    refused = refusals(records)
    figure, (spread, lengths) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for arm in arms_of(rounds):
        mine = [r for r in rounds if r["arm"] == arm]
        points = [pair for r in mine for pair in zip(r["input_lens"], r["ttfts"], strict=True)]
        ttfts = sorted(ttft for _, ttft in points)
        shares = [100 * (i + 1) / len(ttfts) for i in range(len(ttfts))]
        spread.step(ttfts, shares, where="post", label=f"{arm} (gate red)" if arm in refused else arm)
        lengths.scatter(*zip(*points, strict=True), s=9, alpha=0.6)
    spread.set(xlabel="time to first token (s)", ylabel="requests answered by then (%)", xscale="log")
    lengths.set(xlabel="prompt tokens", ylabel="time to first token (s)", yscale="log")
    spread.legend(frameon=False)
    for axes in (spread, lengths):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def arms_of(rounds: Sequence[Record]) -> list[str]:
    """In the order of their first appearance, the base first."""
    names = list(dict.fromkeys(r["arm"] for r in rounds))
    return sorted(names, key=lambda name: (name != BASE, names.index(name)))
