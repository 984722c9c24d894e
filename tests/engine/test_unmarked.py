"""Feature on, nothing marked: the extended server answers bit for bit like the stock server.

Stock here means SGLang without block reuse on the same attention kernels, so that every difference would be ours.
"""

from __future__ import annotations

import contextlib
import random

import pytest
from prompts import ask, random_ids
from servers import extended_server, stock_server

pytestmark = pytest.mark.engine
NUM_PROMPTS = 50
SHORTEST, LONGEST = 10, 3000
FLAGS = ("--chunked-prefill-size", "512", "--enable-mixed-chunk", "--max-total-tokens", "40000")
FLAGS += ("--max-running-requests", "8", "--dtype", "float32")


def prompts() -> list[list[int]]:
    """50 prompts whose lengths grow geometrically from 10 to 3000 tokens, shuffled."""
    rng = random.Random(7)
    ratio = (LONGEST / SHORTEST) ** (1 / (NUM_PROMPTS - 1))
    found = [random_ids(round(SHORTEST * ratio**i), rng) for i in range(NUM_PROMPTS)]
    rng.shuffle(found)
    return found


def answers(server) -> dict[str, list]:
    """Token ids and log-probabilities of every fourth prompt alone and of all in batches of 8, and token ids of
    mixed batches.

    A batch travels as one message, so every server forms the same steps from it. SGLang mixes decode rows
    into prefill chunks only where nobody asks for log-probabilities.
    """
    texts = prompts()
    batches = [texts[i : i + 8] for i in range(0, len(texts), 8)]
    server.flush_cache()
    alone = [ask(server, p) for p in texts[::4]]
    server.flush_cache()
    together = [a for batch in batches for a in ask(server, batch)]
    server.flush_cache()
    params = {"temperature": 0, "max_new_tokens": 24, "ignore_eos": True}
    mixed = [a for batch in batches for a in server.generate(input_ids=batch, sampling_params=params)]
    return {
        "ids": [a["output_ids"] for a in alone],
        "logprobs": [a["meta_info"]["output_top_logprobs"] for a in alone],
        "ids in batches of 8": [a["output_ids"] for a in together],
        "logprobs in batches of 8": [a["meta_info"]["output_top_logprobs"] for a in together],
        "ids in mixed batches of 8": [a["output_ids"] for a in mixed],
    }


@pytest.fixture(scope="module")
def stock(model_path, tmp_path_factory):
    with stock_server(model_path, *FLAGS, log=tmp_path_factory.mktemp("stock") / "server.log") as server:
        yield answers(server)


@contextlib.contextmanager
def extended(model_path, tmp_path_factory, *flags):
    log = tmp_path_factory.mktemp("extended") / "server.log"
    with extended_server(model_path, *FLAGS, *flags, log=log) as server:
        yield server


@pytest.mark.parametrize("plan", [(), ("--layer-plan", "full")], ids=["no plan", "full"])
def test_nothing_marked_is_bit_identical_to_stock(model_path, tmp_path_factory, stock, plan):
    with extended(model_path, tmp_path_factory, *plan) as server:
        assert f"layer plan {'full' if plan else 'none'}" in server.log_text()
        ours = answers(server)
    assert len(ours["ids in batches of 8"]) == NUM_PROMPTS
    for what, expected in stock.items():
        assert ours[what] == expected, what


def test_the_comparison_sees_a_wrong_token(stock):
    """Negative control: prompts that differ in one token have other log-probabilities."""
    steps = stock["logprobs in batches of 8"]
    assert len({str(s) for s in steps}) == NUM_PROMPTS
    assert stock["ids"] != stock["ids"][1:] + stock["ids"][:1]
