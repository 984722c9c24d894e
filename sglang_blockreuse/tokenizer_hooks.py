"""Hooks in the processes that tokenise: marks in text and in chat messages become spans.

A request that carries none of our marks passes through untouched. What is wrong with a mark is a RequestError,
which SGLang answers with HTTP 400.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from .blocks.mark import (
    Fence,
    Marked,
    Piece,
    cut_at_fences,
    cut_at_separator,
    encode,
    fence_documents,
    joined,
    text_parts,
)
from .blocks.request import RequestError
from .config import BlocksConfig
from .errors import short
from .settings import config_of

logger = logging.getLogger(__name__)

SPANS, PARTS = "blockreuse_spans", "blockreuse_parts"


# -- /generate, /v1/completions, sglang.Engine -------------------------------------------------


async def tokenize_one(original: Callable[..., Awaitable[Any]], manager: Any, obj: Any) -> Any:
    """AROUND TokenizerManager._tokenize_one_request."""
    mark_text(manager, obj)
    return await original(manager, obj)


async def tokenize_batch(
    original: Callable[..., Awaitable[Any]], manager: Any, batch_size: int, obj: Any
) -> Any:
    """AROUND TokenizerManager._batch_tokenize_and_process: marked texts are tokenised one by one."""
    if any(_separator_in(manager, obj[i]) is not None for i in range(batch_size)):
        return [await manager._tokenize_one_request(obj[i]) for i in range(batch_size)]
    return await original(manager, batch_size, obj)


def mark_text(manager: Any, obj: Any) -> None:
    """Give a text request with separators its ids and spans."""
    separator = _separator_in(manager, obj)
    if separator is None:
        return
    params = obj.sampling_params or {}
    custom = params.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        return  # the scheduler refuses it by name
    if custom.get(SPANS) is not None:
        raise RequestError(_BOTH)
    if obj.contains_mm_input():
        raise RequestError(_MEDIA)
    pieces = cut_at_separator(obj.text, separator)
    marked = tokenize_pieces(manager.tokenizer, pieces, {})
    # the text goes on with the request: it is that of the ids
    obj.input_ids, obj.text = marked.ids, joined(pieces)
    if marked.spans:
        # a batch may share one dict between its requests
        obj.sampling_params = {**params, "custom_params": {**custom, SPANS: marked.spans}}


def _separator_in(manager: Any, obj: Any) -> str | None:
    """The separator of the server if a generation request's text holds it."""
    from sglang.srt.managers.io_struct import GenerateReqInput

    config = blocks_config(manager)
    if config is None or config.separator is None or not isinstance(obj, GenerateReqInput):
        return None
    is_text = isinstance(obj.text, str) and obj.input_ids is None
    return config.separator if is_text and config.separator in obj.text else None


# -- chat --------------------------------------------------------------------------------------


@dataclass(slots=True)
class _ChatCut:
    """What happens to the rendered text of the chat request at hand."""

    separator: str | None
    fence: Fence | None  # None where nothing was fenced
    num_texts: int = 0  # texts that were encoded while the request was processed
    broken: bool = False  # the template did not leave the fences as they were
    twice: bool = False  # fences and separators in one prompt
    has_separator: bool = False
    spans: list[int] = field(default_factory=list)

    def encode(self, tokenizer: Any, text: str, options: Mapping[str, Any]) -> list[int] | None:
        """Ids of the rendered text; None: it holds no marks."""
        self.num_texts += 1
        self.has_separator = self.separator is not None and self.separator in text
        if self.fence is not None:
            pieces = cut_at_fences(text, self.fence)
            self.broken, self.twice = pieces is None, self.has_separator
            if pieces is None or self.twice:
                return []  # thrown away
        elif self.has_separator:
            assert self.separator is not None
            pieces = cut_at_separator(text, self.separator)
        else:
            return None
        marked = tokenize_pieces(tokenizer, pieces, options)
        self.spans = marked.spans
        return marked.ids


_current: ContextVar[_ChatCut | None] = ContextVar("blockreuse_chat_cut", default=None)


def encode_prompt(original: Callable[..., Any], tokenizer: Any, text: Any, encode_kwargs: Any = None) -> Any:
    """AROUND parallel_prompt_encode, which encodes the text that a chat template rendered."""
    cut = _current.get()
    if cut is None or not isinstance(text, str):
        return original(tokenizer, text, encode_kwargs)
    ids = cut.encode(tokenizer, text, encode_kwargs or {})
    return original(tokenizer, text, encode_kwargs) if ids is None else ids


def process_messages(
    original: Callable[..., Any], chat: Any, request: Any, is_multimodal: bool, **kwargs: Any
) -> Any:
    """AROUND OpenAIServingChat._process_messages: cuts the rendered prompt at its marks."""
    config = blocks_config(chat.tokenizer_manager)
    if config is None:
        return original(chat, request, is_multimodal, **kwargs)
    custom = getattr(request, "custom_params", None)
    custom = custom if isinstance(custom, Mapping) else {}
    wants_parts = _wants_parts(request, custom, config)
    if PARTS in custom:  # it ends here; the scheduler knows spans only
        request.custom_params = {k: v for k, v in custom.items() if k != PARTS}
    if is_multimodal and (custom.get(PARTS) or mentions(request.messages, config.separator)):
        raise RequestError(_MEDIA)
    if is_multimodal or request.input_ids is not None:
        return original(chat, request, is_multimodal, **kwargs)
    fence = Fence() if wants_parts else None
    with _fenced(request, fence) as num_fenced:
        cut = _ChatCut(config.separator, fence if num_fenced else None)
        result = _process(original, chat, request, cut, kwargs)
    if cut.broken:
        logger.warning(
            "blockreuse: the chat template of this model does not keep the text of content parts as it is; "
            "they are served unmarked"
        )
        cut = _ChatCut(config.separator, None)
        result = _process(original, chat, request, cut, kwargs)
    _check(cut, request, custom)
    if cut.spans:
        request.custom_params = {**(request.custom_params or {}), SPANS: cut.spans}
    return result


