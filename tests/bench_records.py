"""Records as benchmarks write them, for tests of what is made of them."""

from __future__ import annotations


def usage(**values):
    return {
        "policy": "seam",
        "reused_tokens": 240,
        "repaired_tokens": 10,
        "prefix_tokens": 140,
        "skipped_reason": None,
        **values,
    }


def measurement(
    context="A/0", policy="seam", budget=0.05, *, kl=0.02, same=True, problem=None, homes="leading"
):
    return {
        "record": "measurement",
        "context": context,
        "category": context[0],
        "policy": policy,
        "budget": budget,
        "homes": homes,
        "forced": "oracle",
        "kl": [kl] * 8,
        "same_top": [same] * 8,
        "exact": None,
        "nll": 0.1,
        "usage": usage(recompute_ratio=budget),
        "problem": problem,
    }
