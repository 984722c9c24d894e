"""What calibration found, as JSON, as a page of Markdown and as two plots."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .ageing import DISTANCES, STEPS
from .followers import POOLS, Follower, worst_coverage
from .judge import Judged
from .overlap import MEASURES, Overlap
from .replay import Replay
from .search import Found

SHOWN_DISTANCES = 6


@dataclass
class Report:
    model: str
    options: Mapping[str, Any]
    environment: Mapping[str, Any]
    judged: list[Judged]
    texts: str = "Held-out texts"  # what they were judged on
    history: list[Found] = field(default_factory=list)
    overlap: Overlap | None = None
    replays: dict[str, Replay] = field(default_factory=dict)
    followers: dict[str, list[Follower]] = field(default_factory=dict)
    ageing: dict[int, list[list[float]]] = field(default_factory=dict)  # by final_k

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
            "ageing": {
                final_k: {"distances": DISTANCES, "steps": STEPS, "recall": table}
                for final_k, table in self.ageing.items()
            },
            "lists": {name: [vars(layer) for layer in layers] for name, layers in self.followers.items()},
        }

    def to_markdown(self) -> str:
        lines = [f"# Layer plans for {self.model}", ""]
        lines += [f"{key}: {value}  " for key, value in self.options.items()]
        for k in sorted({judged.num_chosen for judged in self.judged}):
            lines += ["", f"## {self.texts}, k = {k}", "", *self._table(k)]
        for caveat in dict.fromkeys(judged.caveat for judged in self.judged):
            lines += ["", caveat] if caveat else []
        if self.overlap is not None:
            lines += [
                "",
                "## One layer's selection in another layer, dense decode",
                "",
                *self._overlap_table(),
            ]
        for name, layers in self.followers.items():
            if layers:
                lines += ["", f"## What layers read under {name}, dense inputs", "", *_list_table(layers)]
        for final_k, table in self.ageing.items():
            if table:
                what = (
                    f"## Recall of a list by layers from its choice and steps since it, final_k = {final_k}"
                )
                lines += ["", what, "", *_ageing_table(table)]
        for name, replay in self.replays.items():
            lines += ["", f"## Errors of {name}: the layers' own, and what reaches the layer's output", ""]
            lines += ["layers | own miss | total", "--- | --- | ---"]
            for first in range(0, len(replay.direct), 5):
                own, total = (part[first : first + 5] for part in (replay.direct, replay.total))
                last = first + len(own) - 1
                lines.append(f"{first}-{last} | {sum(own) / len(own):.4f} | {sum(total) / len(total):.4f}")
        if self.history:
            lines += ["", "## Search", "", "full | KL | worst kind | pattern", "--- | --- | --- | ---"]
            lines += [
                f"{f.num_full} | {f.kl:.4f} | {f.worst} {f.worst_kl:.4f} | `{f.pattern}`"
                for f in self.history
            ]
        return "\n".join([*lines, "", f"Made with {json.dumps(dict(self.environment))}.", ""])

    def _table(self, k: int) -> list[str]:
        shown = [judged for judged in self.judged if judged.num_chosen == k]
        kinds = list(shown[0].by_kind)
        head = [
            "plan",
            "scorer",
            "full",
            "pool",
            "bytes / dense",
            "KL",
            "95 %",
            "NLL - dense",
            "KL p95",
            "same top-1",
        ]
        head += [f"{what} {kind}" for what in ("KL", "NLL") for kind in kinds]
        lines = [" | ".join(head), " | ".join(["---"] * len(head))]
        for judged in shown:
            row, total, (low, high) = judged.row(), judged.total, judged.interval
            cells = [judged.name, row["scorer"], row["num_full"], row["pool_size"] or "-"]
            cells += [f"{judged.byte_ratio:.3f}"]
            cells += [f"{total.kl:.4f}", f"{low:.4f} to {high:.4f}", f"{total.nll:+.4f}"]
            cells += [f"{total.kl_p95:.3f}", f"{total.agreement:.3f}"]
            cells += [f"{judged.by_kind[kind].kl:.4f}" for kind in kinds]
            cells += [f"{judged.by_kind[kind].nll:+.4f}" for kind in kinds]
            lines.append(" | ".join(map(str, cells)))
        rows = f"{len(shown[0].total.kl_R)} rows"
        return [*lines, "", f"{rows}; the interval is a bootstrap over texts."]

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
        for final_k, table in self.ageing.items():
            if table:
                self._plot_ageing(folder / f"ageing-{final_k}.png", table)

    def _plot_loss(self, file: Path) -> None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
        names = list(dict.fromkeys(judged.name for judged in self.judged))
        for number, name in enumerate(names):
            points = [(judged.byte_ratio, judged.total.kl) for judged in self.judged if judged.name == name]
            line, mark = ("-", "o") if number < len(pyplot.cm.tab10.colors) else ("--", "s")
            axes.plot(*zip(*sorted(points), strict=True), line, marker=mark, label=name)
        axes.legend(fontsize="x-small")
        axes.set(
            xlabel="bytes of a decode step / dense", ylabel="KL to dense, nats", xscale="log", yscale="log"
        )
        figure.savefig(file, dpi=150)
        pyplot.close(figure)

    @staticmethod
    def _plot_ageing(file: Path, table: list[list[float]]) -> None:
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(5.5, 4.5), layout="constrained")
        image = axes.imshow(table, vmin=0.0, vmax=1.0)
        axes.set_xticks(range(len(STEPS)), STEPS)
        axes.set_yticks(range(len(DISTANCES)), DISTANCES)
        axes.set(xlabel="steps since the choice", ylabel="layers from the choice")
        figure.colorbar(image, label="recall")
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


def _ageing_table(table: list[list[float]]) -> list[str]:
    head = ["layers", *(f"{steps} steps" for steps in STEPS)]
    lines = [" | ".join(head), " | ".join(["---"] * len(head))]
    for distance, row in zip(DISTANCES, table, strict=True):
        lines.append(
            " | ".join([str(distance), *("-" if value != value else f"{value:.3f}" for value in row)])
        )
    return [
        *lines,
        "",
        "Without sinks and window. Along the first row and column one age grows, elsewhere both do.",
    ]


def _list_table(layers: list[Follower]) -> list[str]:
    head = "layer | role | from | Jaccard | recall | C | mass | worst head | its 5 % | rho, median | rho, 95 % | proven"
    lines = [head, " | ".join(["---"] * (head.count("|") + 1))]
    for at in layers:
        rho = ("-", "-") if at.rho is None else tuple(f"{value:.1f}" for value in at.rho)
        cells = [at.layer, at.role, "-" if at.anchor is None else at.anchor]
        cells += [
            f"{at.jaccard:.3f}",
            f"{at.recall:.3f}",
            "-" if at.coverage is None else f"{at.coverage:.3f}",
        ]
        cells += [f"{at.mass:.3f}", f"{at.mass_by_head[at.worst_head]:.3f} ({at.worst_head})"]
        cells += [
            f"{at.low_by_head[at.worst_head]:.3f}",
            *rho,
            "-" if at.stable is None else f"{at.stable:.3f}",
        ]
        lines.append(" | ".join(map(str, cells)))
    ties = sum(at.num_ties for at in layers)
    by_pool = zip(POOLS, worst_coverage(layers), strict=False)
    pools = ", ".join(f"{times} x final_k: {worst:.3f}" for times, worst in by_pool)
    return [
        *lines,
        "",
        "Jaccard and recall are of the list and the layer's own best by exact keys, C of its anchor's pool; mass is",
        "over each head's own best positions of the same number. Below a rho of 1 the list is proven to be the layer's",
        f"own (in a pool: to lie inside it). {ties} rows and layers are ties at that border.",
        *(["", f"C of the worst layer, were pools so large: {pools}."] if pools else []),
    ]
