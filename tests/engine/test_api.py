"""The surface a client meets: /generate, both OpenAI endpoints, errors, usage, /server_info."""

from __future__ import annotations

import itertools
import random

import openai
import pytest
import requests
from looks import counts, risen
from prompts import Library, ask, know, usage
from servers import lease

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=5)
SPANS = LIBRARY.prompt((2, 1))[1]
USAGE_KEYS = {
    "mode",
    "policy",
    "prefix_tokens",
    "reused_tokens",
    "repaired_tokens",
    "fresh_tokens",
    "compiled_tokens",
    "host_tokens",
    "storage_tokens",
    "recompute_ratio",
    "skipped_reason",
    "guard",
    "prompt_truncated",
}


@pytest.fixture(scope="module")
def server():
    with lease() as running:
        yield running


@pytest.fixture
def client(server):
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none")


@pytest.fixture(autouse=True)
def known_documents(server, empty_tree):
    know(server, LIBRARY)


def test_usage_accounts_for_every_prompt_token(server):
    ids, spans = LIBRARY.prompt((3, 1, 0))
    found = usage(ask(server, ids, blockreuse_spans=spans))
    assert found.keys() == USAGE_KEYS
    assert (found["mode"], found["policy"], found["skipped_reason"]) == ("reuse", "seam", None)
    parts = [found[f"{kind}_tokens"] for kind in ("prefix", "reused", "repaired", "fresh")]
    assert sum(parts) == len(ids)
    assert min(parts) > 0
    assert found["recompute_ratio"] == pytest.approx(found["repaired_tokens"] / spans[-1], abs=1e-6)
    assert 0 < found["recompute_ratio"] <= 0.05


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        pytest.param({}, "no_blocks", id="nothing marked"),
        pytest.param({"blockreuse_mode": "off", "blockreuse_spans": [0, 50]}, "mode_off", id="off"),
        pytest.param({"blockreuse_mode": "exact", "blockreuse_spans": [0, 50]}, "mode_exact", id="exact"),
        pytest.param({"blockreuse_spans": [0, 9]}, "blocks_too_short", id="short block"),
        pytest.param(
            {"blockreuse_spans": SPANS, "blockreuse_budget": 1.0}, "all_repaired", id="all repaired"
        ),
        pytest.param({"blockreuse_spans": SPANS, "logprob_start_len": 3}, "input_logprobs", id="logprobs"),
    ],
)
def test_what_is_not_reused_says_why(server, params, reason):
    ids, _ = LIBRARY.prompt((2, 1))
    if reason != "all_repaired":
        ids[0] += 1  # no exact prefix
    assert usage(ask(server, ids, **params))["skipped_reason"] == reason


def test_the_same_prompt_again_is_an_exact_prefix(server):
    ids, spans = LIBRARY.prompt((0,))
    assert usage(ask(server, ids, blockreuse_spans=spans))["skipped_reason"] == "exact_prefix"


BAD_PARAMS = [
    pytest.param({"blockreuse_spans": [30, 10]}, "empty or reversed", id="reversed"),
    pytest.param({"blockreuse_spans": [10, 40, 30, 60]}, "begins before position 40", id="overlap"),
    pytest.param({"blockreuse_spans": [0, 10**9]}, "outside the prompt", id="out of range"),
    pytest.param({"blockreuse_mode": "fast"}, "off, exact, reuse", id="mode"),
    pytest.param({"blockreuse_spam": 1}, "is unknown", id="mistyped"),
]


@pytest.mark.parametrize(("params", "says"), BAD_PARAMS)
def test_bad_marks_are_a_400_of_generate(server, params, says):
    ids, _ = LIBRARY.prompt((0, 1))
    with pytest.raises(requests.HTTPError, match=says) as caught:
        ask(server, ids, **params)
    assert caught.value.response.status_code == 400


@pytest.mark.parametrize(("params", "says"), BAD_PARAMS)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_bad_marks_are_a_400_of_chat(client, params, says, stream):

    def chat():
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": "Tell me about the documents. " * 20}],
            max_tokens=4,
            stream=stream,
            extra_body={"custom_params": params},
        )
        return list(answer)

    with pytest.raises(openai.APIError, match=says):
        chat()


