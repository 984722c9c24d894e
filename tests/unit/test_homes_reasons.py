"""Which homes are worth compiling, why a request reuses nothing, and marks that the host or nobody can read."""

from __future__ import annotations

import pytest
from home_requests import blocks_behind, homes_of

from sglang_blockreuse.blocks.request import RequestError, parse_options
from sglang_blockreuse.blocks.worth import why_nothing, worth_compiling
from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.types import BlockOptions, Interval


def options(spans, *, tau=None, budget=0.05, policy="seam"):
    return BlockOptions("reuse", tuple(spans), policy, tau, budget)


@pytest.mark.parametrize("policy", ["seam", "head", "random", "query", "deviation", "head+query"])
@pytest.mark.parametrize(("budget", "reason"), [(1.0, "all_repaired"), (0.05, None)])
def test_homes_are_worth_compiling_where_something_of_them_would_be_copied(policy, budget, reason):
    found = homes_of()
    spans = [home.span for home in found]
    wanted, why = worth_compiling(
        found, options(spans, budget=budget, policy=policy), start=20, limit=230, end=230
    )
    assert (why, bool(wanted)) == (reason, reason is None)


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"prefix_len": 229}, "exact_prefix"),
        ({"prefix_len": 217}, "blocks_too_short"),
        ({"prefix_len": 217, "refused": "all_repaired"}, "blocks_too_short"),
        ({"prefix_len": 20, "limit": 20}, "input_logprobs"),
        ({"prefix_len": 20, "limit": 75}, "input_logprobs"),
        ({"prefix_len": 20}, "not_cached"),
        ({"prefix_len": 20, "not_compiled": "queue_full"}, "queue_full"),
        ({"prefix_len": 20, "refused": "cost_gate", "not_compiled": "queue_full"}, "cost_gate"),
        ({"prefix_len": 20, "homes": []}, "not_cached"),
        ({"prefix_len": 20, "homes": [], "not_compiled": "home_too_long"}, "home_too_long"),
        ({"prefix_len": 20, "homes": [], "min_block_tokens": 60}, "blocks_too_short"),
        (
            {"prefix_len": 20, "homes": [], "min_block_tokens": 60, "not_compiled": "compile_off"},
            "blocks_too_short",
        ),
    ],
)
def test_every_reason_for_no_reuse_is_true(values, reason):
    """Blocks [20, 70), [70, 120), [120, 170), [170, 220), the first of which continues the compile prefix."""
    _, spans = blocks_behind(20, 4, 50)
    known = {"prompt_len": 230, "limit": 230, "refused": None, "not_compiled": None, "min_block_tokens": 32}
    values = {**known, **values}
    assert why_nothing(spans, values.pop("homes", homes_of()), **values) == reason


class TestMarksOfAPromptThatWasCut:
    def parse(self, was_cut=True, **params):
        return parse_options(
            {f"blockreuse_{k}": v for k, v in params.items()},
            prompt_len=100,
            config=BlocksConfig(),
            was_cut=was_cut,
        )

    def test_they_are_cut_where_the_prompt_is(self):
        found = self.parse(spans=[10, 50, 60, 130, 140, 150], question=[90, 160])
        assert found.spans == (Interval(10, 50), Interval(60, 100))
        assert (found.question, found.num_cut) == (Interval(90, 100), 1)
        assert self.parse(question=[120, 160]).question is None

    def test_a_prompt_that_was_not_cut_is_held_to_its_length(self):
        with pytest.raises(RequestError, match="outside the prompt of 100 tokens"):
            self.parse(was_cut=False, spans=[60, 130])

    def test_what_is_malformed_stays_malformed(self):
        with pytest.raises(RequestError, match="begins before"):
            self.parse(spans=[110, 150, 120, 160])


@pytest.mark.parametrize(
    "params",
    [
        {"blockreuse_spans": [0, 10**4000]},
        {"blockreuse_spans": list(range(300_001))},
        {"blockreuse_tau": 10**4000},
        {"blockreuse_budget": 10**400},
        {"blockreuse_policy": "x" * 10**6},
        {"blockreuse_mode": ["x" * 10**6] * 100},
        {"blockreuse_" + "x" * 10**6: 1},
    ],
    ids=["span", "spans", "tau", "budget", "policy", "mode", "key"],
)
def test_what_a_client_sends_is_not_echoed_whole(params):
    with pytest.raises(RequestError) as caught:
        parse_options(params, prompt_len=100, config=BlocksConfig())
    assert len(str(caught.value)) < 500
