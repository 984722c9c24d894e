"""Records of the layer-plan benchmark as tables and a figure: time per token, and where a step spends it."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from report_quality import machine
from stats import Estimate, paired_ratio

from sglang_blockreuse.layers.step_clock import PARTS

Record = dict[str, Any]
Key = tuple[int, int]  # batch, context
ROLES = ("dense", "full", "reindex", "reuse")
MODES = {
    "plan": "under the plan",
    "dense": "dense, our kernels, same server",
    "stock": "SGLang's torch_native decode",
}


def tables(records: Sequence[Record]) -> str:
    """Markdown: the ratios of every case, then the breakdown of each."""
    head = records[0]
    options = head["options"]
    parts = [
        f"### Decode under `{options['plan']}`, {options['dtype']}\n\n"
        f"{options['repeats']} turns of {options['tokens']} tokens per mode and case; {machine(head)}",
        ratio_table(records),
        *(breakdown_table(records, case) for case in cases_of(records) if breakdown(records, case)),
    ]
    return "\n\n".join(parts) + "\n"


def ratio_table(records: Sequence[Record]) -> str:
    """One line per case; a ratio is that of the plan's time to the other's, the median of pairs [95 %]."""
    others = [mode for mode in ("dense", "stock") if any(r.get("mode") == mode for r in records)]
    shown = ["plan", *others]
    lines = [
        f"| requests × context | {' | '.join(f'{MODES[mode]} (ms)' for mode in shown)} | "
        f"{' | '.join(f'plan / {mode}' for mode in others)} |",
        "|---|" + "---|" * (len(shown) + len(others)),
    ]
    for case in cases_of(records):
        cells = [f"{case[0]} × {case[1]:,}"]
        cells += [f"{statistics.median(turns(records, case, mode).values()):,.0f}" for mode in shown]
        cells += [f"**{ratio(records, case, mode).text(digits=2)}**" for mode in others]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def breakdown_table(records: Sequence[Record], case: Key) -> str:
    """ms per step, parts down and roles across; `outside` is what is left of the time per token.

    Below 0 where the edges of turns, whose steps have fewer rows, count as parts of whole steps.
    """
    spent = breakdown(records, case)
    roles = [role for role in ROLES if any(r == role for _, r in spent)]
    lines = [
        f"ms per step, {case[0]} × {case[1]:,}",
        "",
        f"| part | {' | '.join(roles)} | all |",
        "|---|" + "---|" * (len(roles) + 1),
    ]
    for part in PARTS:
        cells = [spent.get((part, role), 0.0) for role in roles]
        if any(cells):
            lines.append(f"| {part} | {' | '.join(f'{ms:.2f}' for ms in (*cells, sum(cells)))} |")
    lines.append(f"| outside | {' | ' * len(roles)}{outside(records, case):.2f} |")
    read = next(r["bytes"] for r in records if r["record"] == "breakdown" and is_case(r, case))
    own_ms = sum(ms for (part, _), ms in spent.items() if part != "between")
    lines += [
        "",
        f"A step reads {read['plan'] / 1e6:,.0f} MB of keys and values under the plan and "
        f"{read['dense'] / 1e6:,.0f} MB dense. Everything but `between` and `outside` is the plan's: {own_ms:.1f} ms, "
        f"{read['plan'] / own_ms / 1e6:.1f} GB/s.",
    ]
    return "\n".join(lines)


def is_case(record: Record, case: Key) -> bool:
    return (record["batch"], record["context"]) == case


def by_part(records: Sequence[Record], case: Key) -> dict[str, float]:
    """ms per step over all roles, in the order of a step, and `outside`."""
    spent = breakdown(records, case)
    found = {part: sum(ms for (p, _), ms in spent.items() if p == part) for part in PARTS}
    return {**{part: ms for part, ms in found.items() if ms}, "outside": outside(records, case)}


def outside(records: Sequence[Record], case: Key) -> float:
    """Scheduler, sampling, streaming: a token's time less what the layers' clock saw."""
    tpot_ms = statistics.median(turns(records, case, "plan").values())
    return tpot_ms - sum(breakdown(records, case).values())


def plot(records: Sequence[Record], path: Path) -> None:
    """Time per token against context, a line per mode and batch; beside it the plan's step as bars."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, bars) = plt.subplots(1, 2, figsize=(11, 5), layout="constrained")
    cases = cases_of(records)
    modes = [mode for mode in MODES if any(r.get("mode") == mode for r in records)]
    batches = sorted({batch for batch, _ in cases})
    for number, mode in enumerate(modes):
        for line, batch in zip(("-", "--", ":", "-."), batches, strict=False):
            mine = sorted(case for case in cases if case[0] == batch)
            medians = [statistics.median(turns(records, case, mode).values()) for case in mine]
            contexts = [context for _, context in mine]
            label = f"{MODES[mode]}, batch {batch}"
            times.plot(contexts, medians, line, marker="o", color=f"C{number}", label=label)
    times.set(xlabel="context (tokens)", ylabel="time per token (ms)", ylim=(0, None))
    times.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    names = [f"{batch} × {context:,}" for batch, context in cases]
    spent = [by_part(records, case) for case in cases]
    left = [0.0] * len(cases)
    for part in dict.fromkeys((*PARTS, "outside")):
        ms = [max(0.0, found.get(part, 0.0)) for found in spent]
        if any(ms):
            bars.barh(names, ms, left=left, label=part)
            left = [a + b for a, b in zip(left, ms, strict=True)]
    bars.invert_yaxis()
    bars.set(xlabel="ms of a step under the plan", ylabel="requests × context")
    bars.legend(frameon=False, fontsize="small", loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=5)
    for axes in (times, bars):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def cases_of(records: Sequence[Record]) -> list[Key]:
    """In the order they were measured."""
    return list(dict.fromkeys((r["batch"], r["context"]) for r in records if r["record"] == "turn"))


def turns(records: Sequence[Record], case: Key, mode: str) -> dict[int, float]:
    """ms per token by repeat."""
    return {
        r["repeat"]: r["tpot_ms"]
        for r in records
        if r["record"] == "turn" and is_case(r, case) and r["mode"] == mode
    }


def ratio(records: Sequence[Record], case: Key, mode: str) -> Estimate:
    return paired_ratio(turns(records, case, "plan"), turns(records, case, mode))


def breakdown(records: Sequence[Record], case: Key) -> dict[tuple[str, str], float]:
    """ms per step by (part, role); nothing where the run was stopped before."""
    for r in records:
        if r["record"] == "breakdown" and is_case(r, case):
            return {tuple(key.split()): ms for key, ms in r["ms_per_step"].items()}  # type: ignore[misc]
    return {}