def test_the_server_answers_after_every_kind_of_bad_request(server):
    ids, spans = LIBRARY.prompt((1, 3))
    for bad in ("text", {"a": 1}, [[1, 2]], [None], [1.5, 2.5], [1, 2, 3], [-4, 2]):
        body = {"input_ids": ids, "sampling_params": {"custom_params": {"blockreuse_spans": bad}}}
        assert requests.post(server.url + "/generate", json=body, timeout=60).status_code == 400, bad
    assert usage(ask(server, ids, blockreuse_spans=spans))["reused_tokens"] > 0


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1, 2, 999_999]},
        {"input_ids": [1, 2, -5]},
        {"input_ids": [1, 2, 3], "return_logprob": True, "logprob_start_len": -7},
        {"input_ids": [1, 2, 3], "sampling_params": {"custom_params": "abc"}},
    ],
    ids=["beyond the vocabulary", "negative id", "negative logprob start", "custom_params is text"],
)
def test_what_would_end_the_scheduler_is_a_400(server, body):
    assert requests.post(server.url + "/generate", json=body, timeout=60).status_code == 400
    assert requests.get(server.url + "/health", timeout=60).status_code == 200


def test_openai_completions_take_token_spans(server, client):
    ids, spans = LIBRARY.prompt((2, 0, 1))
    before = counts(server)
    answer = client.completions.create(
        model="small",
        prompt=ids,
        max_tokens=4,
        temperature=0,
        extra_body={"custom_params": {"blockreuse_spans": spans}},
    )
    assert answer.usage.prompt_tokens == len(ids)
    assert risen(server, before, "tokens_total reused") > 0


def test_openai_chat_returns_the_usage_when_asked(server, client):
    ids, spans = LIBRARY.prompt((2, 0, 1))
    answer = client.chat.completions.create(
        model="small",
        messages=[{"role": "user", "content": ""}],
        max_tokens=4,
        temperature=0,
        extra_body={"input_ids": ids, "custom_params": {"blockreuse_spans": spans}, "return_meta_info": True},
    )
    (found,) = answer.choices[0].meta_info["blockreuse"]
    assert found["reused_tokens"] > 0


def test_a_stream_carries_the_usage_once_at_its_end(server):
    ids, spans = LIBRARY.prompt((3, 2))
    params = {"temperature": 0, "max_new_tokens": 6, "custom_params": {"blockreuse_spans": spans}}
    body = {"input_ids": ids, "sampling_params": params, "stream": True}
    with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines(decode_unicode=True) if line.startswith("data: {")]
    assert len(lines) > 1
    assert ['"reused_tokens"' in line for line in lines] == [False] * (len(lines) - 1) + [True]


def test_parallel_samples_share_the_blocks(server):
    ids, spans = LIBRARY.prompt((1, 2, 3))
    params = {"temperature": 0.8, "n": 2, "max_new_tokens": 4, "custom_params": {"blockreuse_spans": spans}}
    answers = server.generate(input_ids=ids, sampling_params=params)
    assert [usage(a)["skipped_reason"] for a in answers] == [None, None]


def test_grammars_sampling_and_penalties_work_on_folded_requests(server):
    ids, spans = LIBRARY.prompt((3, 0, 2))
    params = {
        "temperature": 0.7,
        "max_new_tokens": 8,
        "regex": "(yes|no)",
        "repetition_penalty": 1.1,
        "custom_params": {"blockreuse_spans": spans},
    }
    answer = server.generate(input_ids=ids, sampling_params=params)
    assert answer["text"] in ("yes", "no")
    assert usage(answer)["reused_tokens"] > 0


def test_a_batch_of_marked_and_unmarked_requests(server):
    """One message, one prefill step: the folded requests must not disturb the plain ones."""
    orders = list(itertools.permutations(range(4)))
    random.Random(0).shuffle(orders)
    cases = [LIBRARY.prompt(o) for o in orders[:4]]
    plain = [ask(server, ids, blockreuse_mode="off") for ids, _ in cases]
    server.flush_cache()
    params = [
        {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        | ({"custom_params": {"blockreuse_spans": spans, "blockreuse_tau": 4}} if i % 2 else {})
        for i, (_, spans) in enumerate(cases)
    ]
    answers = server.generate(input_ids=[ids for ids, _ in cases], sampling_params=params)
    for i in (0, 2):
        assert answers[i]["output_ids"] == plain[i]["output_ids"]
    assert any(usage(answers[i])["reused_tokens"] > 0 for i in (1, 3))
