"""A RAG workload, deterministic by its seed: which documents exist, how often each is wanted, in what order it stands.

    popularity   document of rank r is wanted with weight r^-a (Zipf); a = 0: all alike
    length       uniform between two bounds, per document
    prompt       m different documents, shuffled or in the order of their ranks, then a question
    marks        a share of the requests carries none
    turns        a conversation goes on: each turn adds one document and a question to all that came before
    unseen       cold traffic: no document comes twice

Documents come from the demo's templates or from a JSONL file of your own, one object per line, in any order:

    {"id": "a", "text": "..."}                                       a document
    {"question": "...", "documents": ["a", "b"], "answer": "..."}    a question; the last two keys are optional
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_blockreuse.demo.documents import NUM_NAMES, make_document
from sglang_blockreuse.demo.prompts import Prompt, chat_frame

LENGTH_SLACK = 30  # tokens, about one sentence: how exactly a made document meets its length
STAND_IN_ANSWER = "I do not know."  # an earlier turn's answer where none is known


@dataclass(frozen=True)
class Question:
    text: str
    answer: str
    documents: tuple[int, ...]  # what it needs; empty: anything


@dataclass(frozen=True)
class Source:
    """Documents and what can be asked about them."""

    documents: tuple[str, ...]
    questions: tuple[Question, ...]

    def about(self, document: int) -> list[Question]:
        return [q for q in self.questions if document in q.documents]


@dataclass(frozen=True)
class Law:
    """How requests are drawn; the module's docstring has the words."""

    num_requests: int = 24
    num_documents: int = 50
    per_prompt: int = 6
    zipf: float = 1.0
    shuffle: bool = True
    min_tokens: int = 100
    max_tokens: int = 400
    unmarked: float = 0.0
    turns: int = 1
    unseen: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        rules = [
            (
                "per_prompt",
                1 <= self.per_prompt <= self.num_documents,
                f"from 1 to num_documents ({self.num_documents})",
            ),
            ("zipf", self.zipf >= 0, "0 or more"),
            ("unmarked", 0 <= self.unmarked <= 1, "a share from 0 to 1"),
            ("turns", self.turns >= 1, "1 or more"),
            (
                "min_tokens",
                1 <= self.min_tokens <= self.max_tokens,
                f"from 1 to max_tokens ({self.max_tokens})",
            ),
            ("unseen", not self.unseen or self.turns == 1, "off where conversations have several turns"),
        ]
        for name, holds, allowed in rules:
            if not holds:
                raise ValueError(f"{name} is {getattr(self, name)}, but it must be {allowed}")


@dataclass(frozen=True)
class RagRequest:
    prompt: Prompt
    marked: bool
    conversation: int
    turn: int


@dataclass(frozen=True)
class Marking:
    """What an arm adds to a marked request."""

    policy: str
    budget: float | None  # None: the server's


def made_source(law: Law, num_tokens: Callable[[str], int]) -> Source:
    """Documents of the law's lengths from the demo's templates, each with questions of one fact.

    Raises:
        ValueError: the law wants more documents than there are names.
    """
    num_documents = law.num_documents
    if law.unseen:
        num_documents = max(num_documents, law.num_requests * law.per_prompt)
    if num_documents > NUM_NAMES:
        raise ValueError(
            f"{num_documents} documents are wanted, but there are names for {NUM_NAMES}; use fewer requests or "
            "documents per prompt"
        )
    lengths = random.Random(f"{law.seed}/lengths")
    made = []
    for index in range(num_documents):
        low = lengths.randint(law.min_tokens, max(law.min_tokens, law.max_tokens - LENGTH_SLACK))
        high = min(low + LENGTH_SLACK, law.max_tokens)
        made.append(make_document(index, seed=law.seed, num_tokens=num_tokens, low=low, high=high))
    return Source(
        tuple(document.text for document in made),
        tuple(Question(fact.question, fact.answer, (i,)) for i, d in enumerate(made) for fact in d.facts),
    )


def read_source(path: Path) -> Source:
    """Documents and questions of a JSONL file.

    Raises:
        ValueError: a line is no object of either kind, or names a document that the file lacks; the message has
            the line's number.
    """
    lines = [(n, line) for n, line in enumerate(path.read_text().splitlines(), 1) if line.strip()]
    documents: dict[str, str] = {}
    asked: list[tuple[int, dict[str, Any]]] = []
    for number, line in lines:
        try:
            entry = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}:{number}: not JSON: {error}") from None
        if isinstance(entry, dict) and isinstance(entry.get("text"), str):
            documents[str(entry.get("id", number))] = entry["text"]
        elif isinstance(entry, dict) and isinstance(entry.get("question"), str):
            asked.append((number, entry))
        else:
            raise ValueError(
                f'{path}:{number}: a line is {{"id", "text"}} or {{"question", "documents", "answer"}}'
            )
    index = {name: i for i, name in enumerate(documents)}
    questions = []
    for number, entry in asked:
        names = [str(name) for name in entry.get("documents", [])]
        if missing := [name for name in names if name not in index]:
            raise ValueError(f"{path}:{number}: documents: {missing[0]!r} is no document of this file")
        questions.append(
            Question(entry["question"], str(entry.get("answer", "")), tuple(index[n] for n in names))
        )
    if not documents or not questions:
        raise ValueError(
            f"{path}: {len(documents)} documents and {len(questions)} questions; both are needed"
        )
    return Source(tuple(documents.values()), tuple(questions))


