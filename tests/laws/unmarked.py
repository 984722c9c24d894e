"""Feature on, nothing marked: the extended server answers bit for bit like the stock server.

`Unmarked` is a test class but for `model`, `num_prompts`, `longest` and `flags`. Stock here means SGLang without block
reuse on the same attention kernels, so that every difference would be ours.
"""

from __future__ import annotations

import random

import pytest
from prompts import ask, random_ids
from servers import lease

SHORTEST = 10


def prompts(num: int, longest: int) -> list[list[int]]:
    """Prompts whose lengths grow geometrically, shuffled."""
    rng = random.Random(7)
    ratio = (longest / SHORTEST) ** (1 / (num - 1))
    found = [random_ids(round(SHORTEST * ratio**i), rng) for i in range(num)]
    rng.shuffle(found)
    return found


def answers(server, texts: list[list[int]]) -> dict[str, list]:
    """Token ids and log-probabilities of every fourth prompt alone and of all in batches of 8, and token ids of
    mixed batches.

    A batch travels as one message, so every server forms the same steps from it. SGLang mixes decode rows
    into prefill chunks only where nobody asks for log-probabilities.
    """
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


class Unmarked:
    model = "tiny"
    num_prompts: int
    longest: int
    flags: tuple[str, ...]

    @pytest.fixture(scope="class")
    def texts(self):
        return prompts(self.num_prompts, self.longest)

    @pytest.fixture(scope="class")
    def stock(self, texts):
        with lease(*self.flags, model=self.model, kind="stock") as server:
            return answers(server, texts)

    @pytest.mark.parametrize("plan", ["", "full"], ids=["no plan", "full"])
    def test_nothing_marked_is_bit_identical_to_stock(self, stock, texts, plan):
        with lease(*self.flags, model=self.model, plan=plan) as server:
            assert f"layer plan {plan or 'none'}" in server.log_text()
            ours = answers(server, texts)
        assert len(ours["ids in batches of 8"]) == self.num_prompts
        for what, expected in stock.items():
            assert ours[what] == expected, what

    def test_the_comparison_sees_a_wrong_token(self, stock):
        """Negative control: prompts that differ in one token have other log-probabilities."""
        steps = stock["logprobs in batches of 8"]
        assert len({str(s) for s in steps}) == self.num_prompts
        assert stock["ids"] != stock["ids"][1:] + stock["ids"][:1]
