"""Head routing in plain PyTorch: a few query heads score for all, chosen anew for every query.

Dims as in reference_select.py, and: C columns that a pass scores (positions of a history, or of a pool), E key heads

MISA routes a query to a few of an indexer's heads by statistics of blocks of keys. A plain checkpoint has neither a
trained router nor weights of heads, so a head is worth what it does on a small sample of the same keys:

Sample.   The forced columns (sinks and window) and every STRIDE-th of the others, beginning with the first.
Worth.    w_q = sum_j p_qj over the sampled columns that are not forced, p the head's softmax over the sample: the
          share of its attention that selection decides about. A head on sinks and neighbours is worth nothing.
Choice.   The n heads of a list with the largest worth; equal ones by the lower head.
Score.    The chosen heads' shares of the softmax over all columns, summed. With a residual, the c heads of a key head
          that were not chosen add c times the shares of their mean query (ResMiSA's fused term).
"""

from __future__ import annotations

import torch
from torch import Tensor

STRIDE = 16  # of the columns that are neither sink nor window


def sample(forced_C: Tensor) -> Tensor:
    """bool [..., C]: the columns on which heads are measured, of columns in ascending order."""
    rank_C = (~forced_C).cumsum(-1) - 1
    return forced_C | (rank_C % STRIDE == 0)


def worth(logits_QC: Tensor, forced_C: Tensor) -> Tensor:
    """[Q, ...], see above; `logits_QC` [Q, ..., C] of all columns, of which the sampled ones count."""
    shares = logits_QC.masked_fill(~sample(forced_C), -torch.inf).softmax(-1)
    return shares.masked_fill(forced_C, 0).sum(-1)


def choose(worth_Q: Tensor, num_chosen: int) -> Tensor:
    """bool [Q, ...] of one list: the most worthy heads."""
    best = worth_Q.sort(dim=0, descending=True, stable=True).indices[:num_chosen]
    return torch.zeros_like(worth_Q, dtype=torch.bool).scatter_(0, best, True)


def routed_scores(
    q_QD: Tensor, k_CED: Tensor, chosen_Q: Tensor, bias_C: Tensor | None, *, scale: float, residual: bool
) -> Tensor:
    """[C] of one list: its chosen heads and their residual. Query head q belongs to key head q // (Q / E)."""
    group = q_QD.shape[0] // k_CED.shape[1]
    total = q_QD.new_zeros(k_CED.shape[0])

    def shares(query_D: Tensor, head: int) -> Tensor:
        logits_C = k_CED[:, head] @ query_D * scale
        return (logits_C if bias_C is None else logits_C + bias_C).softmax(-1)

    for head in range(k_CED.shape[1]):
        mine = slice(head * group, (head + 1) * group)
        for query_D in q_QD[mine][chosen_Q[mine]]:
            total += shares(query_D, head)
        left = q_QD[mine][~chosen_Q[mine]]
        if residual and len(left):
            total += len(left) * shares(left.mean(0), head)
    return total
