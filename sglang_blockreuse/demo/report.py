"""Results as a record, a table and a figure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .client import Timed
from .compare import Agreement, agreement
from .measure import Pass, Workload

TOKEN_KINDS = ("prefix", "reused", "repaired", "fresh")
COLOURS = {
    "stock": "#9aa5b1",
    "ours": "#2364aa",
    "prefix": "#3da5d9",
    "reused": "#73bfb8",
    "repaired": "#fec601",
    "fresh": "#ea7317",
}


@dataclass(frozen=True)
class Row:
    """One measured prompt on both servers."""

    num_tokens: int
    documents: tuple[int, ...]
    question: str
    expected: str
    stock: Timed
    ours: Timed
    agreement: Agreement

    @property
    def ratio(self) -> float:
        return self.stock.ttft_ms / self.ours.ttft_ms

    @property
    def recompute_ratio(self) -> float:
        return float((self.ours.usage or {}).get("recompute_ratio", 0.0))

    def tokens(self, kind: str) -> int:
        return int((self.ours.usage or {}).get(f"{kind}_tokens", 0))


def _token_cell(kind: str, row: Row) -> str:
    return str(row.tokens(kind))


COLUMNS: dict[str, Callable[[Row], str]] = {
    "tokens": lambda row: str(row.num_tokens),
    "TTFT stock": lambda row: f"{row.stock.ttft_ms:.0f} ms",
    "ours": lambda row: f"{row.ours.ttft_ms:.0f} ms",
    "ratio": lambda row: f"{row.ratio:.1f}x",
    **{kind: partial(_token_cell, kind) for kind in TOKEN_KINDS},
    "|T|/N": lambda row: f"{row.recompute_ratio:.1%}",
    "KL first": lambda row: f"{row.agreement.first_kl:.4f}",
    "top-1": lambda row: "same" if row.agreement.same_first_top else "other",
    "TPOT stock": lambda row: f"{row.stock.tpot_ms:.1f} ms",
    "TPOT ours": lambda row: f"{row.ours.tpot_ms:.1f} ms",
}


def make_rows(work: Workload, stock: Pass, ours: Pass) -> list[Row]:
    return [
        Row(len(prompt.input_ids), prompt.documents, prompt.question, prompt.answer, s, o, agreement(p, q))
        for prompt, s, o, p, q in zip(
            work.measured, stock.timed, ours.timed, stock.scored, ours.scored, strict=True
        )
    ]


def nothing_reused(rows: Sequence[Row]) -> str | None:
    """The reason to call the run a failure: no prompt reused a token; None when all is well."""
    if any(row.tokens("reused") for row in rows):
        return None
    usages = [row.ours.usage for row in rows]
    if not any(usages):
        return "the server reports no meta_info.blockreuse: the extension is not active, see its log"
    reasons = sorted({str(usage.get("skipped_reason")) for usage in usages if usage})
    return f"no prompt reused a single token; skipped_reason: {', '.join(reasons)}"


def summarise(rows: Sequence[Row], stock: Pass, ours: Pass) -> dict[str, Any]:
    """The figures of the table, by name; times in milliseconds."""
    summary: dict[str, Any] = {"num_prompts": len(rows), "prompt_tokens": _median(r.num_tokens for r in rows)}
    for name, measured in (("stock", stock), ("ours", ours)):
        # the only warm-up prompt of which no document was known
        summary[f"ttft_{name}_first_sight_ms"] = measured.warm_up[0].ttft_ms
    if ours.bound is not None:
        summary["bound_computed_tokens"] = ours.bound.num_computed
        summary["ttft_bound_median_ms"] = _median(ours.bound.ttft_ms)
    for name, side in (("stock", [r.stock for r in rows]), ("ours", [r.ours for r in rows])):
        summary[f"ttft_{name}_median_ms"] = _median(t.ttft_ms for t in side)
        summary[f"ttft_{name}_p95_ms"] = _p95([t.ttft_ms for t in side])
        summary[f"tpot_{name}_median_ms"] = _median(t.tpot_ms for t in side)
        summary[f"cached_tokens_{name}_median"] = _median(t.cached_tokens for t in side)
        summary[f"answers_with_fact_{name}"] = sum(
            r.expected in t.answer for r, t in zip(rows, side, strict=True)
        )
    summary["ttft_ratio_median"] = _median(r.ratio for r in rows)
    summary["ttft_ratio_min"] = min(r.ratio for r in rows)
    if "ttft_bound_median_ms" in summary:
        summary["ttft_ours_over_bound"] = summary["ttft_ours_median_ms"] / summary["ttft_bound_median_ms"]
    for kind in TOKEN_KINDS:
        summary[f"{kind}_tokens_median"] = _median(r.tokens(kind) for r in rows)
    summary["recompute_ratio_max"] = max(
        float((r.ours.usage or {}).get("recompute_ratio", 0.0)) for r in rows
    )
    summary["first_kl_mean"] = statistics.fmean(r.agreement.first_kl for r in rows)
    summary["mean_kl"] = statistics.fmean(r.agreement.mean_kl for r in rows)
    summary["first_top1"] = statistics.fmean(r.agreement.same_first_top for r in rows)
    summary["top1"] = statistics.fmean(r.agreement.top1 for r in rows)
    summary["scored_positions"] = sum(r.agreement.num_positions for r in rows)
    return summary


def table(rows: Sequence[Row]) -> str:
    """One line per prompt, columns aligned to the right."""
    lines = [list(COLUMNS), *([column(row) for column in COLUMNS.values()] for row in rows)]
    widths = [max(map(len, cells)) for cells in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def plot(rows: Sequence[Row], path: Path, *, title: str, labels: dict[str, str]) -> None:
    """Two panels over the prompts: TTFT of both servers, and where our prompt tokens came from."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (times, tokens) = plt.subplots(2, 1, figsize=(9, 7), sharex=True, layout="constrained")
    numbers = range(1, len(rows) + 1)
    for shift, name in ((-0.2, "stock"), (0.2, "ours")):
        seconds = [getattr(row, name).ttft_ms / 1e3 for row in rows]
        bars = times.bar([n + shift for n in numbers], seconds, 0.38, color=COLOURS[name], label=labels[name])
        times.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    ratio = _median(row.ratio for row in rows)
    times.set(
        ylabel="time to first token (s)", title=f"{title}\nmedian TTFT ratio stock / ours: {ratio:.1f}×"
    )
    times.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, -0.22))
    bottom = [0] * len(rows)
    for kind in TOKEN_KINDS:
        counts = [row.tokens(kind) for row in rows]
        tokens.bar(numbers, counts, 0.7, bottom=bottom, color=COLOURS[kind], label=kind)
        bottom = [low + count for low, count in zip(bottom, counts, strict=True)]
    tokens.set(xlabel="prompt", ylabel="prompt tokens, ours", xticks=list(numbers))
    tokens.legend(frameon=False, ncols=len(TOKEN_KINDS), loc="lower center", bbox_to_anchor=(0.5, 1.0))
    for axis in (times, tokens):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def as_records(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The rows for results.json."""
    return [{**asdict(row), "ttft_ratio": row.ratio} for row in rows]


def summary_text(s: dict[str, Any]) -> str:
    """The summary in words."""
    count = s["num_prompts"]
    lines = [
        f"TTFT     stock {s['ttft_stock_median_ms']:.0f} ms (p95 {s['ttft_stock_p95_ms']:.0f}),"
        f" ours {s['ttft_ours_median_ms']:.0f} ms (p95 {s['ttft_ours_p95_ms']:.0f}),"
        f" ratio {s['ttft_ratio_median']:.1f}x (worst {s['ttft_ratio_min']:.1f}x)",
        f"         at first sight, before any document was known: stock {s['ttft_stock_first_sight_ms']:.0f} ms,"
        f" ours {s['ttft_ours_first_sight_ms']:.0f} ms",
        f"tokens   of {s['prompt_tokens']:.0f}: " + _token_summary(s),
        f"         |T|/N at most {s['recompute_ratio_max']:.1%}; the stock server found"
        f" {s['cached_tokens_stock_median']:.0f} tokens in its prefix cache",
        f"quality  first answer token: KL {s['first_kl_mean']:.4f} nats, top-1 the same in {s['first_top1']:.0%}",
        f"         {s['scored_positions']} answer tokens: KL {s['mean_kl']:.4f} nats,"
        f" top-1 the same in {s['top1']:.0%}",
        f"answers  with the asked fact: stock {s['answers_with_fact_stock']} of {count},"
        f" ours {s['answers_with_fact_ours']} of {count}",
        *_small_print(s),
        f"TPOT     stock {s['tpot_stock_median_ms']:.1f} ms, ours {s['tpot_ours_median_ms']:.1f} ms",
        "Times and tokens are medians over the prompts, KL and top-1 are means; KL is of ours from stock.",
    ]
    if "ttft_ours_over_bound" in s:
        bound = (
            f"bound    our server with the rest exactly cached and {s['bound_computed_tokens']} tokens to compute:"
            f" {s['ttft_bound_median_ms']:.0f} ms; ours takes {s['ttft_ours_over_bound']:.2f}x of that"
        )
        lines.insert(2, bound)
    return "\n".join(lines)


def _small_print(s: dict[str, Any]) -> list[str]:
    """Answers say little where the model misses most of them with a full prefill too."""
    if 2 * s["answers_with_fact_stock"] >= s["num_prompts"]:
        return []
    return ["         (this model misses most facts with a full prefill too: judge by KL and top-1)"]


def _token_summary(summary: dict[str, Any]) -> str:
    return ", ".join(f"{summary[f'{kind}_tokens_median']:.0f} {kind}" for kind in TOKEN_KINDS)


def _median(values: Any) -> float:
    return float(statistics.median(values))


def _p95(values: list[float]) -> float:
    """The smallest value that 95 % of the values do not exceed."""
    return sorted(values)[max(0, -(-len(values) * 95 // 100) - 1)]
