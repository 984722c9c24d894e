"""How well one layer's selection serves another, measured on dense decode: the tables behind a search.

Dims: A anchor layers, L layers, Q query heads, R rows, J keys, K selected and M pool positions

For every pair (a, l) with l - a at most MAX_DISTANCE, over all rows of all cases:

    jaccard, recall   of the selections as sets                                      (eq. 9 of the source)
    coverage C        share of l's selection inside a's pool                         (eq. 11)
    mass              share of l's softmax mass on a's selection, mean over heads
    pool_mass         the same on a's pool
    worst_head, p5    the lowest head's mean mass, and the 5th percentile of mass over rows
    stable            share of rows whose selection provably stays: 2 max|z_l - z_a| < margin of a at k; rows whose
                      margin is 0 are ties and are counted apart
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..plan import Selection
from .case import Case
from .measures import jaccard, margin, mask_of, recall, rho

MAX_DISTANCE = 12
MEASURES = ("jaccard", "recall", "coverage", "mass", "pool_mass", "worst_head", "p5", "stable")


@dataclass
class Overlap:
    """`tables[measure]` is [A, L], NaN where a pair was not measured."""

    tables: dict[str, Tensor]
    num_rows: int
    num_ties: int  # rows and layers whose selection border is a tie
    by_kind: dict[str, Overlap] = field(default_factory=dict)

    def by_distance(self, measure: str) -> list[float]:
        """Mean over pairs at distance 0, 1, …"""
        table = self.tables[measure]
        diagonals = (table.diagonal(d) for d in range(min(MAX_DISTANCE, len(table) - 1) + 1))
        return [float(diagonal[~diagonal.isnan()].mean()) for diagonal in diagonals]

    def loss(self, follower: str) -> Tensor:
        """[A, L]: mass that layer l loses on a's selection (follower R) or a's pool (X), beyond its own selection's."""
        mass = self.tables["mass"]
        taken = mass if follower == "R" else torch.minimum(self.tables["pool_mass"], mass.diagonal()[None])
        return (mass.diagonal()[None] - taken).clamp_min(0)


def collect(cases: Sequence[Case], selection: Selection) -> Overlap:
    """Measure all cases; `by_kind` holds the same per kind of text."""
    parts = [(case.kind, _of_case(case, selection)) for case in cases]
    kinds = {kind: _mean([part for name, part in parts if name == kind]) for kind, _ in parts}
    total = _mean([part for _, part in parts])
    total.by_kind = kinds
    return total


def _mean(parts: Sequence[Overlap]) -> Overlap:
    num_rows = sum(part.num_rows for part in parts)
    tables = {
        name: sum((part.tables[name] * (part.num_rows / num_rows) for part in parts), torch.tensor(0.0))
        for name in MEASURES
    }
    return Overlap(tables, num_rows, sum(part.num_ties for part in parts))


def _of_case(case: Case, selection: Selection) -> Overlap:
    num_layers = case.model.num_layers
    tables = {name: torch.full((num_layers, num_layers), torch.nan) for name in MEASURES}
    recent: list[_Selected] = []
    num_ties = 0

    def watch(layer: int, logits_QRJ: Tensor) -> None:
        nonlocal num_ties
        shares_QRJ = logits_QRJ.softmax(-1)
        new = _Selected.of(layer, case, shares_QRJ.sum(0), selection)
        num_ties += int((new.margin_R == 0).sum())
        recent.append(new)
        if len(recent) > MAX_DISTANCE + 1:
            recent.pop(0)
        for anchor in recent:
            for name, value in anchor.serves(new, shares_QRJ).items():
                tables[name][anchor.layer, layer] = value

    case.log_probs(None, watch=watch)
    return Overlap(tables, case.num_rows, num_ties)


@dataclass
class _Selected:
    layer: int
    scores_RJ: Tensor  # of the keys that are not forced; 0 elsewhere
    indices_RK: Tensor
    chosen_RJ: Tensor  # bool
    pool_RM: Tensor
    pooled_RJ: Tensor
    margin_R: Tensor  # between the last score that was chosen and the first that was not

    @classmethod
    def of(cls, layer: int, case: Case, scores_RJ: Tensor, selection: Selection) -> _Selected:
        forced = case.forced(torch.arange(scores_RJ.shape[-1]), selection)
        ranked = scores_RJ.masked_fill(forced, torch.inf).masked_fill(case.future, -torch.inf)
        size = min(max(selection.pool_size or 0, selection.final_k) + 1, ranked.shape[-1])
        order = ranked.topk(size, -1).indices
        k, pool = selection.final_k, selection.pool_size or selection.final_k
        indices, wide = order[:, :k], order[:, :pool]
        return cls(
            layer,
            scores_RJ.masked_fill(forced, 0.0),
            indices,
            mask_of(indices, ranked.shape[-1]),
            wide,
            mask_of(wide, ranked.shape[-1]),
            margin(ranked, k, k),
        )

    def serves(self, other: _Selected, shares_QRJ: Tensor) -> dict[str, float]:
        num_heads = len(shares_QRJ)
        mass_QR = shares_QRJ.gather(-1, self.indices_RK.expand(num_heads, -1, -1)).sum(-1)
        pool_mass_QR = shares_QRJ.gather(-1, self.pool_RM.expand(num_heads, -1, -1)).sum(-1)
        rho_R = rho(self.scores_RJ, other.scores_RJ, self.margin_R)
        return {
            "jaccard": float(jaccard(self.chosen_RJ, other.chosen_RJ).mean()),
            "recall": float(recall(self.chosen_RJ, other.chosen_RJ).mean()),
            "coverage": float(recall(self.pooled_RJ, other.chosen_RJ).mean()),
            "mass": float(mass_QR.mean()),
            "pool_mass": float(pool_mass_QR.mean()),
            "worst_head": float(mass_QR.mean(1).min()),
            "p5": float(mass_QR.mean(0).quantile(0.05)),
            "stable": float((rho_R < 1).float().mean()),
        }
