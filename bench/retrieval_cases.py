"""Questions whose answer stands once, word for word, in a long context: needles in prose, and keys of a list.

    needle   made-up documents with sentences strewn in: "The access code of Amber Ridge is 48213907."
    pairs    a list of random keys and values: "tas-381: 70035536"

A prompt ends where the context's own sentence or line would go on, so that a model without instructions can answer.
Its first answer token comes from the prefill, which is dense; the seven digits behind it are decode steps. Several
questions share a context, which the server then prefills once.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from sglang_blockreuse.demo.documents import make_document
from sglang_blockreuse.demo.sentences import WORDS

KINDS = ("needle", "pairs")
NUM_DIGITS = 8


@dataclass(frozen=True)
class Case:
    kind: str
    context: int  # number of the context, which cases may share
    depth: float  # where the answer stands, 0 the start of the context and 1 its end
    prompt: str
    answer: str


def cases_of(
    kind: str, *, seed: int, num_tokens: Callable[[str], int], low: int, high: int, per_context: int
) -> Iterator[Case]:
    """Cases without end, `per_context` after another on contexts of `low` to `high` tokens.

    Raises:
        ValueError: the kind is unknown.
    """
    if kind not in KINDS:
        raise ValueError(f"kind {kind!r} is unknown; kinds are {', '.join(KINDS)}")
    make = _needles if kind == "needle" else _pairs
    context = 0
    while True:
        rng = random.Random(f"{seed}/{kind}/{context}")
        for depth, prompt, answer in make(rng, num_tokens, rng.randint(low, high), per_context):
            yield Case(kind, context, depth, prompt, answer)
        context += 1


def said(text: str) -> str:
    """What an answer is judged by: its words up to the end of the sentence or line; chatter behind it is no answer."""
    return re.split(r"[.,\n]", text.strip())[0].strip()


def is_right(case: Case, text: str) -> bool:
    return said(text) == case.answer


def _needles(
    rng: random.Random, num_tokens: Callable[[str], int], length: int, num: int
) -> Iterator[tuple[float, str, str]]:
    names = [f"{a} {b}" for a in WORDS["first"] for b in WORDS["second"]]
    codes = {name: _digits(rng) for name in rng.sample(names, num)}
    sentences = _prose(rng, num_tokens, length - 30 * num)
    places = sorted(rng.sample(range(len(sentences)), num), reverse=True)
    for place, (name, code) in zip(places, codes.items(), strict=True):
        sentences.insert(place, f"The access code of {name} is {code}.")
    text = " ".join(sentences)
    for name, code in codes.items():
        yield text.index(code) / len(text), f"{text}\n\nThe access code of {name} is", code


def _pairs(
    rng: random.Random, num_tokens: Callable[[str], int], length: int, num: int
) -> Iterator[tuple[float, str, str]]:
    lines: dict[str, str] = {}
    size = 0
    while size < length - 20:
        key = rng.choice("bdfgklmnprst") + rng.choice("aeiou") + rng.choice("lnrst")
        key += f"-{rng.randrange(100, 1000)}"
        lines[key] = _digits(rng)
        size += num_tokens(f"{key}: {lines[key]}\n")
    text = "".join(f"{key}: {value}\n" for key, value in lines.items())
    for key in rng.sample(list(lines), num):
        yield text.index(lines[key]) / len(text), f"{text}\n{key}:", lines[key]


def _prose(rng: random.Random, num_tokens: Callable[[str], int], length: int) -> list[str]:
    """Sentences of made-up documents."""
    sentences: list[str] = []
    size, seed = 0, rng.randrange(1 << 30)
    for index in range(1 << 10):
        text: Any = make_document(index, seed=seed, num_tokens=num_tokens, low=300, high=400).text
        for sentence in text.replace("\n", " ").split(". "):
            if size >= length:
                return sentences
            sentences.append(sentence.strip().rstrip(".") + ".")
            size += num_tokens(" " + sentences[-1])
    return sentences


def _digits(rng: random.Random) -> str:
    return str(rng.randrange(10 ** (NUM_DIGITS - 1), 10**NUM_DIGITS))
