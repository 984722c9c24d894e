"""Faults of homes that outlive the pool: which tier a token lies on, what leaves first, whose KV storage holds."""

from __future__ import annotations

from faults import Fault

TIERS, EVICTION, STORAGE = (f"tests/unit/test_{name}.py" for name in ("home_tiers", "eviction", "storage"))

TIER_FAULTS = [
    Fault(
        "a part of a path begins at the host's first slot",
        "sglang_blockreuse/blocks/tiers.py",
        "self.host_T[max(0, first - num_device) : max(0, last - num_device)]",
        "self.host_T[: max(0, last - num_device)]",
        f"{TIERS} -k part_of_a_path",
    ),
    Fault(
        "the border between the tiers is off by the segment's start",
        "sglang_blockreuse/blocks/tiers.py",
        "state.plan.segments[index].interval.start + len(state.home_slots[index])",
        "len(state.home_slots[index])",
        f"{TIERS} -k belongs_to_one_tier",
    ),
    Fault(
        "what is repaired counts as taken from host memory",
        "sglang_blockreuse/blocks/tiers.py",
        "((copy.segment, copy.interval) for copy in state.plan.copies)",
        "((i, segment.interval) for i, segment in enumerate(state.plan.segments))",
        f"{TIERS} -k counted_without",
    ),
    Fault(
        "a fetched home counts as compiled",
        "sglang_blockreuse/blocks/compile.py",
        "flight.usage.compiled_tokens -= fetched",
        "flight.usage.compiled_tokens -= 0",
        f"{TIERS} -k storage_had",
    ),
    Fault(
        "a path ranks like a home",
        "sglang_blockreuse/eviction.py",
        "return priority if priority == SPECULATIVE or self._asked",
        "return priority if self._asked",
        f"{EVICTION} -k below_every_priority",
    ),
    Fault(
        "priorities of requests order what is to leave by last use",
        "sglang_blockreuse/eviction.py",
        'self._asked != "lru" else 0',
        'self._asked != "lru" else priority',
        f"{EVICTION} -k one_rank",
    ),
    Fault(
        "weights that change places keep their name",
        "sglang_blockreuse/storage.py",
        "weights_N = torch.arange(start, start + len(bits_N), device=flat.device) * 2 + 1",
        "weights_N = torch.ones_like(bits_N)",
        f"{STORAGE} -k change_places",
    ),
    Fault(
        "the host layout is no part of the name",
        "sglang_blockreuse/storage.py",
        "json.dumps([settings, str(kv_dtype), layout], sort_keys",
        "json.dumps([settings, str(kv_dtype)], sort_keys",
        f"{STORAGE} -k layout",
    ),
    Fault(
        "rotary tables are no part of the name",
        "sglang_blockreuse/storage.py",
        'n.endswith(("cos_sin_cache", "inv_freq"))',
        "False",
        f"{STORAGE} -k rotary_table",
    ),
]
