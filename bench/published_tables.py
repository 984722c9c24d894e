"""Tables of README and docs/results.md, made from the published results: what they say was measured, was measured.

A table stands between `<!-- table: NAME -->` and `<!-- end -->`. `rewrite` makes all of them anew; a test holds the
pages to what it gives. Every table ends with the machine, versions, commit, date and seed it was measured with.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import records
import report_decode
import report_quality
import report_serving
from stats import paired_ratio, percentile

Record = dict[str, Any]
PAGES = ("README.md", "docs/results.md")
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def rewrite(text: str, results: Path) -> str:
    """The text with every marked table made from the results; tables without a result stay as they are.

    Raises:
        ValueError: a marked table has a name that is none.
    """

    def table(match: re.Match[str]) -> str:
        start, name, end = match.groups()
        if name not in TABLES:
            raise ValueError(f"table {name!r} is none of {', '.join(TABLES)}")
        *sources, make = TABLES[name]
        paths = [results / source for source in sources]
        if not all(path.is_file() for path in paths):
            return match[0]
        return f"{start}{make(*(records.read([path]) for path in paths))}\n{end}"

    return MARKED.sub(table, text)


def summary(
    demo: Sequence[Record],
    serving: Sequence[Record],
    quality: Sequence[Record],
    unmarked: Sequence[Record],
    layer_plan: Sequence[Record],
) -> str:
    """The figures of the first page, one row each: stock beside ours, and the ratio."""
    (run,) = demo
    s = run["summary"]
    agreement = f"KL {s['mean_kl']:.3f}, same top token {s['top1']:.0%}"
    rows = [
        _closeness(quality),
        (
            f"first token, {run['options']['per_prompt']} known documents in {s['prompt_tokens']:,.0f} tokens",
            f"{s['ttft_stock_median_ms'] / 1000:.1f} s",
            f"{s['ttft_ours_median_ms'] / 1000:.1f} s",
            f"**{s['ttft_ratio_median']:.1f} times** sooner; {agreement}",
        ),
    ]
    rounds, refused = [r for r in serving if r["record"] == "round"], report_serving.refusals(serving)
    gates = {r["arm"]: r for r in serving if r["record"] == "gate"}
    for policy in ("seam", "query"):
        ratio = _ratio(rounds, refused, policy, "request_throughput")
        rows.append(
            (
                f"requests/s, policy `{policy}`, 5 % recomputed",
                *(_median(rounds, arm, "request_throughput", "{:.2f}") for arm in ("stock", policy)),
                f"**{ratio} times**; {_gate(gates.get(policy), policy)}",
            )
        )
    rounds, refused = [r for r in unmarked if r["record"] == "round"], report_serving.refusals(unmarked)
    rows.append(
        (
            "requests/s, traffic without marks",
            *(_median(rounds, arm, "request_throughput", "{:.2f}") for arm in ("stock", "unmarked")),
            f"{_ratio(rounds, refused, 'unmarked', 'request_throughput')} times; the same answers",
        )
    )
    batch, context = largest = max(report_decode.cases_of(layer_plan), key=lambda case: case[0] * case[1])
    rows.append(
        (
            f"time per token, layer plan, {batch} requests of {context:,} tokens",
            *(
                f"{statistics.median(report_decode.turns(layer_plan, largest, mode).values()):.0f} ms"
                for mode in ("stock", "plan")
            ),
            f"{report_decode.ratio(layer_plan, largest, 'stock').text(digits=2)} of the time "
            f"({report_decode.ratio(layer_plan, largest, 'dense').text(digits=2)} of our own dense decode's)",
        )
    )
    head = ["| | stock | with blockreuse | |", "|---|---|---|---|"]
    small_print = where(run).replace("</sub>", " (first token; the others: docs/results.md)</sub>")
    return "\n".join([*head, *(f"| {' | '.join(row)} |" for row in rows), "", small_print])


def _closeness(quality: Sequence[Record]) -> tuple[str, ...]:
    """How close answers come behind the best homes that were measured, with nothing repaired and by `query` at 5 %."""
    measured = [r for r in quality if r["record"] == "measurement"]
    _, baseline = report_quality.baseline_of(measured)
    arms = report_quality.arms_of(measured)
    kinds = {
        (homes, policy) for homes, policy, _ in arms if homes != "alone" and policy not in ("full", "none")
    }
    homes = _best_first(kinds, measured, baseline)[0][0]
    nothing, repaired = (
        report_quality.share_text(report_quality.of_arm(measured, homes, *arm, forced="oracle"), baseline)
        for arm in (("none", 0.0), ("query", 0.05))
    )
    return (
        "gap to the exact answer closed, nothing / 5 % repaired (`query`)",
        "100 %",
        f"{nothing} % / **{repaired} %**",
        "held-out contexts",
    )


def demo(found: Sequence[Record]) -> str:
    (run,) = found
    s = run["summary"]
    tokens = " / ".join(f"{s[f'{k}_tokens_median']:,.0f}" for k in ("prefix", "reused", "repaired", "fresh"))
    fresh = s["prompt_tokens"] - s["cached_tokens_stock_median"]
    rows = [
        ("TTFT, median", f"{s['ttft_stock_median_ms']:,.0f} ms", f"{s['ttft_ours_median_ms']:,.0f} ms"),
        ("TTFT, 95th percentile", f"{s['ttft_stock_p95_ms']:,.0f} ms", f"{s['ttft_ours_p95_ms']:,.0f} ms"),
        (
            "TTFT ratio per prompt, median (smallest)",
            "",
            f"**{s['ttft_ratio_median']:.1f}** ({s['ttft_ratio_min']:.1f})",
        ),
        ("TPOT, median", f"{s['tpot_stock_median_ms']:.0f} ms", f"{s['tpot_ours_median_ms']:.0f} ms"),
        (
            "prompt tokens: exact prefix / reused / repaired / fresh",
            f"{s['cached_tokens_stock_median']:,.0f} / – / – / {fresh:,.0f}",
            tokens,
        ),
        (
            r"recomputed share of the tokens up to the last block, \|T\|/N",
            "",
            f"{s['recompute_ratio_max']:.1%}",
        ),
        (
            f"agreement with the stock answer over {s['scored_positions']} answer tokens",
            "",
            f"KL {s['mean_kl']:.3f}, same top token {s['top1']:.0%}",
        ),
        (
            "answers that hold the asked fact",
            *(f"{s[f'answers_with_fact_{side}']} of {s['num_prompts']}" for side in ("stock", "ours")),
        ),
        (
            "first sight of the documents (compile, then answer)",
            *(f"{s[f'ttft_{side}_first_sight_ms']:,.0f} ms" for side in ("stock", "ours")),
        ),
        (
            f"the bound: as many tokens ({s['bound_computed_tokens']}) behind an exactly cached prefix, same server",
            "",
            f"{s['ttft_bound_median_ms']:,.0f} ms, ours takes {s['ttft_ours_over_bound']:.2f} of it",
        ),
    ]
    head = ["| | stock SGLang | with document reuse |", "|---|---|---|"]
    return "\n".join(
        [*head, *(f"| {' | '.join(row)} |" for row in rows), "", where(run, seed=run["options"]["seed"])]
    )


def quality(found: Sequence[Record]) -> str:
    """Rows are homes and policies, columns budgets; the share of the gap in percent with its interval."""
    measured = [r for r in found if r["record"] == "measurement"]
    _, baseline = report_quality.baseline_of(measured)
    arms = [arm for arm in report_quality.arms_of(measured) if arm[0] != "alone" and arm[1] != "full"]
    budgets = sorted({budget for _, policy, budget in arms if policy != "none"})
    last = budgets[-1]
    lines = [
        f"| homes behind | contexts | policy | nothing repaired | {' | '.join(f'{100 * b:g} %' for b in budgets)} "
        f"| same top token at {100 * last:g} % |",
        "|---|---|---|---|" + "---|" * (len(budgets) + 1),
    ]
    kinds = _best_first({(h, p) for h, p, _ in arms if p != "none"}, measured, baseline)
    for homes, policy in kinds:
        none = report_quality.of_arm(measured, homes, "none", 0.0, forced="oracle")
        cells = [report_quality.share_text(none, baseline)]
        for budget in budgets:
            mine = report_quality.of_arm(measured, homes, policy, budget, forced="oracle")
            # a control may be measured at one budget only, or on some of the contexts
            is_whole = report_quality.is_whole(measured, homes, mine)
            cells.append(report_quality.share_text(mine, baseline) if is_whole else "–")
        most = report_quality.of_arm(measured, homes, policy, last, forced="oracle")
        top = _top1(most) if report_quality.is_whole(measured, homes, most) else "–"
        lines.append(f"| {homes} | {len(none)} | `{policy}` | {' | '.join(cells)} | {top} |")
    lines += ["", report_quality.counts(measured), *_gains(measured, baseline, kinds), ""]
    lines.append(where(found[0], seed=report_quality.seeds_of(found)))
    return "\n".join(lines)


def _gains(
    measured: Sequence[Record], baseline: dict[str, float], kinds: Sequence[tuple[str, str]]
) -> list[str]:
    """What the best homes and policy gain over the others at 5 %, context by context."""
    best = (*kinds[0], 0.05)
    others = [
        *((homes, best[1], 0.05) for homes in dict.fromkeys(h for h, _ in kinds) if homes != best[0]),
        *((best[0], policy, 0.05) for homes, policy in kinds if homes == best[0] and policy != best[1]),
    ]
    found = [
        f"{report_quality.gain(measured, baseline, best, other).text(scale=100)} over `{other[1]}` behind {other[0]}"
        for other in others
        if report_quality.of_arm(measured, *other)
    ]
    if not found:
        return []
    return ["", f"Points that `{best[1]}` behind {best[0]} gains at 5 %, paired: {'; '.join(found)}."]


def _best_first(
    kinds: set[tuple[str, str]], measured: Sequence[Record], baseline: dict[str, float]
) -> list[tuple[str, str]]:
    """(homes, policy): those next to each other whose homes are the same, the best at 5 % first."""

    def value(kind: tuple[str, str]) -> float:
        mine = report_quality.of_arm(measured, *kind, 0.05, forced="oracle")
        return report_quality.share(mine, baseline).value if mine else -1.0

    best = {homes: max(value(kind) for kind in kinds if kind[0] == homes) for homes, _ in kinds}
    return sorted(kinds, key=lambda kind: (-best[kind[0]], kind[0], -value(kind), kind[1]))


def _top1(some: Sequence[Record]) -> str:
    return f"{statistics.fmean(s for r in some for s in r['same_top']):.0%}" if some else "–"


def serving(found: Sequence[Record]) -> str:
    """One column per arm; ratios only for arms whose gate is green."""
    rounds = [r for r in found if r["record"] == "round"]
    refused = report_serving.refusals(found)
    arms = report_serving.arms_of(rounds)
    gates = {r["arm"]: r for r in found if r["record"] == "gate"}
    rows = {
        "requests per second": [_median(rounds, arm, "request_throughput", "{:.2f}") for arm in arms],
        "TTFT, median": [_ttft(rounds, arm, 0.5) for arm in arms],
        "TTFT, 95th percentile": [_ttft(rounds, arm, 0.95) for arm in arms],
        "TPOT, median": [_median(rounds, arm, "median_tpot_ms", "{:.0f} ms") for arm in arms],
        "requests/s over stock": [_ratio(rounds, refused, arm, "request_throughput") for arm in arms],
        "p95 TTFT over stock": [_ratio(rounds, refused, arm, "p95_ttft_ms") for arm in arms],
        "gate": [_gate(gates.get(arm), arm) for arm in arms],
    }
    names = [arm if arm == report_serving.BASE else f"`{arm}`" for arm in arms]
    head = [f"| | {' | '.join(names)} |", "|---|" + "---|" * len(arms)]
    body = [f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()]
    options = found[0]["options"]
    size = f"{options['rounds']} rounds of {options['requests']} requests per arm, {options['clients']} in flight."
    return "\n".join([*head, *body, "", size, "", where(found[0], seed=options["seed"])])


def _ttft(rounds: Sequence[Record], arm: str, share: float) -> str:
    return f"{percentile([t for r in rounds if r['arm'] == arm for t in r['ttfts']], share):.1f} s"


def _median(rounds: Sequence[Record], arm: str, key: str, form: str) -> str:
    return form.format(statistics.median(r[key] for r in rounds if r["arm"] == arm))


def _ratio(rounds: Sequence[Record], refused: dict[str, list[str]], arm: str, key: str) -> str:
    """Ours over stock, median of the rounds with its bootstrap interval, bold; nothing where the gate is red."""
    if arm == report_serving.BASE:
        return "1"
    if arm in refused:
        return "not claimed"
    mine, base = (
        {r["round"]: r[key] for r in rounds if r["arm"] == name} for name in (arm, report_serving.BASE)
    )
    return paired_ratio(mine, base).text(digits=2)


def _gate(gate: Record | None, arm: str) -> str:
    if gate is None:
        return "" if arm == report_serving.BASE else "**red**: not judged"
    if gate["green"]:
        return (
            "green"
            if gate["mean_kl"] is None
            else f"green: KL {gate['mean_kl']:.3f}, top-1 {gate['top1']:.1%}"
        )
    return f"**red**: {gate['problems'][0]}"


def soak(found: Sequence[Record]) -> str:
    result = found[-1]
    kinds = ", ".join(f"{kind} {num}" for kind, num in sorted(result["requests"].items()))
    faults = "no fault" if not result["problems"] else f"**{len(result['problems'])} faults**"
    minutes = found[0]["options"]["minutes"]
    return (
        f"{minutes:g} minutes, {sum(result['requests'].values())} requests ({kinds}), {result['retracted']} "
        f"retracted: {faults}.\n\n{where(found[0], seed=found[0]['options']['seed'])}"
    )


def plans(found: Sequence[Record]) -> str:
    """Shipped plans and what they are compared with, at the three numbers of chosen positions."""
    (run,) = found
    by_name: dict[str, dict[int, Record]] = {}
    for judged in run["held_out"]:
        by_name.setdefault(judged["name"], {})[judged["k"]] = judged
    lines = [
        "| plan | full layers of 30 | bytes read / dense | KL, k = 128 | NLL over dense | KL, k = 64 | KL, k = 256 |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, at in by_name.items():
        main = at[128]
        low, high = main["kl_interval"]
        cells = [
            f"`{name}`" if name.startswith("smollm2") else name,
            str(main["num_full"]),
            f"{main['byte_ratio']:.2f}",
            f"{main['kl']:.3f} [{low:.3f}, {high:.3f}]",
            f"{main['nll']:+.3f}",
            *(f"{at[k]['kl']:.3f}" for k in (64, 256)),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", where(run)])


def layer_plan(found: Sequence[Record]) -> str:
    """Time per token of a plan beside dense decode and the host's own backend, and the largest case's step."""
    largest = max(report_decode.cases_of(found), key=lambda case: case[0] * case[1])
    parts = sorted(report_decode.by_part(found, largest).items(), key=lambda item: -item[1])
    spent = ", ".join(f"{part} {ms:.0f}" for part, ms in parts if ms > 0.5)
    options = found[0]["options"]
    lines = [
        report_decode.ratio_table(found),
        "",
        f"Plan `{options['plan']}`, {options['dtype']}, {options['repeats']} turns per mode; ratios are medians of "
        f"pairs with a 95 % bootstrap. A step at {largest[0]} × {largest[1]:,} by the server's own clock, ms: {spent} "
        "(`between` is the model's linear layers, `outside` the scheduler and the stream).",
    ]
    return "\n".join([*lines, "", where(found[0])])


def retrieval(found: Sequence[Record]) -> str:
    """Of the questions that dense decode answers, those to which the plan says the same."""
    options, cases = found[0]["options"], [r for r in found if r["record"] == "case"]
    lines = [
        f"| under `{options['plan']}` | asked | dense decode is right | the plan says the same |",
        "|---|---|---|---|",
    ]
    for kind in (*dict.fromkeys(r["kind"] for r in cases), "all"):
        mine = [r for r in cases if kind in (r["kind"], "all")]
        right = [r for r in mine if r["right"]]
        same = sum(r["same"] for r in right)
        lines.append(f"| {kind} | {len(mine)} | {len(right)} | {same} ({same / len(right):.0%}) |")
    low, high = options["lengths"]
    text = f"Contexts of {low:,} to {high:,} tokens, {options['per_context']} questions on each."
    return "\n".join([*lines, "", text, "", where(found[0], seed=options["seed"])])


def attention(found: Sequence[Record]) -> str:
    """The served dtype; the records hold float32 beside it."""
    (run,) = found
    lines = [
        "| case, requests × keys | torch_native | ours | ratio of attention | with linear layers |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {r['case']} | {r['stock_ms']:,.0f} ms | {r['ours_ms']:,.0f} ms | {r['attention_ratio']:.2f} "
        f"| {r['model_ratio']:.2f} |"
        for r in run["results"]
        if r["dtype"] == "bfloat16"
    ]
    return "\n".join([*lines, "", where(run)])


def where(run: Record, *, seed: int | str | None = None) -> str:
    """Small print under a table."""
    environment = run["environment"]
    hardware, packages = environment["hardware"], environment["packages"]
    versions = ", ".join(f"{name} {packages[name]}" for name in ("sglang", "torch"))
    # a tree that differed from its commit must show it
    commit, _, changed = (environment["commit"] or "unknown").partition(" ")
    more = "" if seed is None else f"; seed {seed}"
    if "load_average" in environment:
        more += f"; load at the start {environment['load_average'][0]:.1f}"
    return (
        f"<sub>{hardware['cores']} cores of {hardware['cpu']}, {hardware['memory_gib']:.0f} GiB, "
        f"GPU {hardware['gpu'] or 'none'}; Python {environment['python']}, {versions}; commit "
        f"{f'{commit[:9]} {changed}'.strip()}; {environment['time'][:10]}{more}</sub>"
    )


# files in bench/results/cpu, and what makes the table of their records
TABLES: dict[str, tuple[Any, ...]] = {
    "summary": (
        "demo.json.gz",
        "serving.jsonl.gz",
        "quality.jsonl.gz",
        "unmarked.jsonl.gz",
        "layer-plan.jsonl.gz",
        summary,
    ),
    "demo": ("demo.json.gz", demo),
    "quality": ("quality.jsonl.gz", quality),
    "quality-leading": ("quality-leading.jsonl.gz", quality),
    "serving": ("serving.jsonl.gz", serving),
    "cold": ("cold.jsonl.gz", serving),
    "unmarked": ("unmarked.jsonl.gz", serving),
    "plans": ("plans.json.gz", plans),
    "layer-plan": ("layer-plan.jsonl.gz", layer_plan),
    "retrieval": ("retrieval.jsonl.gz", retrieval),
    "attention": ("attention.json.gz", attention),
    "soak": ("soak.jsonl.gz", soak),
}
