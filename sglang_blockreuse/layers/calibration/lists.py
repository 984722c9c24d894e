"""Lists of positions as rows of a case read them, of one length or of several.

Dims as in case.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Lists(NamedTuple):
    """One list per row for all heads, [R, K], or one per row and query head, [Q, R, K]."""

    at: Tensor  # int64 positions, no position twice in a list
    kept: Tensor | None = None  # bool, which of them are in the list; all of them where a count decides

    def weights(self, logits_QRJ: Tensor) -> Tensor:
        """[Q, R, J]: the softmax over each list, 0 elsewhere."""
        num_heads = logits_QRJ.shape[0]
        at = self.at.expand(num_heads, -1, -1)
        listed = logits_QRJ.gather(-1, at)
        if self.kept is not None:
            listed = listed.masked_fill(~self.kept.expand(num_heads, -1, -1), -torch.inf)
        return torch.zeros_like(logits_QRJ).scatter_(-1, at, listed.softmax(-1))

    def mask(self, logits_QRJ: Tensor) -> Tensor:
        """bool [Q, R, J]: what is listed."""
        at = self.at.expand(len(logits_QRJ), -1, -1)
        kept = torch.ones_like(at, dtype=torch.bool) if self.kept is None else self.kept.expand_as(at)
        return torch.zeros_like(logits_QRJ, dtype=torch.bool).scatter_(-1, at, kept)

    @classmethod
    def of_rows(cls, parts: Sequence[Lists]) -> Lists:
        """Lists of the rows of every part, one after the other."""
        kept = [part.kept for part in parts if part.kept is not None]
        return cls(torch.cat([part.at for part in parts], -2), torch.cat(kept, -2) if kept else None)

    def for_heads(self, num_heads: int) -> Lists:
        """Lists [H, R, K] of KV heads as those of their query heads."""
        group = num_heads // len(self.at)
        each = (None if x is None else x.repeat_interleave(group, 0) for x in self)
        return Lists(*each)  # type: ignore[arg-type]

    @property
    def mean_len(self) -> float:
        return float(self.at.shape[-1] if self.kept is None else self.kept.sum(-1).float().mean())


def least(share: float | None, num_queries: float) -> float | None:
    """What a score, the sum over the queries of a list, must exceed."""
    return None if share is None else share * num_queries


def listed(best: Tensor, scores: Tensor, columns_RM: Tensor | None, least: float | None) -> Lists:
    """The lists of columns `best` [..., R, K] of scores [..., R, M], which are infinite where a column is forced."""
    kept = None if least is None else scores.gather(-1, best) > least
    at = best if columns_RM is None else columns_RM.expand(*best.shape[:-1], -1).gather(-1, best)
    return Lists(at, kept)
