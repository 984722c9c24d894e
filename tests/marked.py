"""Marked texts for the server tests, and the servers that read them."""

from __future__ import annotations

import itertools
import random
import time

from looks import state_of
from places import ROOT
from servers import lease

SEP = "<<<document>>>"
TEMPLATE = ROOT / "tests" / "documents.jinja"
GREEDY = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


def text_of(seed: int, num_words: int = 70) -> str:
    rng = random.Random(seed)
    words = (
        "river",
        "bridge",
        "winter",
        "contract",
        "copper",
        "letter",
        "museum",
        "harbour",
        "signal",
        "under",
    )
    return f"Document {seed}. " + " ".join(rng.choice(words) for _ in range(num_words)) + ".\n"


DOCS = [text_of(seed) for seed in range(4)]
QUESTION = "Which documents speak of a bridge?"


def with_separators(order, leading="Answer from the documents.\n", question=QUESTION) -> str:
    return SEP.join([leading, *(DOCS[i] for i in order), question])


def start(blocks, *flags):
    """A server whose template is SmolLM2's, which in addition renders `documents` and cuts messages at a `limit`."""
    return lease("--chat-template", str(TEMPLATE), *flags, blocks={"tau": 3, **blocks})


def generate(server, text, *, stream=False, n=1, **custom_params):
    params = {**GREEDY, "n": n, "custom_params": custom_params or None}
    return server.generate(text=text, sampling_params=params, return_prompt_token_ids=True)


def wait_until_idle(server, wait_s: float = 60.0) -> None:
    """Until background homes are prefilled."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        pool = state_of(server)["pool"]
        if pool["free"] + pool["evictable"] == pool["size"]:
            return
        time.sleep(0.25)
    raise AssertionError("the server is still busy")


def prompt_ids(answer):
    """Ids of a chat prompt, which the host reports beside or inside the choice."""
    return getattr(answer.choices[0], "prompt_token_ids", None) or answer.prompt_token_ids


def joined(pieces):
    return list(itertools.chain.from_iterable(pieces))
