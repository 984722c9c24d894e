"""What clients may write into custom_params, and what they are told when they may not."""

from __future__ import annotations

import pytest
from hypothesis import given
from strategies import spans

from sglang_blockreuse.blocks.request import (
    RequestError,
    check_extra_key,
    check_prompt,
    parse_options,
    parse_spans,
)
from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.types import Interval


def parse(prompt_len: int = 100, config: BlocksConfig | None = None, **params):
    return parse_options(params, prompt_len=prompt_len, config=config or BlocksConfig())


@given(spans())
def test_valid_spans_come_back_as_they_were_given(case):
    intervals, prompt_len = case
    flat = [x for i in intervals for x in (i.start, i.end)]
    assert parse_spans(flat, prompt_len) == intervals


@pytest.mark.parametrize(
    ("flat", "says"),
    [
        pytest.param([5, 3], "empty or reversed", id="reversed"),
        pytest.param([5, 5], "empty or reversed", id="empty"),
        pytest.param([0, 101], "outside the prompt of 100 tokens", id="past the end"),
        pytest.param([-1, 5], "outside the prompt", id="negative"),
        pytest.param([0, 10, 9, 20], "begins before position 10", id="overlap"),
        pytest.param([20, 30, 0, 10], "begins before position 30", id="descending"),
        pytest.param([0, 10, 20], "come in pairs", id="odd"),
        pytest.param([[0, 10]], "flat list of integers", id="nested"),
        pytest.param("0,10", "flat list of integers", id="text"),
        pytest.param([0, 1.5], "flat list of integers", id="float"),
        pytest.param([False, True], "flat list of integers", id="bool"),
    ],
)
def test_malformed_spans_are_refused_with_their_value(flat, says):
    with pytest.raises(RequestError, match=says):
        parse(blockreuse_spans=flat)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("blockreuse_mode", "fast"),
        ("blockreuse_mode", ["reuse"]),
        ("blockreuse_mode", 7),
        ("blockreuse_policy", "best"),
        ("blockreuse_policy", ["seam"]),
        ("blockreuse_tau", -1),
        ("blockreuse_tau", 1.5),
        ("blockreuse_tau", True),
        ("blockreuse_budget", 1.1),
        ("blockreuse_budget", float("nan")),
        ("blockreuse_budget", "5%"),
        ("blockreuse_budget", 5),
        ("blockreuse_budget", True),
        ("blockreuse_question", 7),
        ("blockreuse_question", [3, 3]),
        ("blockreuse_question", [0, 10_000]),
    ],
)
def test_bad_values_are_refused_by_name(key, value):
    with pytest.raises(RequestError, match=key):
        parse(**{key: value})


def test_a_budget_may_count_tokens():
    assert parse(blockreuse_budget=200).budget_tokens(1000) == 200
    assert parse(blockreuse_budget=200).budget_tokens(100) == 100
    assert parse(blockreuse_budget=0.05).budget_tokens(1000) == 50


@pytest.mark.parametrize("key", ["blockreuse:", "blockreuse:0123:abc:tenant"])
def test_the_namespaces_of_local_paths_are_refused(key):
    with pytest.raises(RequestError, match="extra_key"):
        check_extra_key(key)
    check_extra_key("tenant")
    check_extra_key(None)


def test_a_mistyped_key_is_refused_not_ignored():
    with pytest.raises(RequestError, match=r"custom_params\.blockreuse_span is unknown"):
        parse(blockreuse_span=[0, 10])


def test_foreign_keys_are_left_alone():
    assert parse(temperature_schedule=[1, 2], __req__=object()).mode == "reuse"


def test_a_request_overrides_the_configuration():
    config = BlocksConfig(tau=8, budget=0.1)
    assert (parse(config=config).tau, parse(config=config).budget) == (8, 0.1)
    assert parse(config=config, blockreuse_tau=3).tau == 3
    # a budget in the request is meant to be spent, so it takes the place of a configured tau
    options = parse(config=config, blockreuse_budget=0.02)
    assert (options.tau, options.budget) == (None, 0.02)


def test_no_custom_params_mean_no_blocks():
    assert parse_options(None, prompt_len=10, config=BlocksConfig()).spans == ()
    assert parse(blockreuse_spans=[0, 10]).spans == (Interval(0, 10),)


@pytest.mark.parametrize("params", ["abc", [1, 2], 5, True])
def test_custom_params_that_are_no_object_are_refused(params):
    with pytest.raises(RequestError, match="must be an object"):
        parse_options(params, prompt_len=10, config=BlocksConfig())


def test_null_means_left_out():
    keys = ("mode", "policy", "tau", "budget", "spans")
    assert parse(**{f"blockreuse_{key}": None for key in keys}) == parse()


@pytest.mark.parametrize(
    ("tokens", "start", "says"),
    [([1, 99, 100], -1, "holds 100"), ([-1], -1, "holds -1"), ([1], -7, "logprob_start_len is -7")],
)
def test_what_the_host_dies_of_is_refused(tokens, start, says):
    check_prompt([0, 99], vocab_size=100, logprob_start_len=0)
    with pytest.raises(RequestError, match=says):
        check_prompt(tokens, vocab_size=100, logprob_start_len=start)
