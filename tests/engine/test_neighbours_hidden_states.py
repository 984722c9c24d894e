"""What one request of a folded step asks for is its own, and all of it: hidden states, scores, log-probabilities.

One server that may return hidden states; every step under test holds a folded request and neighbours beside it.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
from prompts import Library, ask, random_ids, usage
from servers import extended_server
from tiny_models import HEAD_DIM, NUM_HEADS, SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB, HIDDEN_STATES

from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
IDS = range(10, VOCAB)
LIBRARY = Library(seed=11, doc_lens=(100, 80, 120, 90), ids=IDS)
ORDER = (2, 0, 3, 1)
WIDTH = HEAD_DIM * NUM_HEADS
GREEDY = {"temperature": 0, "max_new_tokens": 3, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hidden-states")
    model = SUPPORTED["llama llama3"].write(folder / "model")
    flags = ("--dtype", "float32", "--max-total-tokens", "8000", "--max-running-requests", "8")
    flags += ("--skip-tokenizer-init", "--enable-return-hidden-states")
    with extended_server(model, *flags, log=folder / "server.log") as running:
        yield running


@pytest.fixture(autouse=True)
def known_documents(server):
    server.flush_cache()
    ids, spans = LIBRARY.prompt((0, 1, 2, 3))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)


@pytest.fixture
def strangers():
    """Prompts that nobody has seen, a short and a long one."""
    rng = random.Random(3)
    return random_ids(7, rng, IDS), random_ids(70, rng, IDS)


def folded_request():
    ids, spans = LIBRARY.prompt(ORDER)
    return ids, {**GREEDY, "custom_params": {"blockreuse_spans": spans, "blockreuse_tau": 2}}


def together(server, neighbours, *, params=None, **options):
    """Answers of a folded request and of `neighbours`, which travel as one message and so share a step.

    options: per request, the folded one first.
    """
    ids, folded = folded_request()
    rows = counts(server)["rows_total"]
    answers = server.generate(
        input_ids=[ids, *neighbours],
        sampling_params=[folded, *(params or [GREEDY] * len(neighbours))],
        **options,
    )
    assert usage(answers[0])["reused_tokens"] > 200, "the step was not folded"
    assert counts(server)["rows_total"] - rows >= 1 + len(neighbours), "the requests did not share the step"
    return answers


def counts(server):
    found = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return {"rows_total": 0, **found}


def states(answer):
    """Hidden states of the prompt [tokens, width], then of each decoded token [width]."""
    prompt, *decoded = answer["meta_info"]["hidden_states"]
    return np.array(prompt), [np.array(x) for x in decoded]


def alone(server, ids, **options):
    server.flush_cache()
    return server.generate(input_ids=ids, sampling_params=GREEDY, **options)


@pytest.mark.parametrize("asks", [0, 1], ids=["short", "long"])
def test_a_neighbour_gets_the_hidden_states_of_its_own_prompt(server, strangers, asks):
    options = {"return_hidden_states": [False, asks == 0, asks == 1]}
    answers = together(server, strangers, **options)
    assert [("hidden_states" in a["meta_info"]) for a in answers] == options["return_hidden_states"]
    found, decoded = states(answers[1 + asks])
    want, want_decoded = states(alone(server, strangers[asks], return_hidden_states=True))
    assert found.shape == want.shape == (len(strangers[asks]), WIDTH)
    np.testing.assert_allclose(found, want, **HIDDEN_STATES)
    for x, y in zip(decoded, want_decoded, strict=True):
        np.testing.assert_allclose(x, y, **HIDDEN_STATES)


def test_hidden_states_of_another_prompt_are_seen_to_differ(server, strangers):
    """Negative control for the comparison above."""
    one, _ = states(alone(server, strangers[0], return_hidden_states=True))
    other, _ = states(alone(server, strangers[1][: len(strangers[0])], return_hidden_states=True))
    assert np.abs(one - other).max() > 100 * HIDDEN_STATES["atol"]


def test_a_request_that_asks_for_hidden_states_reuses_nothing_and_gets_all_of_them(server, strangers):
    ids, params = folded_request()
    answer = server.generate(input_ids=ids, sampling_params=params, return_hidden_states=True)
    assert usage(answer)["skipped_reason"] == "hidden_states"
    assert sum(len(np.atleast_2d(x)) for x in states(answer)[:1]) == usage(answer)["fresh_tokens"]


def test_input_logprobs_beside_hidden_states_are_the_neighbours_own(server, strangers):
    answers = together(
        server,
        strangers,
        return_hidden_states=[False, True, False],
        return_logprob=[False, True, True],
        logprob_start_len=[-1, 0, 20],
    )
    for i, start in ((0, 0), (1, 20)):
        want = alone(server, strangers[i], return_logprob=True, logprob_start_len=start)
        found, wanted = (input_logprobs(x) for x in (answers[1 + i], want))
        assert len(found) == len(wanted) == len(strangers[i]) - start - 1
        np.testing.assert_allclose(found, wanted, atol=FULL_PREFILL_LOGPROB)


def test_a_neighbour_that_is_scored_without_an_answer_gets_its_own_scores(server, strangers):
    """What `/v1/score` asks for: no new token, the log-probabilities of some labels behind the prompt."""
    labels, scored = [20, 30, 40], {**GREEDY, "max_new_tokens": 0}
    answers = together(
        server,
        strangers,
        params=[scored, scored],
        return_logprob=[False, True, True],
        token_ids_logprob=[labels, labels, labels],
    )
    for i, ids in enumerate(strangers):
        server.flush_cache()
        want = server.generate(
            input_ids=ids, sampling_params=scored, return_logprob=True, token_ids_logprob=labels
        )
        found, wanted = (x["meta_info"]["output_token_ids_logprobs"][0] for x in (answers[1 + i], want))
        assert [t for _, t, *_ in found] == labels
        np.testing.assert_allclose([v for v, *_ in found], [v for v, *_ in wanted], atol=FULL_PREFILL_LOGPROB)


def input_logprobs(answer):
    return [v for v, *_ in answer["meta_info"]["input_token_logprobs"] if v is not None]


def test_a_model_that_pools_prompts_is_refused_by_name(tmp_path):
    """Embedding, reward and classification models: a pooler takes rows for requests."""
    model = SUPPORTED["llama llama3"].write(tmp_path / "model")
    flags = ("--dtype", "float32", "--max-total-tokens", "2000", "--skip-tokenizer-init", "--is-embedding")
    with (
        pytest.raises(ServerFailed, match="embedding, reward or classification"),
        extended_server(model, *flags, log=tmp_path / "server.log"),
    ):
        pass
