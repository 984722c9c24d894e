"""Reads a request's `custom_params`: which blocks it marks and how they may be reused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..config import BUDGET_RULE, MAX_TOKENS, POLICIES, BlocksConfig, is_budget
from ..errors import short
from ..types import MODES, BlockOptions, Interval
from .paths import PREFIX as PATH_PREFIX

PREFIX = "blockreuse_"
KEYS = (
    "blockreuse_mode",
    "blockreuse_spans",
    "blockreuse_parts",
    "blockreuse_policy",
    "blockreuse_tau",
    "blockreuse_budget",
    "blockreuse_question",
)


class RequestError(ValueError):
    """A request's marks are malformed; the client gets the message with HTTP 400."""


def parse_options(params: Mapping[str, Any] | None, *, prompt_len: int, config: BlocksConfig) -> BlockOptions:
    """Validate the `blockreuse_*` entries of `custom_params`.

    Entries of others are left alone. Without a mode, a request is in mode `reuse`,
    which changes nothing where no span is given. Raises RequestError.
    """
    if params is not None and not isinstance(params, Mapping):
        raise RequestError(f"custom_params is {short(params)}, but it must be an object with keys.")
    # null means the same as leaving a key out
    given = {k: v for k, v in (params or {}).items() if str(k).startswith(PREFIX) and v is not None}
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise RequestError(f"custom_params.{short(unknown[0])[1:-1]} is unknown. Allowed: {', '.join(KEYS)}.")

    mode = given.get("blockreuse_mode", "reuse")
    if mode not in MODES:
        raise RequestError(f"blockreuse_mode is {short(mode)}, but it must be one of {', '.join(MODES)}.")
    _check_parts(given.get("blockreuse_parts", False))
    policy = given.get("blockreuse_policy", config.policy)
    if policy not in POLICIES:
        raise RequestError(
            f"blockreuse_policy is {short(policy)}, but it must be one of {', '.join(POLICIES)}."
        )
    tau = given.get("blockreuse_tau")
    if tau is not None and (not _is_int(tau) or not 0 <= tau <= MAX_TOKENS):
        raise RequestError(f"blockreuse_tau is {short(tau)}, but it must be a number of tokens, 0 or more.")
    budget = given.get("blockreuse_budget")
    if budget is not None and not is_budget(budget):
        raise RequestError(f"blockreuse_budget is {short(budget)}, but it must be {BUDGET_RULE}.")
    if tau is None and budget is None:
        tau = config.tau
    spans = parse_spans(given.get("blockreuse_spans"), prompt_len)
    if mode == "compile" and not spans:
        raise RequestError(
            "blockreuse_mode is compile, but the request marks no blocks. Give blockreuse_spans of the documents, or "
            "put separators around them where the server has a separator."
        )
    return BlockOptions(
        mode=mode,
        spans=spans,
        policy=policy,
        tau=tau,
        budget=config.budget if budget is None else float(budget),
        question=_parse_question(given.get("blockreuse_question"), prompt_len),
    )


def _check_parts(parts: Any) -> None:
    """Parts are cut where chat messages are tokenised; what is left of the key here is false or a mistake."""
    if not isinstance(parts, bool):
        raise RequestError(f"blockreuse_parts is {short(parts)}, but it must be true or false.")
    if parts:
        raise RequestError(
            "blockreuse_parts is true, but this prompt does not come from chat messages with content parts. Use it on "
            "/v1/chat/completions, and blockreuse_spans or a separator elsewhere."
        )


def _parse_question(pair: Any, prompt_len: int) -> Interval | None:
    """`[start, end]`: the tokens whose attention chooses what is repaired."""
    if pair is None:
        return None
    if not isinstance(pair, list | tuple) or len(pair) != 2 or not all(_is_int(x) for x in pair):
        raise RequestError(
            f"blockreuse_question is {short(pair)}, but it must be [start, end], token positions."
        )
    start, end = pair
    if not 0 <= start < end <= prompt_len:
        raise RequestError(
            f"blockreuse_question is {short([start, end])}, but it must be a span inside the prompt: "
            f"0 <= start < end <= {prompt_len}."
        )
    return Interval(start, end)


def parse_spans(flat: Any, prompt_len: int) -> tuple[Interval, ...]:
    """`[s1, e1, s2, e2, ...]` -> intervals; ascending, disjoint, inside [0, prompt_len)."""
    if flat is None:
        return ()
    if not isinstance(flat, list | tuple) or not all(_is_int(x) for x in flat):
        raise RequestError(
            f"blockreuse_spans is {short(flat)}, but it must be a flat list of integers "
            "[start1, end1, start2, end2, ...], half-open token positions."
        )
    if len(flat) % 2:
        raise RequestError(f"blockreuse_spans has {len(flat)} numbers, but starts and ends come in pairs.")
    spans = tuple(Interval(s, e) for s, e in zip(flat[::2], flat[1::2], strict=True))
    previous_end = 0
    for i, span in enumerate(spans):
        where = f"blockreuse_spans[{2 * i}:{2 * i + 2}] = {short([span.start, span.end])}"
        if span.start >= span.end:
            raise RequestError(f"{where} is empty or reversed. A span is [start, end) with start < end.")
        if span.start < 0 or span.end > prompt_len:
            raise RequestError(
                f"{where} reaches outside the prompt of {prompt_len} tokens (0..{prompt_len})."
            )
        if span.start < previous_end:
            raise RequestError(
                f"{where} begins before position {previous_end}, where the span before it ends. "
                "Give spans in ascending order without overlap."
            )
        previous_end = span.end
    return spans


def check_extra_key(extra_key: str | None) -> None:
    """Refuse a namespace of ours, which holds local KV. Raises RequestError."""
    if extra_key is not None and extra_key.startswith(PATH_PREFIX):
        raise RequestError(
            f"extra_key is {short(extra_key)}, but keys that begin with {PATH_PREFIX!r} are reserved. "
            "Choose another one."
        )


def check_prompt(tokens: Sequence[int], *, vocab_size: int, logprob_start_len: int) -> None:
    """Refuse what the host lets through and then dies of. Raises RequestError."""
    outside = next((t for t in tokens if not 0 <= t < vocab_size), None)
    if outside is not None:
        raise RequestError(
            f"input_ids holds {short(outside)}, which is no token of the model. Allowed: 0..{vocab_size - 1}."
        )
    if logprob_start_len < -1:
        raise RequestError(
            f"logprob_start_len is {short(logprob_start_len)}, but it must be a position of the prompt, or -1 for none."
        )


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
