"""Fictional documents, generated from a seed: prose with facts that a question can ask for.

No name or figure in them is real, so an answer can only come from the document.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

from .sentences import KINDS, WORDS, Kind

NUM_NAMES = len(WORDS["first"]) * len(WORDS["second"])  # documents of one seed with different names


@dataclass(frozen=True)
class Fact:
    """A question that one sentence of the document answers."""

    question: str
    answer: str  # the words an answer must contain


@dataclass(frozen=True)
class Document:
    title: str
    text: str  # title and body, as it stands in a prompt
    facts: tuple[Fact, ...]


def make_documents(
    num_documents: int, *, seed: int, num_tokens: Callable[[str], int], low: int = 480, high: int = 510
) -> list[Document]:
    """Make documents of `low` to `high` tokens, as `num_tokens` counts them and as far as the sentences reach.

    Raises:
        ValueError: more documents are asked for than there are different names.
    """
    if num_documents > NUM_NAMES:
        raise ValueError(f"num_documents is {num_documents}, but there are names for {NUM_NAMES} only")
    return [
        make_document(i, seed=seed, num_tokens=num_tokens, low=low, high=high) for i in range(num_documents)
    ]


def make_document(
    index: int, *, seed: int, num_tokens: Callable[[str], int], low: int, high: int
) -> Document:
    """Document `index` of the seed's NUM_NAMES, in a length of its own."""
    kinds = [KINDS[key] for key in sorted(KINDS)]
    name = _names(random.Random(seed))[index]
    rng = random.Random(f"{seed}/{index}")
    return _make_document(kinds[index % len(kinds)], name, rng, num_tokens, low, high)


def _names(rng: random.Random) -> list[str]:
    """All different names, neighbours without a common word: firsts and seconds advance at different strides."""
    firsts, seconds = list(WORDS["first"]), list(WORDS["second"])
    rng.shuffle(firsts)
    rng.shuffle(seconds)
    num_firsts, num_seconds = len(firsts), len(seconds)
    return [
        f"{firsts[i % num_firsts]} {seconds[(i + i // num_firsts) % num_seconds]}"
        for i in range(num_firsts * num_seconds)
    ]


def _make_document(
    kind: Kind, name: str, rng: random.Random, num_tokens: Callable[[str], int], low: int, high: int
) -> Document:
    slots = {"name": name, **{slot: rng.choice(words) for slot, words in WORDS.items()}}
    slots |= {slot: str(rng.randint(11, 98)) for slot in ("n1", "n2")}
    slots["year1"] = str(rng.randint(1702, 1989))
    title = kind.title.format(**slots)
    sentences = [sentence.format(**slots) for sentence, _, _ in kind.facts]
    facts = tuple(
        Fact(question.format(**slots), answer.format(**slots)) for _, question, answer in kind.facts
    )
    fillers = [sentence.format(**slots) for sentence in kind.fillers]
    rng.shuffle(fillers)
    for filler in fillers:
        if num_tokens(_text(title, sentences)) >= low:
            break
        # facts lie scattered over the document, only the first one always opens it
        longer = list(sentences)
        longer.insert(rng.randint(1, len(sentences)), filler)
        if num_tokens(_text(title, longer)) <= high:
            sentences = longer
    return Document(title=title, text=_text(title, sentences), facts=facts)


def _text(title: str, sentences: list[str]) -> str:
    return f"{title}\n{' '.join(sentences)}\n\n"
