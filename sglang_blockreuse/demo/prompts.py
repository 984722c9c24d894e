"""From documents to prompts: token ids and the spans of the documents in them.

[ template, system message, instruction | document | document | ... | question, template ]
  true prefix, the same in every prompt   spans, each tokenised on its own   always computed
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .documents import Document

SYSTEM = (
    "You are a helpful assistant. You answer questions about the documents that you are given. "
    "Answer in one short sentence and use only what the documents say."
)
INSTRUCTION = "Read these documents.\n\n"
_SPLIT = "\x00"


@dataclass(frozen=True)
class Prompt:
    """One request, ready to be sent."""

    input_ids: tuple[int, ...]
    spans: tuple[int, ...]  # s1, e1, s2, e2, …: half-open, ascending, one pair per document
    documents: tuple[int, ...]  # indices into the pool, in the order in which they stand
    question: str
    answer: str


def chat_frame(tokenizer: Any) -> tuple[str, str, str]:
    """The template's text (before the first document, from a question to its answer, from there to a question)."""
    chat = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": INSTRUCTION + _SPLIT},
        {"role": "assistant", "content": _SPLIT},
        {"role": "user", "content": _SPLIT},
    ]
    template = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    before, _, following, after = template.split(_SPLIT)
    return before, after, following


class PromptMaker:
    """Builds prompts for one tokenizer; every document has the same ids wherever it stands."""

    def __init__(self, tokenizer: Any, documents: Sequence[Document]) -> None:
        self._tokenizer = tokenizer
        self._documents = documents
        before, self._after, _ = chat_frame(tokenizer)
        self._prefix_ids = self._ids(before)
        self._document_ids = [self._ids(document.text) for document in documents]

    @property
    def prefix_len(self) -> int:
        """Tokens before the first document."""
        return len(self._prefix_ids)

    def make(self, order: Sequence[int], *, document: int, fact: int) -> Prompt:
        """Put documents in this order and ask for one fact of one of them."""
        asked = self._documents[document].facts[fact]
        ids, spans = list(self._prefix_ids), []
        for index in order:
            start = len(ids)
            ids += self._document_ids[index]
            spans += [start, len(ids)]
        ids += self._ids(f"Question: {asked.question}{self._after}")
        return Prompt(tuple(ids), tuple(spans), tuple(order), asked.question, asked.answer)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids


def warm_up_prompts(maker: PromptMaker, num_documents: int, *, per_prompt: int) -> list[Prompt]:
    """Prompts that show every document once or more, so that afterwards all of them are known."""
    starts = range(0, num_documents, per_prompt)
    windows = [[(start + i) % num_documents for i in range(per_prompt)] for start in starts]
    return [maker.make(order, document=order[0], fact=0) for order in windows]


def measured_prompts(
    maker: PromptMaker, documents: Sequence[Document], *, num_prompts: int, per_prompt: int, seed: int
) -> list[Prompt]:
    """Prompts of `per_prompt` documents drawn without replacement, in random order, one question each."""
    rng = random.Random(f"{seed}/prompts")
    prompts = []
    for _ in range(num_prompts):
        order = rng.sample(range(len(documents)), per_prompt)
        document = rng.choice(order)
        prompts.append(
            maker.make(order, document=document, fact=rng.randrange(len(documents[document].facts)))
        )
    return prompts
