"""Prompts of random token ids made of a system prompt, documents and a question, and what to ask of them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from servers import Server

# ids that are ordinary text in SmolLM2's vocabulary of 49152
ORDINARY = range(100, 40_000)


def random_ids(num: int, rng: random.Random, ids: range = ORDINARY) -> list[int]:
    return [rng.choice(ids) for _ in range(num)]


@dataclass
class Library:
    """A system prompt, documents and a question; `prompt` puts them together in any order."""

    seed: int
    system_len: int = 40
    doc_lens: Sequence[int] = (120, 90, 140, 110)
    question_len: int = 20
    ids: range = ORDINARY
    system: list[int] = field(init=False)
    docs: list[list[int]] = field(init=False)
    question: list[int] = field(init=False)

    def __post_init__(self) -> None:
        rng = random.Random(self.seed)
        self.system = random_ids(self.system_len, rng, self.ids)
        self.docs = [random_ids(n, rng, self.ids) for n in self.doc_lens]
        self.question = random_ids(self.question_len, rng, self.ids)

    def prompt(self, order: Sequence[int]) -> tuple[list[int], list[int]]:
        """(token ids, flat spans of the documents)."""
        ids, spans = list(self.system), []
        for i in order:
            spans += [len(ids), len(ids) + len(self.docs[i])]
            ids += self.docs[i]
        return ids + self.question, spans


def ask(
    server: Server, ids: Any, *, new_tokens: int = 4, top: int = 20, **custom_params: Any
) -> dict[str, Any]:
    """Greedy answer with log-probabilities; keyword arguments become `custom_params`."""
    request = {
        k: custom_params.pop(k)
        for k in ("extra_key", "cache_salt", "logprob_start_len")
        if k in custom_params
    }
    params: dict[str, Any] = {"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True}
    if custom_params:
        params["custom_params"] = custom_params
    return server.generate(
        input_ids=ids, sampling_params=params, return_logprob=True, top_logprobs_num=top, **request
    )


def know(server: Server, library: Library, order: Sequence[int] = (0, 1, 2, 3), **request: Any) -> None:
    """Make the library's documents known."""
    ids, spans = library.prompt(order)
    ask(server, ids, new_tokens=1, blockreuse_spans=spans, **request)


def usage(answer: dict[str, Any]) -> dict[str, Any]:
    """The one usage object of a finished request."""
    (found,) = answer["meta_info"]["blockreuse"]
    return found


def logprobs(answer: dict[str, Any]) -> list[dict[int, float]]:
    """Per answer token: token id -> log-probability over the reported top tokens."""
    return [
        {token: value for value, token, *_ in step} for step in answer["meta_info"]["output_top_logprobs"]
    ]


def distance(a: dict[str, Any], b: dict[str, Any]) -> float:
    """Largest difference of log-probabilities that both answers report while their tokens agree.

    The first step is always compared; a later one only behind equal tokens, where both
    answers condition on the same text.
    """
    worst = 0.0
    for step, (x, y) in enumerate(zip(logprobs(a), logprobs(b), strict=True)):
        if step and a["output_ids"][:step] != b["output_ids"][:step]:
            break
        common = x.keys() & y.keys()
        if not common:
            return float("inf")
        worst = max(worst, *(abs(x[t] - y[t]) for t in common))
    return worst
