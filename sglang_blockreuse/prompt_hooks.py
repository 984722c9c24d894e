"""What the server says of a marked prompt is of the prompt that it computes, in which no separator stands.

Echoed text is spelled by the echoed tokens, and whoever counts tokens beforehand gets the number that a request has.
Where the host tokenises a chat and no hook of ours could cut it, a separator is refused and not read as text.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any

from .blocks.mark import cut_at_separator, joined
from .blocks.request import RequestError
from .tokenizer_hooks import blocks_config, mentions, tokenize_pieces

# -- echo of /v1/completions -------------------------------------------------------------------


def echo_prompts(result: list[str], completions: Any, request: Any) -> list[str]:
    """AFTER OpenAIServingCompletion._prepare_echo_prompts."""
    return [_without_separators(completions, request, text) for text in result]


def echo_text(result: str, completions: Any, request: Any, index: int) -> str:
    """AFTER OpenAIServingCompletion._get_echo_text, its twin for streams."""
    return _without_separators(completions, request, result)


def _without_separators(completions: Any, request: Any, text: str) -> str:
    separator = _separator(completions.tokenizer_manager)
    prompt = request.prompt
    # ids that spell a separator are ids, and were computed
    is_text = isinstance(prompt, str) or isinstance(prompt[0], str)
    return joined(cut_at_separator(text, separator)) if separator is not None and is_text else text


# -- /v1/tokenize and the gRPC call of that name -----------------------------------------------


async def tokenize(
    original: Callable[..., Awaitable[Any]], serving: Any, adapted: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND OpenAIServingTokenize._handle_non_streaming_request."""
    response = await original(serving, adapted, request, raw_request)
    prompts = request.prompt if isinstance(request.prompt, list) else [request.prompt]
    separator = _separator(serving.tokenizer_manager)
    marked = [isinstance(p, str) and separator is not None and separator in p for p in prompts]
    if request.messages is not None or not any(marked) or not hasattr(response, "tokens"):
        return response
    options = {"add_special_tokens": request.add_special_tokens}
    whole = response.tokens if isinstance(request.prompt, list) else [response.tokens]
    try:
        found = [
            _ids(serving.tokenizer_manager, prompt, options) if cut else ids
            for prompt, cut, ids in zip(prompts, marked, whole, strict=True)
        ]
    except RequestError as error:
        return serving.create_error_response(str(error))
    counts = [len(ids) for ids in found]
    is_one = isinstance(request.prompt, str)
    return response.model_copy(
        update={"tokens": found[0], "count": counts[0]} if is_one else {"tokens": found, "count": counts}
    )


def tokenize_grpc(
    original: Callable[..., str], handle: Any, text: str, add_special_tokens: bool = True
) -> str:
    """AROUND RuntimeHandle.tokenize; raises RequestError where a request with this text would."""
    answer = original(handle, text, add_special_tokens)
    manager = handle.tokenizer_manager
    separator = _separator(manager)
    if separator is None or separator not in text:
        return answer
    ids = _ids(manager, text, {"add_special_tokens": add_special_tokens})
    spelled = joined(cut_at_separator(text, separator))
    return json.dumps({**json.loads(answer), "tokens": ids, "count": len(ids), "input_text": spelled})


def _ids(manager: Any, text: str, options: dict[str, Any]) -> list[int]:
    separator = _separator(manager)
    assert separator is not None
    return tokenize_pieces(manager.tokenizer, cut_at_separator(text, separator), options).ids


# -- a chat that nobody cuts -------------------------------------------------------------------


async def ollama_chat(
    original: Callable[..., Awaitable[Any]], serving: Any, request: Any, raw_request: Any
) -> Any:
    """AROUND OllamaServing.handle_chat, whose template goes from messages to ids at once."""
    if mentions(request.messages, _separator(serving.tokenizer_manager)):
        from fastapi import HTTPException

        raise HTTPException(
            HTTPStatus.BAD_REQUEST,
            "blockreuse: the messages hold separators, which are not read in /api/chat. Use /v1/chat/completions, or "
            "/api/generate.",
        )
    return await original(serving, request, raw_request)


def _separator(manager: Any) -> str | None:
    config = blocks_config(manager)
    return None if config is None else config.separator
