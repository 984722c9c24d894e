"""Contexts of the quality measurement: prompts of 5 to 10 blocks, 1,000 to 3,000 tokens, in six categories.

    A  facts in prose           the demo's documents; the answer is a value that one of them states
    B  two documents            the question names one document, which points to the one that holds the value
    S  codes and names          registers; the answer is a code that occurs once
    L  continuation             chapters of one story in order; the model writes on
    C  chat                     earlier exchanges of a conversation; the user asks for something said there
    K  code                     modules of one project; the model completes a line

Every answer is led in ("The access code of Ada Oakes is"), so that a model that has read the blocks goes on with the
value at once. Seeds are disjoint: what a policy or a constant is tuned on is never what it is judged on.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from context_texts import (
    CONSTANTS,
    FIRST_NAMES,
    FUNCTIONS,
    LAST_NAMES,
    MEMORIES,
    OFFICES,
    OTHER_LAST_NAMES,
    OTHER_OFFICES,
    OTHER_PLACES,
    PLACES,
    PLOT,
    SMALL_TALK,
)

from sglang_blockreuse.demo.documents import Document, Fact, make_document
from sglang_blockreuse.demo.prompts import Prompt, chat_frame

SPLITS = {"calibration": 1_000_000, "held-out": 2_000_000}
MAX_PROMPT_TOKENS = 3000
MIN_BLOCKS, MAX_BLOCKS = 5, 10
MIN_TOKENS, MAX_TOKENS = 130, 380  # of a block, as far as its items reach
LIBRARY_BLOCKS = MIN_BLOCKS


@dataclass(frozen=True)
class Context:
    """One prompt whose answers are compared."""

    name: str  # category, split, seed and number
    category: str
    prompt: Prompt
    reference_ids: tuple[int, ...]  # the known value, as it follows the prompt; empty where none is known
    library: Prompt | None = (
        None  # other documents of the same kind behind the same text, LIBRARY_BLOCKS of them
    )


@dataclass(frozen=True)
class Draft:
    """A context in text: [before | block | block | … | after]."""

    before: str
    blocks: list[str]
    after: str
    reference: str  # with its leading blank; empty where none is known


@dataclass(frozen=True)
class Words:
    """What documents are about; a context and its library share none of it."""

    last_names: tuple[str, ...] = LAST_NAMES
    offices: tuple[str, ...] = OFFICES
    places: tuple[str, ...] = PLACES
    first_document: int = 0  # of the seed's


OTHER_WORDS = Words(OTHER_LAST_NAMES, OTHER_OFFICES, OTHER_PLACES, MAX_BLOCKS)


@dataclass(frozen=True)
class Writer:
    """What a category needs to write a draft."""

    rng: random.Random
    seed: int
    num_tokens: Callable[[str], int]
    frame: tuple[str, str, str]  # the chat template, see chat_frame
    words: Words = Words()

    def num_blocks(self) -> int:
        return self.rng.randint(MIN_BLOCKS, MAX_BLOCKS)

    def length(self) -> int:
        return self.rng.randint(MIN_TOKENS, MAX_TOKENS)

    def fill(self, head: str, items: Iterator[str], *, tail: str = "\n") -> str:
        """`head` and items up to a drawn length."""
        text, length = head, self.length()
        for item in items:
            if self.num_tokens(text + item) > length:
                break
            text += item
        return text + tail

    def chat(self, blocks: list[str], question: str, lead: str, answer: str) -> Draft:
        before, after, _ = self.frame
        return Draft(before, blocks, f"Question: {question}{after}{lead}", f" {answer}")


def facts_in_prose(w: Writer) -> Draft:
    documents = _documents(w)
    document = w.rng.choice(documents)
    fact = w.rng.choice([fact for fact in document.facts if _lead(document, fact)])
    return w.chat([d.text for d in documents], fact.question, _lead(document, fact), fact.answer)


def two_documents(w: Writer) -> Draft:
    """A hop: the sentence to complete begins with "It" or "Its", so that only the first document tells whose it is."""
    documents = _documents(w)
    first, second = w.rng.sample(documents, 2)
    fact = next(fact for fact in second.facts if re.match(r"Its? ", _lead(second, fact)))
    hop = f'The original of this text is bound together with "{second.title}".'
    blocks = [d.text.replace("\n\n", f" {hop}\n\n") if d is first else d.text for d in documents]
    lead = _lead(second, fact)
    question = (
        f'Find the text that "{first.title}" is bound together with, '
        f'and complete a sentence of that text: "{lead} …"'
    )
    return w.chat(blocks, question, lead, fact.answer)


def codes_and_names(w: Writer) -> Draft:
    people = [f"{first} {last}" for first in FIRST_NAMES for last in w.words.last_names]
    w.rng.shuffle(people)
    names = iter(people)
    codes: dict[str, str] = {}

    def entries() -> Iterator[str]:
        for name in names:
            letters = "".join(w.rng.choices("BCDFGHKLMNPQRSTVWXZ", k=3))
            codes[name] = f"{letters}-{w.rng.randint(1000, 9999)}"
            yield f"{name}: locker {w.rng.randint(2, 99)}, access code {codes[name]}.\n"

    offices = w.rng.sample(w.words.offices, w.num_blocks())
    blocks = [w.fill(f"Register of the {office} office\n", entries()) for office in offices]
    name = w.rng.choice([name for name in codes if any(codes[name] in block for block in blocks)])
    return w.chat(blocks, f"What is the access code of {name}?", f"The access code of {name} is", codes[name])


def continuation(w: Writer) -> Draft:
    a, b = w.rng.sample(FIRST_NAMES, 2)
    place = w.rng.choice(w.words.places)
    plot = [sentence.format(a=a, b=b, place=place) for sentence in PLOT]

    def sentences() -> Iterator[str]:
        while True:
            # mostly onwards, now and then a look back, as stories do
            start = w.rng.randrange(len(plot))
            yield from (f"{sentence} " for sentence in plot[start : start + w.rng.randint(2, 5)])

    num = w.num_blocks()
    blocks = [w.fill(f"Chapter {i + 1}\n\n", sentences(), tail="\n\n") for i in range(num)]
    opening = " ".join(w.rng.choice(plot).split()[:6])
    return Draft(
        f"The Quarry of {place}\nA story in {num + 1} chapters\n\n",
        blocks,
        f"Chapter {num + 1}\n\n{opening}",
        "",
    )


def chat(w: Writer) -> Draft:
    known: list[tuple[str, str, str, str]] = []  # what was told, question, lead, value
    places = w.words.places
    facts = iter(w.rng.sample([(p, m) for p in places for m in MEMORIES], len(places) * len(MEMORIES)))

    def exchanges() -> Iterator[str]:
        while True:
            place, (told, question, lead, kind) = next(facts)
            value = _value(w.rng, kind)
            sentence = told.format(place=place, value=value)
            known.append((sentence, question.format(place=place), lead.format(place=place), value))
            yield f"User: {sentence}\nAssistant: Noted.\n"
            for asked, answered in w.rng.sample(SMALL_TALK, 2):
                yield f"User: {asked}\nAssistant: {answered}\n"

    blocks = [w.fill(f"Conversation of day {i + 1}\n", exchanges()) for i in range(w.num_blocks())]
    # what did not fit into its block was not told
    told = [memory for memory in known if any(memory[0] in block for block in blocks)]
    _, question, lead, value = w.rng.choice(told)
    return w.chat(blocks, question, lead, value)


def code(w: Writer) -> Draft:
    values: dict[str, int] = {}

    def parts(name: str) -> Iterator[str]:
        for constant in w.rng.sample(CONSTANTS, 3):
            values[f"{name.upper()}_{constant}"] = value = w.rng.randint(11, 999)
            yield f"{name.upper()}_{constant} = {value}\n"
        while True:
            for function in w.rng.sample(FUNCTIONS, len(FUNCTIONS)):
                yield "\n\n" + function.format(
                    name=name, title=name.capitalize(), number=w.rng.randint(11, 99), sep=w.rng.choice(",;|")
                )

    names = w.rng.sample(w.words.offices, w.num_blocks())
    blocks = [w.fill(f"# file: {name}.py\n", parts(name), tail="\n\n") for name in names]
    constant = w.rng.choice(list(values))
    after = f"# file: tests/test_constants.py\n\n\ndef test_{constant.lower()}():\n    assert {constant} =="
    return Draft(
        "# A small Python project, one module after the other.\n\n", blocks, after, f" {values[constant]}"
    )


CATEGORIES: dict[str, Callable[[Writer], Draft]] = {
    "A": facts_in_prose,
    "B": two_documents,
    "S": codes_and_names,
    "L": continuation,
    "C": chat,
    "K": code,
}


def make_contexts(
    tokenizer: Any, *, split: str, seed: int, per_category: int, categories: Sequence[str] = tuple(CATEGORIES)
) -> list[Context]:
    """`per_category` contexts of each category, the categories taking turns.

    Raises:
        KeyError: an unknown split or category.
    """

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    frame = chat_frame(tokenizer)
    contexts = []
    for number in range(per_category):
        for category in categories:
            name = f"{category}/{split}/{seed}/{number}"
            # documents of their own for every context
            document_seed = SPLITS[split] + 1000 * seed + 100 * list(CATEGORIES).index(category) + number
            draft = _draft(name, category, document_seed, frame, ids)
            others = _draft(f"{name}/library", category, document_seed, frame, ids, OTHER_WORDS)
            library = Draft(draft.before, others.blocks[:LIBRARY_BLOCKS], others.after, "")
            contexts.append(_context(name, category, draft, library, ids))
    return contexts


def _draft(
    name: str,
    category: str,
    seed: int,
    frame: tuple[str, str, str],
    ids: Callable[[str], list[int]],
    words: Words = Words(),
) -> Draft:
    """The first draft that is not too long."""
    for attempt in itertools.count():
        writer = Writer(random.Random(f"{name}/{attempt}"), seed, lambda text: len(ids(text)), frame, words)
        draft = CATEGORIES[category](writer)
        if len(ids(draft.before + "".join(draft.blocks) + draft.after)) <= MAX_PROMPT_TOKENS:
            return draft
    raise AssertionError("unreachable")


def _context(
    name: str, category: str, draft: Draft, library: Draft, ids: Callable[[str], list[int]]
) -> Context:
    reference = tuple(ids(draft.reference)) if draft.reference else ()
    return Context(name, category, _prompt(draft, ids), reference, _prompt(library, ids))


def _prompt(draft: Draft, ids: Callable[[str], list[int]]) -> Prompt:
    tokens, spans = ids(draft.before), []
    for block in draft.blocks:
        start = len(tokens)
        tokens += ids(block)
        spans += [start, len(tokens)]
    tokens += ids(draft.after)
    documents = tuple(range(len(draft.blocks)))
    question = draft.after.strip().splitlines()[0]
    return Prompt(tuple(tokens), tuple(spans), documents, question, draft.reference.strip())


def _documents(w: Writer) -> list[Document]:
    made = []
    for index in range(w.num_blocks()):
        low = w.length()
        index += w.words.first_document
        made.append(make_document(index, seed=w.seed, num_tokens=w.num_tokens, low=low - 30, high=low))
    w.rng.shuffle(made)
    return made


def _lead(document: Document, fact: Fact) -> str:
    """The sentence that states the fact, up to the value; empty where the value opens it."""
    for sentence in re.split(r"(?<=\.)\s", document.text.partition("\n")[2]):
        found = re.search(rf"\b{re.escape(fact.answer)}\b", sentence)
        if found:
            return sentence[: found.start()].strip()
    return ""


def _value(rng: random.Random, kind: str) -> str:
    return {
        "number": str(rng.randint(10_000, 99_999)),
        "small": str(rng.randint(2, 40)),
        "person": f"{rng.choice(FIRST_NAMES)} {rng.choice(LAST_NAMES)}",
        "office": rng.choice(OFFICES),
        "day": str(rng.randint(4, 20)),
    }[kind]
