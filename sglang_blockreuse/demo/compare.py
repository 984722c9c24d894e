"""How far one server's next-token distributions are from another's."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from .client import Position


@dataclass(frozen=True)
class Agreement:
    """One prompt's answer on two servers, along the same forced tokens."""

    first_kl: float  # nats, distribution of the first answer token
    mean_kl: float  # nats, mean over the compared positions
    same_first_top: bool  # the most probable first token is the same
    top1: float  # share of compared positions with the same most probable token
    num_positions: int


def agreement(stock: Sequence[Position], ours: Sequence[Position]) -> Agreement:
    """Compare position by position; `ours` must hold every token that `stock` holds."""
    kls = [kl_divergence(p, q) for p, q in zip(stock, ours, strict=True)]
    same = [p.top == q.top for p, q in zip(stock, ours, strict=True)]
    return Agreement(
        first_kl=kls[0],
        mean_kl=statistics.fmean(kls),
        same_first_top=same[0],
        top1=statistics.fmean(same),
        num_positions=len(kls),
    )


def kl_divergence(reference: Position, other: Position) -> float:
    """KL(reference ‖ other) in nats over the reference's tokens, with all other tokens as one event.

    Merging events never raises a KL divergence, so this is a lower bound of the full one; with the 50 most
    probable tokens the merged rest is small.

    Raises:
        ValueError: `other` lacks a token of `reference`.
    """
    missing = reference.logprobs.keys() - other.logprobs.keys()
    if missing:
        raise ValueError(
            f"no probability for {len(missing)} of {len(reference.logprobs)} tokens, e.g. {min(missing)}"
        )
    total, rest_p, rest_q = 0.0, 1.0, 1.0
    for token, log_p in reference.logprobs.items():
        log_q = other.logprobs[token]
        total += math.exp(log_p) * (log_p - log_q)
        rest_p -= math.exp(log_p)
        rest_q -= math.exp(log_q)
    # rounding can leave a rest a little below zero
    rest_p, rest_q = max(rest_p, 0.0), max(rest_q, 1e-12)
    if rest_p > 0.0:
        total += rest_p * math.log(rest_p / rest_q)
    return max(total, 0.0)
