"""The core of exactness with the language model: what must equal a full prefill does, what differs is seen."""

from __future__ import annotations

import pytest
from prompts import Library, ask, distance, know, usage
from servers import language_model
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=1)
ORDER = (2, 0, 3, 1)


@pytest.fixture(scope="module")
def server():
    with language_model() as running:
        yield running


@pytest.fixture(scope="module")
def full(server):
    server.flush_cache()
    return ask(server, LIBRARY.prompt(ORDER)[0], blockreuse_mode="off")


def test_several_rows_equal_one_full_prefill(server, full):
    ids, _ = LIBRARY.prompt(ORDER)
    rows = [0, 17, 17, 61, 61, 300, 300, len(ids)]
    split = ask(server, ids, testing_rows=rows)
    assert split["output_ids"] == full["output_ids"]
    assert distance(split, full) <= FULL_PREFILL_LOGPROB


def test_repairing_every_block_equals_full_prefill(server, full):
    ids, spans = LIBRARY.prompt(ORDER)
    know(server, LIBRARY)
    answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=1000)
    assert usage(answer)["reused_tokens"] == 0
    assert distance(answer, full) <= FULL_PREFILL_LOGPROB
    assert answer["output_ids"] == full["output_ids"]


def test_moved_blocks_without_repair_are_seen_to_differ(server, full):
    """Negative control: the comparison can fail."""
    ids, spans = LIBRARY.prompt(ORDER)
    know(server, LIBRARY)
    answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
    assert usage(answer)["reused_tokens"] > 300
    assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB


def test_exact_requests_never_read_local_kv(server, full):
    ids, spans = LIBRARY.prompt(ORDER)
    know(server, LIBRARY)
    ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2)
    exact = ask(server, ids, blockreuse_spans=spans, blockreuse_mode="exact")
    assert distance(exact, full) <= FULL_PREFILL_LOGPROB
    assert exact["output_ids"] == full["output_ids"]


def test_it_talks_sense(server):
    """The server serves the model and not noise: everything above would hold of noise, too."""
    chat = {"model": "small", "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    (choice,) = server.post("/v1/chat/completions", **chat, max_tokens=12, temperature=0)["choices"]
    assert "Paris" in choice["message"]["content"]
