"""What calibration found, as JSON, as a page of Markdown and as two plots."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..plan import BoundPlan
from ..plan_explain import KVShape, explain
from .case import Case, Figures
from .overlap import MEASURES, Overlap
from .pattern import pattern_of
from .replay import Replay
from .search import Found

SHOWN_DISTANCES = 6


@dataclass(frozen=True)
class Judged:
    """A plan on held-out texts."""

    name: str
    plan: BoundPlan
    total: Figures
    by_kind: dict[str, Figures]
    byte_ratio: float  # bytes of a decode step over those of dense decode

    def row(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "pattern": pattern_of(self.plan),
            "num_full": sum(layer.role == "full" for layer in self.plan.layers),
            "byte_ratio": round(self.byte_ratio, 4),
            **_numbers(self.total),
            "kl_by_kind": {kind: round(figures.kl, 5) for kind, figures in self.by_kind.items()},
        }


def judge(name: str, plan: BoundPlan, cases: Sequence[Case], shape: KVShape, *, num_tokens: int) -> Judged:
    """Evaluate a plan on cases; bytes are those of a row with `num_tokens` of history."""
    parts = [(case.kind, case.figures(plan)) for case in cases]
    kinds = {kind: Figures.joined([f for name, f in parts if name == kind]) for kind, _ in parts}
    cost = explain(plan, shape, num_tokens=num_tokens, batch=1)
    return Judged(
        name, plan, Figures.joined([f for _, f in parts]), kinds, cost.total_bytes / cost.dense_bytes
    )


@dataclass
class Report:
    model: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    judged: list[Judged]
    history: list[Found] = field(default_factory=list)
    overlap: Overlap | None = None
    replays: dict[str, Replay] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        overlap = None
        if self.overlap is not None:
            overlap = {
                "num_rows": self.overlap.num_rows,
                "num_ties": self.overlap.num_ties,
                "by_distance": {name: self.overlap.by_distance(name) for name in MEASURES},
                "by_kind": {
                    kind: {name: part.by_distance(name) for name in MEASURES}
                    for kind, part in self.overlap.by_kind.items()
                },
                "mass": self.overlap.tables["mass"].nan_to_num(-1).tolist(),
            }
        return {
            "model": self.model,
            "options": dict(self.options),
            "environment": dict(self.environment),
            "held_out": [judged.row() for judged in self.judged],
            "search": [vars(found) for found in self.history],
            "overlap": overlap,
            "replay": {name: vars(replay) for name, replay in self.replays.items()},
        }

    def to_markdown(self) -> str:
        lines = [f"# Layer plans for {self.model}", ""]
        lines += [f"{key}: {value}  " for key, value in self.options.items()]
        lines += ["", "## Held-out texts", "", *self._table()]
        if self.overlap is not None:
            lines += [
                "",
                "## One layer's selection in another layer, dense decode",
                "",
                *self._overlap_table(),
            ]
        for name, replay in self.replays.items():
            lines += ["", f"## Errors of {name}: the layers' own, and what reaches the layer's output", ""]
            lines += ["layers | own miss | total", "--- | --- | ---"]
            for first in range(0, len(replay.direct), 5):
                own, total = (part[first : first + 5] for part in (replay.direct, replay.total))
                last = first + len(own) - 1
                lines.append(f"{first}-{last} | {sum(own) / len(own):.4f} | {sum(total) / len(total):.4f}")
        if self.history:
            lines += ["", "## Search", "", "full | KL | pattern", "--- | --- | ---"]
            lines += [f"{f.num_full} | {f.kl:.4f} | `{f.pattern}`" for f in self.history]
        return "\n".join([*lines, "", f"Made with {json.dumps(dict(self.environment))}.", ""])

    def _table(self) -> list[str]:
        kinds = list(self.judged[0].by_kind) if self.judged else []
        head = [
            "plan",
            "full",
            "bytes / dense",
            "KL",
            "NLL - dense",
            "KL p95",
            "same top-1",
            *(f"KL {k}" for k in kinds),
        ]
        lines = [" | ".join(head), " | ".join(["---"] * len(head))]
        for judged in self.judged:
            row, total = judged.row(), judged.total
            cells = [
                judged.name,
                row["num_full"],
                f"{judged.byte_ratio:.3f}",
                f"{total.kl:.4f}",
                f"{total.nll:+.4f}",
            ]
            cells += [f"{total.kl_p95:.3f}", f"{total.agreement:.3f}"]
            lines.append(" | ".join(map(str, [*cells, *(f"{judged.by_kind[k].kl:.4f}" for k in kinds)])))
        return lines

    def _overlap_table(self) -> list[str]:
        assert self.overlap is not None
        head = ["measure", *(f"distance {d}" for d in range(SHOWN_DISTANCES))]
        lines = [" | ".join(head), " | ".join(["---"] * len(head))]
        for name in MEASURES:
            values = self.overlap.by_distance(name)[:SHOWN_DISTANCES]
            lines.append(" | ".join([name, *(f"{value:.3f}" for value in values)]))
        return [
            *lines,
            "",
            f"{self.overlap.num_rows} rows, {self.overlap.num_ties} ties at a selection's border.",
        ]

    def write(self, folder: Path) -> None:
        """report.json, report.md and, where matplotlib is installed, overlap.png and loss.png."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "report.json").write_text(json.dumps(self.to_dict(), indent=1) + "\n")
        (folder / "report.md").write_text(self.to_markdown())
        try:
            import matplotlib
        except ImportError:
            return
        matplotlib.use("Agg")
        self._plot_loss(folder / "loss.png")
        if self.overlap is not None:
            self._plot_overlap(folder / "overlap.png")

    def _plot_loss(self, file: Path) -> None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        for judged in self.judged:
            axes.plot(judged.byte_ratio, judged.total.kl, "o")
            axes.annotate(
                judged.name, (judged.byte_ratio, judged.total.kl), xytext=(4, 4), textcoords="offset points"
            )
        axes.set(xlabel="bytes of a decode step / dense", ylabel="KL to dense, nats", yscale="log")
        figure.savefig(file, dpi=150)
        pyplot.close(figure)

    def _plot_overlap(self, file: Path) -> None:
        from matplotlib import pyplot

        assert self.overlap is not None
        figure, axes = pyplot.subplots(figsize=(5.5, 4.5), layout="constrained")
        image = axes.imshow(self.overlap.tables["mass"], vmin=0.5, vmax=1.0)
        axes.set(xlabel="layer that attends", ylabel="layer that selected")
        figure.colorbar(image, label="softmax mass on the selection")
        figure.savefig(file, dpi=150)
        pyplot.close(figure)


def _numbers(figures: Figures) -> dict[str, float]:
    names = ("kl", "nll", "kl_p95", "agreement")
    return {name: round(float(getattr(figures, name)), 5) for name in names}
