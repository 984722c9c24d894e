"""What `sglang-blockreuse top` shows: two scrapes of a server reduced to the lines of one table."""

from __future__ import annotations

import dataclasses
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import requests

from .metrics import PREFIX

POOL_OWNERS = ("free", "evictable", "protected", "size")
HOST_OWNERS = ("host_free", "host_size")  # where the server has a host memory pool
QUANTILES = (0.5, 0.95)
TIMEOUT_S = 30.0
# title -> SGLang's own histograms, seconds
LATENCIES = {
    "TTFT": "sglang:time_to_first_token_seconds",
    "TPOT": "sglang:request_time_per_output_token_seconds",
    "between tokens": "sglang:inter_token_latency_seconds",
}
GAUGES = {
    "running": "sglang:num_running_reqs",
    "queued": "sglang:num_queue_reqs",
}

Labels = frozenset[tuple[str, str]]


class TopError(RuntimeError):
    """The server cannot be watched; the message says what to do."""


@dataclass(frozen=True)
class Scrape:
    """One look at a server."""

    at_s: float  # monotonic
    series: Mapping[str, Mapping[Labels, float]]  # sample name -> labels -> value
    pool: Mapping[str, int]  # POOL_OWNERS and HOST_OWNERS -> slots, summed over data-parallel ranks

    def total(self, name: str, **labels: str) -> float:
        """Sum over the samples of `name` that carry these labels; 0 where there are none."""
        wanted = set(labels.items())
        return sum(value for key, value in self.series.get(name, {}).items() if wanted <= key)

    def by_label(self, name: str, label: str) -> dict[str, float]:
        """Sums per value of one label."""
        sums: dict[str, float] = defaultdict(float)
        for key, value in self.series.get(name, {}).items():
            sums[dict(key).get(label, "")] += value
        return dict(sums)


@dataclass(frozen=True)
class Line:
    """One line of the table; None where there is nothing to say."""

    group: str
    name: str
    total: float | None = None  # since the server started
    now: float | None = None  # per second since the last look; of a latency, its value since then
    share: float | None = None  # of the group, 0..1
    unit: str = ""  # ms for a latency


def scrape(url: str, *, api_key: str | None = None) -> Scrape:
    """Read /metrics and /server_info. Raises TopError."""
    from prometheus_client.parser import text_string_to_metric_families

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    info = _get(url, "/server_info", headers).json()
    states = [s["blockreuse"]["pool"] for s in info.get("internal_states", []) if "blockreuse" in s]
    if not states:
        raise TopError(
            f"{url} is an SGLang server without block reuse. Start it with `sglang-blockreuse serve`, or with "
            "--radix-cache-backend blockreuse --attention-backend blockreuse."
        )
    if not info.get("enable_metrics"):
        raise TopError(f"{url} exports no metrics. Start the server with --enable-metrics.")
    series: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(_get(url, "/metrics", headers).text):
        for sample in family.samples:
            series[sample.name][frozenset(sample.labels.items())] = sample.value
    owners = [owner for owner in (*POOL_OWNERS, *HOST_OWNERS) if owner in states[0]]
    pool = {owner: sum(int(state[owner]) for state in states) for owner in owners}
    return Scrape(time.monotonic(), series, pool)


