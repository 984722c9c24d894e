"""Counters of what the extension did: Prometheus series beside SGLang's own, and a plain snapshot."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from .types import Usage

PREFIX = "sglang:blockreuse_"
# name -> (help, labels); a test freezes this table
SERIES: dict[str, tuple[str, tuple[str, ...]]] = {
    "tokens_total": ("Prompt tokens by how their KV came to be.", ("kind",)),
    "requests_total": ("Requests by outcome: reused, or the reason why not.", ("outcome",)),
    "homes_total": ("Home sequences compiled.", ()),
    "home_tokens_total": ("Tokens of compiled home sequences.", ()),
    "home_wait_seconds_total": ("Seconds that requests stood behind the homes of their blocks.", ()),
    "blocks_total": (
        "Blocks behind exact prefixes, as admission found them: whole, part or none of it was cached.",
        ("found",),
    ),
    "rows_total": ("Virtual rows run in prefill forwards.", ()),
    "copied_tokens_total": ("Tokens whose KV was taken over from a home.", ()),
    "copy_seconds_total": ("Host seconds spent on taking KV over.", ()),
    "tier_tokens_total": (
        "Tokens of homes by where they lay: taken over from the device or from host memory, or fetched from storage.",
        ("tier",),
    ),
    "host_copy_seconds_total": ("Of copy_seconds_total: for homes in host memory.", ()),
    "path_tokens_total": ("Tokens taken over from local paths of earlier turns.", ()),
    "probes_total": ("Requests measured before their prefill, by what was measured.", ("kind",)),
    "probe_seconds_total": ("Host seconds spent on probes.", ()),
    "guard_total": ("Requests that the guard judged, by verdict.", ("verdict",)),
    "decode_rows_total": ("Rows of decode steps under a sparse layer plan: sparse, or why dense.", ("kind",)),
    "decode_tokens_total": ("Token reads of sparse rows, summed over layers, by what reads them.", ("kind",)),
    "repair_rows_total": (
        "Tokens that repaired reused blocks under a plan with `prefill: sparse`: sparse, or short and so dense.",
        ("kind",),
    ),
    "decode_own_scans_total": ("Scans by consumers whose shared state was stale.", ("role",)),
    "decode_staleness_total": (
        "How old shared state was when it was used, summed over sparse rows: layers to the anchor, summed over its "
        "consumers; steps since the scan, summed over full layers.",
        ("axis",),
    ),
    "decode_seconds_total": (
        "Seconds of decode steps under a sparse plan, by part and role of the layer; only with layers.timing.",
        ("part", "role"),
    ),
    "decode_stale_keys_total": ("Index keys found to be of other keys than the pool's, and mended.", ()),
    "errors_total": ("Requests served without reuse because of an internal error.", ()),
}


class Metrics:
    """Counts in plain integers; mirrors them to Prometheus where SGLang exports metrics."""

    def __init__(self, labels: dict[str, Any] | None = None) -> None:
        self.counts: dict[str, float] = defaultdict(int)
        # called before counts are looked at, for what is counted elsewhere
        self.sources: list[Callable[[], None]] = []
        self._labels = labels or {}
        self._series: dict[str, Any] = {}
        # SGLang sets the variable before its first import of prometheus_client, and so must we
        if labels is not None and os.environ.get("PROMETHEUS_MULTIPROC_DIR"):
            from prometheus_client import Counter as PrometheusCounter

            self._series = {
                name: PrometheusCounter(PREFIX + name, text, labelnames=(*self._labels, *extra))
                for name, (text, extra) in SERIES.items()
            }

    def snapshot(self) -> dict[str, float]:
        """All counts up to now; may wait for a device."""
        for report in self.sources:
            report()
        return dict(self.counts)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        self.counts[" ".join((name, *labels.values()))] += amount
        if name in self._series:
            series = self._series[name]
            series = series.labels(**self._labels, **labels) if self._labels or labels else series
            series.inc(amount)

    def forward(self, *, num_rows: int, num_copied: int) -> None:
        self.add("rows_total", num_rows)
        self.add("copied_tokens_total", num_copied)

    def request_done(self, usage: Usage, found_blocks: Iterable[str] = ()) -> None:
        """found_blocks: for each block that was looked up, how much of it was found."""
        self.add("requests_total", outcome=usage.skipped_reason or "reused")
        for kind in ("prefix", "reused", "repaired", "fresh"):
            self.add("tokens_total", getattr(usage, f"{kind}_tokens"), kind=kind)
        on_host = usage.host_tokens
        tiers = {"device": usage.reused_tokens - on_host, "host": on_host, "storage": usage.storage_tokens}
        for tier, num_tokens in tiers.items():
            if num_tokens:
                self.add("tier_tokens_total", num_tokens, tier=tier)
        for found in found_blocks:
            self.add("blocks_total", found=found)
