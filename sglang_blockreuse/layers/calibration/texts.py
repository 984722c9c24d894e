"""Texts to calibrate on, of five kinds, that need no download: Python's own documentation and sources, and documents
that are made up from a seed.

    prose       a stretch of Python's language reference
    code        a stretch of a standard library module
    copy        prose that is said a second time; the rows stand in the repetition
    retrieval   made-up documents, then questions and their answers
    turns       a conversation about such documents, question by question

Rows are the last tokens of a text. A seed decides the texts of one Python version; seeds below HELD_OUT are for
searching, the others for judging what was found.
"""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from ...demo.documents import Document, make_documents

KINDS = ("retrieval", "code", "copy", "prose", "turns")
HELD_OUT = 1000
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
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is unknown; kinds are {', '.join(KINDS)}")
        rng = random.Random(f"{kind}/{seed}")
        ids: list[int] = getattr(self, f"_{kind}")(rng, num_tokens)
        if len(ids) < num_tokens:
            raise ValueError(f"kind {kind}, seed {seed} has {len(ids)} tokens only, not {num_tokens}")
        return ids[-num_tokens:]

    def _prose(self, rng: random.Random, num_tokens: int) -> list[int]:
        from pydoc_data.topics import topics

        names = sorted(topics)
        rng.shuffle(names)
        return self._first(("\n\n" + topics[name] for name in names), num_tokens)

    def _code(self, rng: random.Random, num_tokens: int) -> list[int]:
        return self._first(_sources(rng), num_tokens)

    def _copy(self, rng: random.Random, num_tokens: int) -> list[int]:
        original = self._prose(rng, num_tokens * 5 // 8)
        between = self._ids("\n\nThe same text once more:\n\n")
        again = num_tokens - len(original) - len(between)
        return original + between + original[:again]

    def _retrieval(self, rng: random.Random, num_tokens: int) -> list[int]:
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

    def _turns(self, rng: random.Random, num_tokens: int) -> list[int]:
        turns = []
        for document in self._documents(rng, num_tokens):
            for i, fact in enumerate(document.facts):
                about = document.text + "\n\n" if i == 0 else ""
                turns.append(
                    f"<|im_start|>user\n{about}{fact.question}<|im_end|>\n"
                    f"<|im_start|>assistant\n{fact.answer}<|im_end|>\n"
                )
        return self._first(turns, num_tokens)

    def _documents(self, rng: random.Random, num_tokens: int) -> list[Document]:
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


def _sources(rng: random.Random) -> Iterator[str]:
    names = list(_MODULES)
    rng.shuffle(names)
    for name in names:
        found = importlib.util.find_spec(name)
        if found is not None and found.origin and found.origin.endswith(".py"):
            text = Path(found.origin).read_text(encoding="utf-8")
            yield "\n" + text[rng.randrange(len(text) // 2) :]
