"""Prompts of the same documents in orders that never come again, on a pool that holds the documents barely."""

from __future__ import annotations

import random

from prompts import Library, ask, random_ids, usage

NUM_DOCS, DOC_LEN, PER_PROMPT, ONE_OFF = 12, 120, 5, 600
# all documents, the largest request and not much more
POOL = 2600
FLAGS = ("--max-total-tokens", str(POOL))
LIBRARY = Library(seed=16, system_len=24, doc_lens=(DOC_LEN,) * NUM_DOCS, question_len=12)


def distinct_orders(num: int, *, seed: int = 1) -> list[tuple[int, ...]]:
    rng, found = random.Random(seed), {}
    while len(found) < num:
        found[tuple(rng.sample(range(NUM_DOCS), PER_PROMPT))] = None
    return list(found)


def know_all(server) -> None:
    server.flush_cache()
    for doc in range(NUM_DOCS):
        generate(server, [doc])


def generate(server, order, **params):
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, new_tokens=1, top=0, blockreuse_spans=spans, **params)


def one_off(server, seed: int):
    """A prompt that nobody marked and that never comes again."""
    return ask(server, random_ids(ONE_OFF, random.Random(seed)), new_tokens=1, top=0)


def share(answer) -> float:
    """Of what lay in documents behind the exact prefix, how much was reused."""
    told = usage(answer)
    behind = len(LIBRARY.system) + PER_PROMPT * DOC_LEN - told["prefix_tokens"]
    return told["reused_tokens"] / behind
