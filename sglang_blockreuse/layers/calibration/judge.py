"""A plan's figures on texts: totals, kinds, bytes, and how far they would move with other texts."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from ..plan import BoundPlan, Selection
from ..plan_explain import KVShape, explain
from ..plan_support import MAPPED
from .case import Case, Figures, by_kind, evaluate
from .pattern import num_full, pattern_of

_NUM_RESAMPLES = 2000


@dataclass(frozen=True)
class Judged:
    """A plan on texts."""

    name: str
    plan: BoundPlan
    total: Figures
    by_kind: dict[str, Figures]
    interval: tuple[float, float]  # 95 % of the mean KL, over texts
    byte_ratio: float  # bytes of a decode step over those of dense decode

    @property
    def num_chosen(self) -> int:
        """k, positions a row reads besides sinks and window."""
        selection = self.plan.selection
        return selection.final_k - selection.sink - selection.window if selection else 0

    @property
    def worst(self) -> str:
        return max(self.by_kind, key=lambda kind: self.by_kind[kind].kl)

    def row(self) -> dict[str, Any]:
        pattern = pattern_of(self.plan)
        return {
            "name": self.name,
            "scorer": described(self.plan),
            "k": self.num_chosen,
            "pool_size": self.plan.selection.pool_size if self.plan.selection else None,
            "pattern": pattern,
            "num_full": num_full(pattern),
            "byte_ratio": round(self.byte_ratio, 4),
            **{name: round(value, 5) for name, value in _numbers(self.total).items()},
            "kl_interval": [round(value, 5) for value in self.interval],
            "num_rows": len(self.total.kl_R),
            "kl_by_kind": {kind: round(figures.kl, 5) for kind, figures in self.by_kind.items()},
            "nll_by_kind": {kind: round(figures.nll, 5) for kind, figures in self.by_kind.items()},
        }


def described(plan: BoundPlan) -> str:
    """What chose in this plan, in words: kind, heads, steps between scans."""
    scorer, selection = plan.scorer, plan.selection
    size = ""
    if scorer.kind == "page_minmax":
        size = f" of {scorer.tokens_per_page} tokens"
    elif scorer.kind in MAPPED:
        size = f" of {scorer.channels} channels"
    words = [scorer.kind + size]
    if scorer.heads == "kv_head":
        words.append("lists per KV head" + (", one lent for all" if scorer.lends == "layer" else ""))
    for what, heads in (("scan", scorer.scan_heads), ("rerank", scorer.rerank_heads)):
        if heads == "routed":
            residual = " and their residual" if scorer.residual else ""
            words.append(f"{what} by {scorer.num_routed_heads} routed heads{residual}")
        elif heads is not None and (heads != "all" or what == "rerank"):
            words.append(f"{what} by {heads} heads")
    if selection is not None and selection.refresh_every > 1:
        words.append(f"every {selection.refresh_every} steps")
    return ", ".join(words)


def judge(name: str, plan: BoundPlan, cases: Sequence[Case], shape: KVShape, *, num_tokens: int) -> Judged:
    """Evaluate a plan on cases; bytes are those of a row with `num_tokens` of history. Raises as `evaluate` does."""
    parts = evaluate(cases, plan)
    cost = explain(plan, shape, num_tokens=num_tokens, batch=1)
    return Judged(
        name,
        plan,
        Figures.joined(parts),
        by_kind(cases, parts),
        interval([part.kl for part in parts]),
        cost.total_bytes / cost.dense_bytes,
    )


def interval(means: Sequence[float]) -> tuple[float, float]:
    """95 % of the mean when texts are drawn anew from these, each with its rows (percentile bootstrap)."""
    rng = random.Random(0)
    drawn = sorted(sum(rng.choices(means, k=len(means))) / len(means) for _ in range(_NUM_RESAMPLES))
    return drawn[int(0.025 * _NUM_RESAMPLES)], drawn[int(0.975 * _NUM_RESAMPLES)]


def at_budget(plan: BoundPlan, num_chosen: int) -> BoundPlan:
    """The plan with k = `num_chosen` positions besides sinks and window; its pool keeps its multiple of k."""
    old = plan.selection
    if old is None:
        return plan
    forced = old.sink + old.window
    pool = old.pool_size and forced + round((old.pool_size - forced) * num_chosen / (old.final_k - forced))
    selection: Selection = replace(old, final_k=forced + num_chosen, pool_size=pool)
    return replace(plan, selection=selection)


def _numbers(figures: Figures) -> dict[str, float]:
    return {name: float(getattr(figures, name)) for name in ("kl", "nll", "kl_p95", "agreement")}