def popularity(num_documents: int, zipf: float) -> list[float]:
    """Weights of ranks 1, 2, …: r^-a, normed to 1."""
    weights = [rank**-zipf for rank in range(1, num_documents + 1)]
    total = sum(weights)
    return [weight / total for weight in weights]


def draw(rng: random.Random, weights: Sequence[float], num: int) -> list[int]:
    """`num` different indices, one after the other by weight, what was drawn left out."""
    left = dict(enumerate(weights))
    chosen = []
    for _ in range(num):
        (index,) = rng.choices(list(left), weights=list(left.values()))
        del left[index]
        chosen.append(index)
    return chosen


class Composer:
    """Puts documents and questions into the chat template of one tokenizer, every document as the same ids."""

    def __init__(self, tokenizer: Any, source: Source) -> None:
        self._tokenizer = tokenizer
        self._before, self._after, self._following = chat_frame(tokenizer)
        self._document_ids = [self.ids(text) for text in source.documents]

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return ids

    def ask(self, order: Sequence[int], question: Question, *, behind: Prompt | None = None) -> Prompt:
        """A prompt of these documents and the question, or the next turn `behind` an earlier prompt."""
        if behind is None:
            ids, spans, documents = self.ids(self._before), [], []
        else:
            reply = f"{behind.answer or STAND_IN_ANSWER}{self._following}"
            ids = [*behind.input_ids, *self.ids(reply)]
            spans, documents = list(behind.spans), list(behind.documents)
        for index in order:
            spans += [len(ids), len(ids) + len(self._document_ids[index])]
            ids += self._document_ids[index]
        ids += self.ids(f"Question: {question.text}{self._after}")
        return Prompt(tuple(ids), tuple(spans), (*documents, *order), question.text, question.answer)


def requests_of(law: Law, source: Source, composer: Composer) -> list[RagRequest]:
    """The measured requests, `law.num_requests` of them; turns of one conversation follow each other.

    Raises:
        ValueError: the source has too few documents for the law.
    """
    needed = law.per_prompt * (law.num_requests if law.unseen else 1)
    if len(source.documents) < needed:
        raise ValueError(
            f"the source has {len(source.documents)} documents, but these requests need {needed}"
        )
    made = _conversations(law, source, composer)
    return [next(made) for _ in range(law.num_requests)]


def warm_up_prompts(law: Law, source: Source, composer: Composer) -> list[Prompt]:
    """Prompts that together show every document once, in the order of the source; none for unseen traffic."""
    if law.unseen:
        return []
    num = len(source.documents)
    windows = [range(start, min(start + law.per_prompt, num)) for start in range(0, num, law.per_prompt)]
    return [composer.ask(window, source.questions[0]) for window in windows]


def _conversations(law: Law, source: Source, composer: Composer) -> Iterator[RagRequest]:
    rng = random.Random(f"{law.seed}/requests")
    weights = popularity(len(source.documents), law.zipf)
    conversation = 0
    while True:
        prompt: Prompt | None = None
        for turn in range(law.turns):
            if law.unseen:
                first = conversation * law.per_prompt
                order = list(range(first, first + law.per_prompt))
            else:
                order = _new_documents(rng, weights, law.per_prompt if turn == 0 else 1, prompt)
            order, question = _question_about(rng, source, order)
            if law.shuffle:
                rng.shuffle(order)
            else:
                order.sort()
            prompt = composer.ask(order, question, behind=prompt)
            yield RagRequest(prompt, rng.random() >= law.unmarked, conversation, turn)
        conversation += 1


def _new_documents(
    rng: random.Random, weights: Sequence[float], num: int, behind: Prompt | None
) -> list[int]:
    """Documents that the conversation has not shown; fewer, and at last none, where all have been."""
    shown = behind.documents if behind else ()
    left = [0.0 if i in shown else weight for i, weight in enumerate(weights)]
    return draw(rng, left, min(num, sum(weight > 0 for weight in left)))


def _question_about(rng: random.Random, source: Source, order: list[int]) -> tuple[list[int], Question]:
    """A question about one of the documents; others it needs take the place of the last drawn."""
    asked = [q for index in order for q in source.about(index)]
    question = rng.choice(asked or [q for q in source.questions if not q.documents] or list(source.questions))
    needed = [index for index in question.documents if index not in order]
    keep = [i for i in order if i in question.documents]
    others = [i for i in order if i not in question.documents]
    room = max(0, len(order) - len(keep) - len(needed))
    return ([*keep, *needed, *others[:room]] if needed else order), question