def _process(
    original: Callable[..., Any], chat: Any, request: Any, cut: _ChatCut, kwargs: dict[str, Any]
) -> Any:
    token = _current.set(cut)
    try:
        result = original(chat, request, False, **kwargs)
    finally:
        _current.reset(token)
    if cut.num_texts == 0 and result.prompt:
        # a conversation template: the host encodes its text by itself
        ids = cut.encode(chat.tokenizer_manager.tokenizer, result.prompt, {})
        result.prompt_ids = result.prompt_ids if ids is None else ids
    return result


def _wants_parts(request: Any, custom: Mapping[str, Any], config: BlocksConfig) -> bool:
    asked = custom.get(PARTS)
    has_spans = custom.get(SPANS) is not None
    if asked is None:
        return config.parts and not has_spans
    if not isinstance(asked, bool):
        raise RequestError(f"{PARTS} is {short(asked)}, but it must be true or false.")
    if asked and has_spans:
        raise RequestError(f"{PARTS} and {SPANS} are both given. Mark the blocks in one way.")
    if asked and request.input_ids is not None:
        raise RequestError(f"{PARTS} is given, but input_ids take the place of the messages. Use {SPANS}.")
    return asked


def _check(cut: _ChatCut, request: Any, custom: Mapping[str, Any]) -> None:
    """Refuse marks that contradict each other, or that nobody could read."""
    if cut.twice:
        raise RequestError(
            f"the chat marks blocks by content parts and by the separator {short(cut.separator)}. "
            f"Mark them in one way; {PARTS}: false leaves parts alone."
        )
    if cut.has_separator and custom.get(SPANS) is not None:
        raise RequestError(_BOTH)
    if cut.num_texts and not _is_left_over(cut, request):
        return
    if cut.fence is not None or mentions(request.messages, cut.separator):
        raise RequestError(
            "blocks are marked, but this chat prompt, or its last message, is not encoded from text that a template "
            f"rendered. Send input_ids and {SPANS}."
        )


def _is_left_over(cut: _ChatCut, request: Any) -> bool:
    """Whether the last message is continued behind the template and still holds a separator."""
    return bool(getattr(request, "continue_final_message", False)) and mentions(
        request.messages[-1:], cut.separator
    )


def mentions(messages: Sequence[Any], separator: str | None) -> bool:
    """Whether a separator stands in a text of chat messages."""
    if separator is None:
        return False
    texts: list[Any] = []
    for message in messages:
        content = getattr(message, "content", None)
        texts += [getattr(p, "text", None) for p in content] if isinstance(content, list) else [content]
    return any(isinstance(text, str) and separator in text for text in texts)


@contextlib.contextmanager
def _fenced(request: Any, fence: Fence | None) -> Iterator[int]:
    """The request with fences around its parts and documents, given back as it was; yields how many."""
    if fence is None:
        yield 0
        return
    parts = [(part, part.text) for part in text_parts(request.messages)]
    template_kwargs = request.chat_template_kwargs
    documents = fence_documents(template_kwargs, fence)
    try:
        for part, text in parts:
            part.text = fence.around(text)
        if documents is not None:
            request.chat_template_kwargs = documents
        yield len(parts) + (documents is not None)
    finally:
        for part, text in parts:
            part.text = text
        if documents is not None:
            request.chat_template_kwargs["documents"] = template_kwargs["documents"]


# -- shared ------------------------------------------------------------------------------------

_BOTH = f"the text holds separators and {SPANS} are given. Mark the blocks in one way."
_MEDIA = (
    f"text marks do not combine with images, video or audio, nor with the chat of a model that takes them. Send "
    f"input_ids and {SPANS}, or leave the marks out."
)


def tokenize_pieces(tokenizer: Any, pieces: Sequence[Piece], options: Mapping[str, Any]) -> Marked:
    """Encode pieces with the model's tokeniser; options: how the host would encode the whole prompt."""
    if tokenizer is None:
        raise RequestError(f"the server runs without a tokeniser. Send input_ids and {SPANS}.")
    return encode(
        pieces,
        with_specials=lambda text: tokenizer.encode(text, **options),
        plain=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )


def blocks_config(manager: Any) -> BlocksConfig | None:
    """The configuration of the server that a tokenizer manager belongs to; None where it is not one of ours."""
    if manager.server_args.radix_cache_backend != "blockreuse":
        return None
    found: BlocksConfig | None = getattr(manager, "_blockreuse_config", None)
    if found is None:
        found = manager._blockreuse_config = config_of(manager.server_args).blocks
    return found
