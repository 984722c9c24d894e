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
        """k, positions a row reads besides sinks and window; where a threshold decides, the mean over rows."""
        selection = self.plan.selection
        if selection is None:
            return 0
        size = round(self.mean_len) if selection.share else selection.final_k
        return size - selection.sink - selection.window

    @property
    def mean_len(self) -> float:
        """Positions of a list, the mean over rows and over layers that select."""
        found = [mean for mean in self.total.listed_L if mean]
        return sum(found) / max(1, len(found))

    @property
    def worst(self) -> str:
        return max(self.by_kind, key=lambda kind: self.by_kind[kind].kl)

    @property
    def caveat(self) -> str | None:
        """Why no figure of this plan makes it lossless, where its layers read KV that they were not trained on."""
        if not self.plan.shared_layers or self.plan.trained_sharing:
            return None
        return (
            f"{self.name} is not lossless, whatever its figures: layers {list(self.plan.shared_layers)} read another "
            "layer's KV (kv_from), in prefill too, and the checkpoint was not trained for it. The figures say what "
            "that costs on these texts."
        )

    def row(self) -> dict[str, Any]:
        pattern = pattern_of(self.plan)
        return {
            "name": self.name,
            "fingerprint": self.plan.fingerprint,
            "scorer": described(self.plan),
            "k": self.num_chosen,
            "mean_len": round(self.mean_len, 2),
            "pool_size": self.plan.selection.pool_size if self.plan.selection else None,
            "pattern": pattern,
            "lossless": self.plan.is_lossless,
            "shared_layers": list(self.plan.shared_layers),
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
    if selection is not None and selection.share is not None:
        words.append(f"shares above {selection.share:g}")
    if plan.tail_layers:
        selecting = sum(layer.role != "dense" and layer.attend == "selected" for layer in plan.layers)
        some = "" if len(plan.tail_layers) == selecting else f" in {len(plan.tail_layers)} layers"
        words.append(f"block means for the rest{some}")
    if selection is not None and selection.refresh_every > 1:
        words.append(f"every {selection.refresh_every} steps")
    return ", ".join(words)


def judge(name: str, plan: BoundPlan, cases: Sequence[Case], shape: KVShape, *, num_tokens: int) -> Judged:
    """Evaluate a plan on cases; bytes are those of a row with `num_tokens` of history, with lists as long as on the
    cases where a threshold decides. Raises as `evaluate` does."""
    parts = evaluate(cases, plan)
    total = Figures.joined(parts)
    listed = total.listed_L if plan.selection and plan.selection.share else None
    cost = explain(plan, shape, num_tokens=num_tokens, batch=1, listed=listed)
    return Judged(
        name,
        plan,
        total,
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
    """The plan with k = `num_chosen` positions besides sinks and window; its pool keeps its multiple of k.

    Raises ValueError for a plan whose lists a threshold makes as long as they are.
    """
    old = plan.selection
    if old is None:
        return plan
    if old.share is not None:
        raise ValueError(
            f"plan {plan.name} lists what exceeds a share ({old.share:g}), so it has no k to change"
        )
    forced = old.sink + old.window
    pool = old.pool_size and forced + round((old.pool_size - forced) * num_chosen / (old.final_k - forced))
    selection: Selection = replace(old, final_k=forced + num_chosen, pool_size=pool)
    return replace(plan, selection=selection)


def _numbers(figures: Figures) -> dict[str, float]:
    return {name: float(getattr(figures, name)) for name in ("kl", "nll", "kl_p95", "agreement")}