def _get(url: str, path: str, headers: Mapping[str, str]) -> requests.Response:
    try:
        response = requests.get(url + path, headers=headers, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise TopError(
            f"{url} is not reachable ({type(error).__name__}). Give --url the address that the server prints when it "
            "is ready, for example http://localhost:30000."
        ) from None
    if response.status_code in (401, 403):
        raise TopError(f"{url}{path} answers {response.status_code}. Give --api-key the key of the server.")
    if not response.ok:
        raise TopError(
            f"{url}{path} answers {response.status_code}. Is it SGLang, started with --enable-metrics?"
        )
    return response


def lines(now: Scrape, before: Scrape | None = None) -> Iterator[Line]:
    """The table, top to bottom; `now` is of the time since `before`, where that is given."""
    for title, gauge in GAUGES.items():
        yield Line("requests", title, total=now.total(gauge))
    yield from _counted("requests", "requests_total", "outcome", now, before)
    yield from _counted("prompt tokens", "tokens_total", "kind", now, before, shares=True)
    yield from _counted("block lookups", "blocks_total", "found", now, before, shares=True)
    for title, name in (("homes", "homes_total"), ("tokens of homes", "home_tokens_total")):
        yield _line("compile", title, name, now, before)
    yield _line("compile", "seconds waited", "home_wait_seconds_total", now, before)
    yield from _counted("homes by tier", "tier_tokens_total", "tier", now, before, shares=True)
    yield from _counted("guard", "guard_total", "verdict", now, before, shares=True)
    yield from _counted("decode rows", "decode_rows_total", "kind", now, before, shares=True)
    yield from _counted("faults", "decode_own_scans_total", "role", now, before, prefix="own scans, ")
    yield _line("faults", "internal errors", "errors_total", now, before)
    yield from _pool(now.pool)
    for title, name in LATENCIES.items():
        yield from _latency(title, name, now, before)


def _pool(pool: Mapping[str, int]) -> Iterator[Line]:
    """Slots by owner: what the tree and the allocator do not have belongs to running requests."""
    *parts, whole = POOL_OWNERS
    size = pool[whole]
    owners = {owner: pool[owner] for owner in parts}
    owners |= {"running requests": size - sum(owners.values()), whole: size}
    for owner, num in owners.items():
        yield Line("KV pool", owner, total=num, share=num / size if size else None)
    if "host_size" in pool:
        used, size = pool["host_size"] - pool["host_free"], pool["host_size"]
        for title, num in (("exact KV", used), ("free", pool["host_free"]), ("size", size)):
            yield Line("host memory", title, total=num, share=num / size)


def _line(group: str, title: str, name: str, now: Scrape, before: Scrape | None, **labels: str) -> Line:
    total = now.total(PREFIX + name, **labels)
    if before is None:
        return Line(group, title, total=total)
    rate = (total - before.total(PREFIX + name, **labels)) / (now.at_s - before.at_s)
    return Line(group, title, total=total, now=rate)


def _counted(
    group: str,
    name: str,
    label: str,
    now: Scrape,
    before: Scrape | None,
    *,
    shares: bool = False,
    prefix: str = "",
) -> Iterator[Line]:
    """One line per value of `label` that the server has counted."""
    counts = now.by_label(PREFIX + name, label)
    whole = sum(counts.values())
    for value in sorted(counts, key=lambda v: -counts[v]):
        line = _line(group, prefix + value, name, now, before, **{label: value})
        share = counts[value] / whole if shares and whole else None
        yield dataclasses.replace(line, share=share)


def _latency(title: str, name: str, now: Scrape, before: Scrape | None) -> Iterator[Line]:
    """Mean and quantiles of a histogram of seconds, in ms; None where nothing fell into it."""
    in_all, in_window = _summary(name, now, None), _summary(name, now, before) if before else {}
    for what in ("mean", *(f"p{100 * q:.0f}" for q in QUANTILES)):
        yield Line("latency", f"{title} {what}", total=in_all.get(what), now=in_window.get(what), unit="ms")


def _summary(name: str, now: Scrape, since: Scrape | None) -> dict[str, float]:
    count = now.total(f"{name}_count") - (since.total(f"{name}_count") if since else 0)
    if count <= 0:
        return {}
    whole = now.total(f"{name}_sum") - (since.total(f"{name}_sum") if since else 0)
    buckets = _buckets(name, now, since)
    quantiles = {f"p{100 * q:.0f}": 1000 * quantile(buckets, q) for q in QUANTILES}
    return {"mean": 1000 * whole / count, **quantiles}


def _buckets(name: str, now: Scrape, since: Scrape | None) -> list[tuple[float, float]]:
    """(upper bound, cumulative count), ascending."""
    counts = now.by_label(f"{name}_bucket", "le")
    earlier = since.by_label(f"{name}_bucket", "le") if since else {}
    return sorted((float(le), value - earlier.get(le, 0.0)) for le, value in counts.items())


def quantile(buckets: list[tuple[float, float]], q: float) -> float:
    """As Prometheus' histogram_quantile: linear inside the bucket; the last finite bound for what lies above it."""
    if not buckets or buckets[-1][1] <= 0:
        return math.nan
    rank, low, below = q * buckets[-1][1], 0.0, 0.0
    for bound, count in buckets:
        if count >= rank:
            if math.isinf(bound):
                return low
            return low + (bound - low) * (rank - below) / (count - below) if count > below else bound
        low, below = bound, count
    return low
