"""What a client sent is not sent back whole: every refusal is short and safe to print, whatever the value."""

from __future__ import annotations

import time

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.blocks.request import (
    KEYS,
    RequestError,
    check_extra_key,
    check_prompt,
    parse_options,
)
from sglang_blockreuse.config import BlocksConfig, ConfigError, load_config
from sglang_blockreuse.errors import MAX_LEN, short
from sglang_blockreuse.layers.plan_loader import parse_plan

MAX_MESSAGE = 600  # a value, a rule and what to do
PROMPT_LEN = 50
MEGABYTE = 1_000_000
NASTY = "line\n\x1b[2Jscreen\x00\u202e"

huge = st.sampled_from(
    [
        "x" * MEGABYTE,
        NASTY * 1000,
        ["y" * MEGABYTE],
        {"z" * MEGABYTE: 1},
        [[[["deep" * 1000] * 100] * 100]],
        list(range(100_000)),
        10**4000,
        [10**4000, 10**4001],
        10**5000,  # more digits than Python prints
        [0, 10**5000],
        float("inf"),
        b"\xff" * MEGABYTE,
    ]
)
values = st.one_of(
    huge, st.text(), st.integers(), st.floats(), st.lists(st.integers() | st.text()), st.booleans()
)


def check(message: str) -> None:
    assert len(message) <= MAX_MESSAGE, f"{len(message)} characters: {message[:200]}"
    assert message.isprintable(), message


@given(st.sampled_from(KEYS), values)
def test_a_refused_value_is_not_echoed_whole(key, value):
    try:
        parse_options({key: value}, prompt_len=PROMPT_LEN, config=BlocksConfig())
    except RequestError as error:
        check(str(error))


@pytest.mark.parametrize("key", KEYS)
def test_every_key_refuses_what_is_too_large_to_be_meant(key):
    """The test above meets refusals of every key."""
    for value in ("x" * MEGABYTE, 10**5000, [NASTY * 1000]):
        with pytest.raises(RequestError) as error:
            parse_options({key: value}, prompt_len=PROMPT_LEN, config=BlocksConfig())
        check(str(error.value))


@given(st.sampled_from(["q" * MEGABYTE, NASTY * 1000]) | st.text())
def test_nor_is_the_name_of_a_key(name):
    key = "blockreuse_" + name
    if key not in KEYS:
        with pytest.raises(RequestError, match="is unknown") as error:
            parse_options({key: 1}, prompt_len=PROMPT_LEN, config=BlocksConfig())
        check(str(error.value))


@given(values)
def test_nor_is_what_stands_in_place_of_custom_params(value):
    try:
        parse_options(value, prompt_len=PROMPT_LEN, config=BlocksConfig())
    except RequestError as error:
        check(str(error))


def test_nor_are_namespaces_and_token_ids():
    for refuse in (
        lambda: check_extra_key("blockreuse:" + NASTY * MEGABYTE),
        lambda: check_prompt([10**5000], vocab_size=10, logprob_start_len=-1),
        lambda: check_prompt([], vocab_size=10, logprob_start_len=-(10**5000)),
    ):
        with pytest.raises(RequestError) as error:
            refuse()
        check(str(error.value))


@pytest.mark.parametrize("key", [*KEYS, "blocks", *BlocksConfig.__struct_fields__])
def test_configuration_errors_are_as_short(tmp_path, key):
    for value in ("x" * 100_000, ["y" * 100_000], NASTY):
        for name in (key, key + "k" * 100_000):
            path = tmp_path / "c.json"
            path.write_bytes(msgspec.json.encode({"blocks": {name: value}, "kernels": "auto"}))
            try:
                load_config(path)
            except ConfigError as error:
                check(str(error).replace(str(path), ""))


def test_plan_errors_are_as_short():
    with pytest.raises(ValueError, match="role") as error:
        parse_plan("version: 1\nname: n\nlayers: [{layers: 0, role: " + "r" * 100_000 + "}]", source="p")
    assert len(str(error.value)) <= MAX_MESSAGE


def test_a_value_that_is_short_stands_there_as_it_is():
    """Control: nothing is clipped that helps."""
    assert short("seamm") == "'seamm'"
    assert short([3, 9]) == "[3, 9]"
    assert short(NASTY) == repr(NASTY)
    assert len(short("x" * MEGABYTE)) == MAX_LEN


def test_a_large_value_costs_no_more_than_a_small_one():
    """Done in the scheduler's thread, where everybody waits."""
    value = {"a": ["x" * MEGABYTE] * 1000, "b": list(range(MEGABYTE))}
    started = time.monotonic()
    short(value)
    assert time.monotonic() - started < 0.1
