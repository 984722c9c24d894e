"""Statistics of the benchmarks: what stands between a measurement and a table. Plain Python, no host."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
NUM_RESAMPLES = 2000
MIN_CLUSTERS = 3  # an interval of fewer says nothing


@dataclass(frozen=True)
class Estimate:
    """A figure with its 95 % interval over the clusters it was measured on."""

    value: float
    low: float
    high: float
    num_clusters: int

    def text(self, *, scale: float = 1.0, digits: int = 0) -> str:
        """`value [low, high]`, or the value alone where there are too few clusters to draw from."""
        if self.num_clusters < MIN_CLUSTERS:
            return f"{scale * self.value:.{digits}f}"
        parts = (f"{scale * part:.{digits}f}" for part in (self.value, self.low, self.high))
        return "{} [{}, {}]".format(*parts)


def bootstrap(
    clusters: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    seed: int = 0,
    num: int = NUM_RESAMPLES,
) -> Estimate:
    """Percentile bootstrap: clusters (contexts, rounds) are drawn with replacement, never what is inside one.

    Raises:
        ValueError: there are no clusters.
    """
    if not clusters:
        raise ValueError("a bootstrap needs at least one cluster")
    rng = random.Random(seed)
    values = sorted(statistic(rng.choices(clusters, k=len(clusters))) for _ in range(num))
    return Estimate(
        statistic(clusters), values[int(0.025 * num)], values[min(num - 1, int(0.975 * num))], len(clusters)
    )


def gap_share(pairs: Sequence[tuple[float, float]]) -> float:
    """Share of the gap that a policy closes: 1 - KL / KL without repair, of (KL, baseline KL) per context.

    A ratio of sums, so that a context without a gap does not divide by zero. NaN where no context has one.
    """
    baseline = sum(base for _, base in pairs)
    return 1 - sum(kl for kl, _ in pairs) / baseline if baseline > 0 else float("nan")


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of the values do not exceed."""
    ordered = sorted(values)
    # a share such as 0.95 is a little more than its decimals
    return ordered[max(0, math.ceil(len(ordered) * share - 1e-9) - 1)]


def paired_ratio(numerators: Mapping[int, float], denominators: Mapping[int, float]) -> Estimate:
    """Median over the rounds that both have of numerator / denominator; the interval is over rounds.

    Raises:
        ValueError: no round has both.
    """
    rounds = sorted(numerators.keys() & denominators.keys())
    if not rounds:
        raise ValueError("no round measured both arms")
    return bootstrap([numerators[r] / denominators[r] for r in rounds], statistics.median)


def slope_per_hour(times_s: Sequence[float], values: Sequence[float]) -> float:
    """Least-squares slope of values over time, per hour."""
    slope, _ = statistics.linear_regression(times_s, values)
    return 3600 * slope
