"""Operator F on the real engine: alpha and beta act on local keys only, and vanish with them."""

from __future__ import annotations

import pytest
from prompts import Library, ask, distance, know, usage
from servers import lease
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=6)


@pytest.fixture(scope="module")
def server():
    with lease(blocks={"alpha": -30.0, "beta": -3.0, "num_true_sinks": 2}) as running:
        yield running


def test_local_keys_are_pushed_away(server):
    """With alpha = -30 no weight is left on local keys: the documents might as well not be there."""
    ids, spans = LIBRARY.prompt((0, 1, 2, 3))
    full = ask(server, ids, blockreuse_mode="off")
    server.flush_cache()
    know(server, LIBRARY, (3, 2, 1, 0))
    answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
    assert usage(answer)["reused_tokens"] > 200
    assert distance(answer, full) > 1000 * FULL_PREFILL_LOGPROB


def test_without_local_keys_f_is_plain_attention(server):
    """Degeneration, and proof that a recycled slot does not keep the tag of who had it before."""
    ids, spans = LIBRARY.prompt((2, 0, 3, 1))
    full = ask(server, ids, blockreuse_mode="off", new_tokens=8)
    for _ in range(3):
        server.flush_cache()
        know(server, LIBRARY, (3, 2, 1, 0))
        ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0, new_tokens=8)
        repaired = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=1000, new_tokens=8)
        exact = ask(server, ids, blockreuse_spans=spans, blockreuse_mode="exact", new_tokens=8)
        assert distance(repaired, full) <= FULL_PREFILL_LOGPROB
        assert distance(exact, full) <= FULL_PREFILL_LOGPROB
