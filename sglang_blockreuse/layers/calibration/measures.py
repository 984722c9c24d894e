"""How much one selection holds of what another layer, or a single head, would have chosen. Pure functions.

Dims: Q query heads, R rows, J keys; sets are bool [R, J]
"""

from __future__ import annotations

import torch
from torch import Tensor


def jaccard(one_RJ: Tensor, other_RJ: Tensor) -> Tensor:
    """[R]: common positions over all positions of the two sets (eq. 9)."""
    return (one_RJ & other_RJ).sum(-1) / (one_RJ | other_RJ).sum(-1)


def recall(held_RJ: Tensor, wanted_RJ: Tensor) -> Tensor:
    """[R]: share of the wanted positions that are held (eq. 9); of a pool's, its coverage C (eq. 11)."""
    return (held_RJ & wanted_RJ).sum(-1) / wanted_RJ.sum(-1)


def aged_recall(held_RJ: Tensor, wanted_RJ: Tensor, steps: int) -> Tensor:
    """[R - steps]: `recall` where what is held was chosen so many steps before; rows follow each other."""
    return recall(held_RJ[: len(held_RJ) - steps], wanted_RJ[steps:])


def mass_recall(shares_QRJ: Tensor, read_QRK: Tensor) -> Tensor:
    """[Q, R]: softmax mass that each head finds at the positions read, over that of its own best positions of the same
    number; 1 where a list is the head's own. `read_QRK` are distinct positions."""
    found_QR = shares_QRJ.gather(-1, read_QRK).sum(-1)
    return found_QR / shares_QRJ.topk(read_QRK.shape[-1], -1).values.sum(-1)


def margin(ranked_RJ: Tensor, wanted: int, kept: int) -> Tensor:
    """[R]: the last score of the best `wanted` over the first that is not among the best `kept` (at least `wanted`).

    With kept = wanted it is the border of a selection, with a pool's size the band that protects it. Infinite where
    everything is kept; `ranked_RJ` may hold infinities for what is always or never chosen.
    """
    if kept >= ranked_RJ.shape[-1]:
        return torch.full(ranked_RJ.shape[:1], torch.inf)
    best = ranked_RJ.topk(kept + 1, -1).values
    return best[:, wanted - 1] - best[:, kept]


def rho(one_RJ: Tensor, other_RJ: Tensor, margin_R: Tensor) -> Tensor:
    """[R]: 2 max|one - other| over the margin. Below 1 the second layer's best are provably kept; at 1 and beyond
    nothing is known. NaN for ties (a margin of 0), which have no bound."""
    moved_R = (one_RJ - other_RJ).abs().amax(-1)
    return torch.where(margin_R > 0, 2 * moved_R / margin_R, torch.nan)


def mask_of(positions_RK: Tensor, num_keys: int) -> Tensor:
    """Positions as a set, bool [R, J]."""
    empty = torch.zeros(len(positions_RK), num_keys, dtype=torch.bool)
    return empty.scatter_(-1, positions_RK, True)
