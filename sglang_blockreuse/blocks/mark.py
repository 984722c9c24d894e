"""Marks in text become token ids and spans: the prompt is cut, and every piece is tokenised on its own.

A document that is tokenised together with its neighbours has ids that depend on them, because tokenisers merge
across the border. Cut out first, it has the same ids wherever it stands, which is what makes it the same block.

    text      leading <sep> document A <sep> document B <sep> question
    pieces    leading       | document A |    document B |    question
    ids       bos.. + ids     ids             ids             ids            the separators are gone
    spans                     [s1, e1)        [s2, e2)
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .request import RequestError

Tokenize = Callable[[str], Sequence[int]]

# Private-use characters: no white space, so templates do not trim them, and no letters, so none change case.
_OPEN, _CLOSE = "\ue000{}\ue001", "\ue002{}\ue003"


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of the prompt's text that is tokenised on its own."""

    text: str
    is_block: bool


@dataclass(frozen=True, slots=True)
class Marked:
    """A prompt that was cut: its ids, and where its blocks stand."""

    ids: list[int]
    spans: list[int]  # flat [s1, e1, s2, e2, ...], as clients give them


@dataclass(frozen=True, slots=True)
class Fence:
    """Private marks around a block's text, to be found again after a chat template was rendered.

    The nonce makes sure that no text of a client holds them by chance.
    """

    nonce: str = field(default_factory=lambda: secrets.token_hex(8))

    @property
    def opening(self) -> str:
        return _OPEN.format(self.nonce)

    @property
    def closing(self) -> str:
        return _CLOSE.format(self.nonce)

    def around(self, text: str) -> str:
        return f"{self.opening}{text}{self.closing}"


def cut_at_separator(text: str, separator: str) -> list[Piece]:
    """Pieces of `text`; one that is no block where the separator does not occur.

    The text in front of the first separator and the text behind the last one are no blocks, what stands
    between two separators is. Empty blocks are left out.
    """
    first, *rest = text.split(separator)
    if not rest:
        return [Piece(first, False)]
    *middle, last = rest
    return [Piece(first, False), *(Piece(m, True) for m in middle if m), Piece(last, False)]


def joined(pieces: Sequence[Piece]) -> str:
    """The text of the prompt that the pieces make: what its tokens spell."""
    return "".join(piece.text for piece in pieces)


def cut_at_fences(text: str, fence: Fence) -> list[Piece] | None:
    """Pieces of a rendered template; None where the template did not leave the marks in pairs, in order."""
    pieces, position = [], 0
    opening, closing, nonce = fence.opening, fence.closing, fence.nonce
    while (start := text.find(opening, position)) >= 0:
        inside = start + len(opening)
        end = text.find(closing, inside)
        if end < 0:
            return None
        pieces += [Piece(text[position:start], False), Piece(text[inside:end], True)]
        position = end + len(closing)
    pieces.append(Piece(text[position:], False))
    # a mark that stands alone, or that the template escaped
    if any(nonce in piece.text for piece in pieces):
        return None
    return pieces


def encode(pieces: Sequence[Piece], *, with_specials: Tokenize, plain: Tokenize) -> Marked:
    """Tokenise piece by piece.

    with_specials: how the tokeniser encodes a whole prompt; plain: the same without special tokens of its own.
    What the tokeniser puts in front of a prompt stands in front of the first piece, what it puts behind a
    prompt behind the last one. Raises RequestError where a prompt is empty or cannot be cut.
    """
    known = next((piece for piece in pieces if piece.text), None)
    if known is None:
        raise RequestError(
            "the prompt holds nothing but separators. Put documents between them and a question behind."
        )
    head, tail = _specials(list(with_specials(known.text)), list(plain(known.text)))
    ids, spans = head, []
    for piece in pieces:
        tokens = plain(piece.text) if piece.text else ()
        if piece.is_block and len(tokens):
            spans += [len(ids), len(ids) + len(tokens)]
        ids.extend(tokens)
    return Marked(ids + tail, spans)


def _specials(whole: list[int], plain: list[int]) -> tuple[list[int], list[int]]:
    """Tokens in front of and behind `plain` in `whole`."""
    for start in range(len(whole) - len(plain) + 1):
        end = start + len(plain)
        if whole[start:end] == plain:
            return whole[:start], whole[end:]
    raise RequestError(
        "this model's tokeniser encodes a text differently when it adds its special tokens, so a prompt cannot be "
        "cut into pieces. Send input_ids and blockreuse_spans instead of text with marks."
    )


def text_parts(messages: Sequence[Any], *, min_parts: int = 2) -> list[Any]:
    """Text parts of chat messages that consist of at least `min_parts` of them; objects with `.type` and `.text`.

    A last message of the assistant is left alone: the host may continue it as a prefix of the answer.
    """
    found: list[Any] = []
    for index, message in enumerate(messages):
        content = getattr(message, "content", None)
        if not isinstance(content, list | tuple):
            continue
        if index == len(messages) - 1 and getattr(message, "role", None) == "assistant":
            continue
        texts = [part for part in content if isinstance(getattr(part, "text", None), str) and part.text]
        if len(texts) >= min_parts:
            found += texts
    return found


def fence_documents(template_kwargs: Any, fence: Fence) -> dict[str, Any] | None:
    """A copy of `chat_template_kwargs` whose `documents` carry marks; None where it has none.

    A document is a string, or an object whose `text`, `content` or `contents` is one, as chat templates for
    retrieval expect.
    """
    documents = template_kwargs.get("documents") if isinstance(template_kwargs, dict) else None
    if not isinstance(documents, list):
        return None
    marked: list[Any] = []
    count = 0
    for document in documents:
        if isinstance(document, str) and document:
            marked.append(fence.around(document))
            count += 1
            continue
        keys = (
            [k for k in ("text", "content", "contents") if isinstance(document.get(k), str) and document[k]]
            if isinstance(document, dict)
            else []
        )
        count += bool(keys)
        marked.append({**document, keys[0]: fence.around(document[keys[0]])} if keys else document)
    return {**template_kwargs, "documents": marked} if count else None
