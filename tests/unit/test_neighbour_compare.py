"""What the fuzzer of neighbours calls a difference, and what it lets pass."""

from __future__ import annotations

import copy

import pytest
from neighbour_compare import differences, first_token_difference
from tolerances import FULL_PREFILL_LOGPROB

USAGE = {"mode": "reuse", "prefix_tokens": 10, "reused_tokens": 0, "fresh_tokens": 5, "compiled_tokens": 0}
META = {
    "id": "a",
    "finish_reason": {"type": "length", "length": 2},
    "e2e_latency": 0.1,
    "queue_time": 0.1,
    "cached_tokens": 3,
    "input_token_logprobs": [[None, 5, None], [-1.5, 6, None]],
    "output_top_logprobs": [[[-1.0, 7, None], [-1.0 - 1e-6, 8, None]], [[-0.5, 9, None], [-2.0, 3, None]]],
    "hidden_states": [[[0.1, 0.2], [0.3, 0.4], [0.5, 0.6]], [0.7, 0.8]],
    "blockreuse": [USAGE],
}
ANSWER = {"status": 200, "answer": {"text": "ab", "output_ids": [7, 9], "meta_info": META}}


def changed(change) -> list[str]:
    other = copy.deepcopy(ANSWER)
    change(other["answer"], other["answer"]["meta_info"])
    return [d.where for d in differences(ANSWER, other)]


def test_an_answer_equals_itself():
    assert differences(ANSWER, copy.deepcopy(ANSWER)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda a, m: m.update(id="b", e2e_latency=9.0, queue_time=3.0, cached_tokens=0),
        lambda a, m: m["input_token_logprobs"][1].__setitem__(0, -1.5 + FULL_PREFILL_LOGPROB / 2),
        lambda a, m: m["output_top_logprobs"][0].reverse(),
        lambda a, m: m["output_top_logprobs"][0].__setitem__(1, [-1.0 - 2e-6, 11, None]),
        lambda a, m: m["blockreuse"][0].update(prefix_tokens=3, fresh_tokens=12),
        lambda a, m: m["hidden_states"].__setitem__(0, m["hidden_states"][0][1:]),
    ],
    ids=[
        "times and ids",
        "rounding",
        "tied order",
        "a tied last place",
        "a longer prefix",
        "a shorter chunk",
    ],
)
def test_what_neighbours_may_change_passes(change):
    assert changed(change) == []


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda a, m: a.update(text="ax"), ".answer.text"),
        (lambda a, m: a["output_ids"].append(4), ".answer.output_ids"),
        (lambda a, m: m["finish_reason"].update(type="abort"), ".answer.meta_info.finish_reason.type"),
        (lambda a, m: m.pop("finish_reason"), ".answer.meta_info.finish_reason"),
        (lambda a, m: m.update(extra=1), ".answer.meta_info.extra"),
        (lambda a, m: m["input_token_logprobs"].pop(), ".answer.meta_info.input_token_logprobs"),
        (
            lambda a, m: m["input_token_logprobs"][1].__setitem__(0, -1.5 + 3 * FULL_PREFILL_LOGPROB),
            ".answer.meta_info.input_token_logprobs[1][0]",
        ),
        (
            lambda a, m: m["output_top_logprobs"][1].__setitem__(1, [-1.0, 3, None]),
            ".answer.meta_info.output_top_logprobs[1][token 3]",
        ),
        (lambda a, m: m["output_top_logprobs"].pop(), ".answer.meta_info.output_top_logprobs (positions)"),
        (
            lambda a, m: m["hidden_states"][0].__setitem__(2, [0.5, 0.7]),
            ".answer.meta_info.hidden_states[0]",
        ),
        (lambda a, m: m["hidden_states"].__setitem__(0, []), ".answer.meta_info.hidden_states[0]"),
        (lambda a, m: m["hidden_states"].pop(), ".answer.meta_info.hidden_states (entries)"),
        (
            lambda a, m: m["blockreuse"][0].update(fresh_tokens=6),
            ".answer.meta_info.blockreuse[0].prefix_tokens + fresh_tokens",
        ),
        (
            lambda a, m: m["blockreuse"][0].update(reused_tokens=1),
            ".answer.meta_info.blockreuse[0].reused_tokens",
        ),
    ],
)
def test_everything_else_is_named_by_its_place(change, where):
    assert changed(change) == [where]


def test_another_status_is_a_difference():
    other = {"status": 400, "answer": {"error": {"message": "no"}}}
    assert ".status" in [d.where for d in differences(ANSWER, other)]


def test_homes_that_another_may_have_brought_are_not_counted():
    other = copy.deepcopy(ANSWER)
    other["answer"]["meta_info"]["blockreuse"][0]["compiled_tokens"] = 40
    assert [d.where for d in differences(ANSWER, other)] == [
        ".answer.meta_info.blockreuse[0].compiled_tokens"
    ]
    assert differences(ANSWER, other, shared_homes=True) == []


def test_answers_part_at_a_token():
    other = copy.deepcopy(ANSWER)
    other["answer"]["output_ids"] = [7, 4]
    assert first_token_difference(ANSWER, other) == 1
    assert first_token_difference(ANSWER, ANSWER) is None
