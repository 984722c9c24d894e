"""What leaves a full pool first: paths that nobody asked for, before homes that a few requests did without."""

from __future__ import annotations

import random

import pytest
from looks import counts, risen
from prompts import Library, ask, usage
from servers import lease

pytestmark = pytest.mark.engine
NUM_DOCS, DOC_LEN, PER_PROMPT = 12, 120, 5
# all documents, the largest request and not much more
POOL = 2600
LIBRARY = Library(seed=16, system_len=24, doc_lens=(DOC_LEN,) * NUM_DOCS, question_len=12)


def distinct_orders(num: int, *, seed: int = 1) -> list[tuple[int, ...]]:
    rng, found = random.Random(seed), {}
    while len(found) < num:
        found[tuple(rng.sample(range(NUM_DOCS), PER_PROMPT))] = None
    return list(found)


def generate(server, order, **params):
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, new_tokens=1, top=0, blockreuse_spans=spans, **params)


@pytest.fixture(scope="module")
def server():
    with lease("--max-total-tokens", str(POOL)) as running:
        for doc in range(NUM_DOCS):
            generate(running, [doc])
        yield running


def test_documents_that_fit_the_pool_stay_in_it_whatever_orders_they_come_in(server):
    """Every order is new, so hardly a path is used again; in the order of last use they would push out 11 homes."""
    again = sum(usage(generate(server, order))["compiled_tokens"] for order in distinct_orders(15))
    assert again <= 2 * DOC_LEN


def test_a_path_that_was_asked_for_once_is_kept_like_a_home(server):
    order = (0, 1, 2, 3, 4)
    generate(server, order)
    before = counts(server)
    generate(server, order)  # asks for it
    assert risen(server, before, "path_tokens_total") > 0
    for other in distinct_orders(4, seed=2):
        generate(server, other)
    before = counts(server)
    generate(server, order)
    assert risen(server, before, "path_tokens_total") > 0, "paths that nobody asked for left in its place"


def test_a_path_that_nobody_asked_for_is_gone_after_a_few_orders(server):
    """The control of the test before."""
    server.flush_cache()
    for doc in range(NUM_DOCS):
        generate(server, [doc])
    order = (4, 3, 2, 1, 0)
    generate(server, order)
    for other in distinct_orders(4, seed=3):
        generate(server, other)
    before = counts(server)
    generate(server, order)
    assert risen(server, before, "path_tokens_total") == 0
