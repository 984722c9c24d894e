"""Texts to calibrate on, of six kinds, that need no download: Python's own documentation and sources, and documents
that are made up from a seed.

    prose       a stretch of Python's language reference
    code        a stretch of a standard library module
    copy        prose that is said a second time; the rows stand in the repetition
    retrieval   made-up documents, then questions and their answers
    turns       a conversation about such documents, question by question
    pairs       a list of random keys and values that is said a second time in another order

Rows are the last tokens of a text. A seed decides the texts of one Python version, and its thousand decides which
third of the chapters and modules they are cut from: 0 those to search on, 1000 those to choose among what was found,
2000 those to judge it. Made-up documents differ by their names and figures; their sentences are the same in all three.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from ...demo.documents import Document, make_documents

KINDS = ("retrieval", "code", "copy", "prose", "turns")
ALL_KINDS = (*KINDS, "pairs")
# first seeds of the three sets of texts
SEARCH, CHOICE, HELD_OUT = 0, 1000, 2000
_NUM_SETS = 3
# pure Python, long, and present wherever Python is
_MODULES = (
    *("argparse", "ast", "calendar", "cgitb", "configparser", "csv", "dataclasses", "datetime", "difflib"),
    *("doctest", "enum", "fractions", "ftplib", "functools", "heapq", "inspect", "ipaddress", "mailbox"),
    *(
        "optparse",
        "pdb",
        "pickle",
        "platform",
        "random",
        "shutil",
        "statistics",
        "tarfile",
        "typing",
        "zipfile",
    ),
)


class _Rng(random.Random):
    """The chances of one text, and the part of the sources that is open to it."""

    def __init__(self, seed: str, share: int) -> None:
        super().__init__(seed)
        self._share = share

    def share_of(self, names: Sequence[str]) -> list[str]:
        """A third of the names, shuffled."""
        order = random.Random("sources").sample(list(names), len(names))[self._share :: _NUM_SETS]
        self.shuffle(order)
        return order


class Texts:
    """Token ids of texts. `folder` is a model's, with a tokenizer.json."""

    def __init__(self, folder: Path) -> None:
        from tokenizers import Tokenizer

        tokenizer: Any = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._ids: Callable[[str], list[int]] = lambda text: list(
            tokenizer.encode(text, add_special_tokens=False).ids
        )

    def make(self, kind: str, seed: int, num_tokens: int) -> list[int]:
        """`num_tokens` ids of a kind. Raises ValueError for an unknown kind."""
        if kind not in ALL_KINDS:
            raise ValueError(f"kind {kind!r} is unknown; kinds are {', '.join(ALL_KINDS)}")
        share = seed // CHOICE
        if not 0 <= share < _NUM_SETS:
            raise ValueError(f"seed is {seed}, but seeds run from 0 to {_NUM_SETS * CHOICE - 1}")
        ids: list[int] = getattr(self, f"_{kind}")(_Rng(f"{kind}/{seed}", share), num_tokens)
        if len(ids) < num_tokens:
            raise ValueError(f"kind {kind}, seed {seed} has {len(ids)} tokens only, not {num_tokens}")
        return ids[-num_tokens:]

    def _prose(self, rng: _Rng, num_tokens: int) -> list[int]:
        chapters = rng.share_of(_chapters())
        return self._first(("\n\n" + _from_somewhere(rng, chapter) for chapter in chapters), num_tokens)

    def _code(self, rng: _Rng, num_tokens: int) -> list[int]:
        return self._first(_sources(rng), num_tokens)

    def _copy(self, rng: _Rng, num_tokens: int) -> list[int]:
        original = self._prose(rng, num_tokens * 5 // 8)
        between = self._ids("\n\nThe same text once more:\n\n")
        again = num_tokens - len(original) - len(between)
        return original + between + original[:again]

    def _retrieval(self, rng: _Rng, num_tokens: int) -> list[int]:
        documents = self._documents(rng, num_tokens)
        questions = [
            f"\nQuestion: {fact.question}\nAnswer: {fact.answer}"
            for document in documents
            for fact in document.facts
        ]
        rng.shuffle(questions)
        end = self._ids("\n".join(questions[:4]))
        text = self._first(("\n\n" + document.text for document in documents), num_tokens - len(end))
        return text + end

    def _turns(self, rng: _Rng, num_tokens: int) -> list[int]:
        turns = []
        for document in self._documents(rng, num_tokens):
            for i, fact in enumerate(document.facts):
                about = document.text + "\n\n" if i == 0 else ""
                turns.append(
                    f"<|im_start|>user\n{about}{fact.question}<|im_end|>\n"
                    f"<|im_start|>assistant\n{fact.answer}<|im_end|>\n"
                )
        return self._first(turns, num_tokens)

    def _pairs(self, rng: _Rng, num_tokens: int) -> list[int]:
        lines, half = list[str](), list[int]()
        while len(half) < num_tokens // 2:
            key = "".join(rng.choices("bcdfghklmnprstvwz", k=2)) + rng.choice("aeiou") + rng.choice("lnrst")
            lines.append(f"{key}-{rng.randrange(100, 1000)}: {rng.randrange(10**7, 10**8)}\n")
            half += self._ids(lines[-1])
        first = [token for line in lines for token in self._ids(line)]
        rng.shuffle(lines)
        return first + self._first(["\n", *lines], num_tokens - len(first))

    def _documents(self, rng: _Rng, num_tokens: int) -> list[Document]:
        return make_documents(
            num_tokens // 400 + 2, seed=rng.randrange(1 << 30), num_tokens=lambda text: len(self._ids(text))
        )

    def _first(self, parts: Any, num_tokens: int) -> list[int]:
        ids: list[int] = []
        for part in parts:
            ids += self._ids(part)
            if len(ids) >= num_tokens:
                break
        return ids[:num_tokens]


@cache
def _chapters() -> tuple[str, ...]:
    """The language reference, every paragraph in the longest of the chapters that print it."""
    from pydoc_data.topics import topics

    seen: set[str] = set()
    chapters = []
    for chapter in sorted(topics.values(), key=lambda text: (-len(text), text)):
        new = [paragraph for paragraph in chapter.split("\n\n") if paragraph.strip() not in seen]
        seen.update(paragraph.strip() for paragraph in new)
        chapters.append("\n\n".join(new))
    return tuple(chapters)


def _sources(rng: _Rng) -> Iterator[str]:
    for name in rng.share_of(_MODULES):
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and found.origin.endswith(".py"):
            text = Path(found.origin).read_text(encoding="utf-8")
            yield "\n" + _from_somewhere(rng, text)


def _from_somewhere(rng: random.Random, text: str) -> str:
    """At least the second half of a text."""
    return text[rng.randrange(len(text) // 2 + 1) :]
