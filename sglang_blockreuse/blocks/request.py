"""Reads a request's `custom_params`: which blocks it marks and how they may be reused."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from operator import le, lt
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
    "blockreuse_explain",
)


class RequestError(ValueError):
    """A request's marks are malformed; the client gets the message with HTTP 400."""


def parse_options(
    params: Mapping[str, Any] | None, *, prompt_len: int, config: BlocksConfig, was_cut: bool = False
) -> BlockOptions:
    """Validate the `blockreuse_*` entries of `custom_params`.

    Entries of others are left alone. Without a mode, a request is in mode `reuse`,
    which changes nothing where no span is given. Marks speak of the prompt as it was sent: where the host cut its
    end off (was_cut), they are cut with it. Raises RequestError.
    """
    if params is not None and not isinstance(params, Mapping):
        raise RequestError(f"custom_params is {short(params)}, but it must be an object with keys.")
    # null means the same as leaving a key out
    given = {
        k: v
        for k, v in (params or {}).items()
        if isinstance(k, str) and k.startswith(PREFIX) and v is not None
    }
    unknown = sorted(given.keys() - set(KEYS))
    if unknown:
        raise RequestError(f"custom_params.{short(unknown[0])[1:-1]} is unknown. Allowed: {', '.join(KEYS)}.")

    mode = given.get("blockreuse_mode", "reuse")
    if mode not in MODES:
        raise RequestError(f"blockreuse_mode is {short(mode)}, but it must be one of {', '.join(MODES)}.")
    _check_parts(given.get("blockreuse_parts", False))
    explain = given.get("blockreuse_explain", False)
    if not isinstance(explain, bool):
        raise RequestError(f"blockreuse_explain is {short(explain)}, but it must be true or false.")
    policy = given.get("blockreuse_policy", config.policy)
    if policy not in POLICIES:
        raise RequestError(
            f"blockreuse_policy is {short(policy)}, but it must be one of {', '.join(POLICIES)}."
        )
    tau = given.get("blockreuse_tau")
    if tau is not None and not (_is_int(tau) and 0 <= tau <= MAX_TOKENS):
        raise RequestError(f"blockreuse_tau is {short(tau)}, but it must be a number of tokens, 0 or more.")
    budget = given.get("blockreuse_budget")
    if budget is not None and not is_budget(budget):
        raise RequestError(f"blockreuse_budget is {short(budget)}, but it must be {BUDGET_RULE}.")
    if tau is None and budget is None:
        tau = config.tau
    sent_len = sys.maxsize if was_cut else prompt_len
    sent = parse_spans(given.get("blockreuse_spans"), prompt_len, sent_len=sent_len)
    spans = tuple(part for span in sent if len(part := span.clip(0, prompt_len))) if was_cut else sent
    question = _parse_question(given.get("blockreuse_question"), sent_len)
    if mode == "compile" and not sent:
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
        question=None if question is None else question.clip(0, prompt_len) or None,
        explain=explain,
        num_cut=len(sent) - len(spans),
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


def parse_spans(flat: Any, prompt_len: int, *, sent_len: int | None = None) -> tuple[Interval, ...]:
    """`[s1, e1, s2, e2, ...]` -> intervals; ascending, disjoint, inside [0, sent_len).

    sent_len: of the prompt before the host cut it, where it did. Of the spans behind the cut the first is enough.
    """
    if flat is None:
        return ()
    # so many disjoint spans that one of them is wrong, or lies behind the cut; however many a client sends
    is_list = isinstance(flat, list | tuple)
    first = flat[: 2 * (prompt_len + 1)] if is_list else flat
    if not is_list or not set(map(type, first)) <= {int}:
        raise RequestError(
            f"blockreuse_spans is {short(first)}, but it must be a flat list of integers "
            "[start1, end1, start2, end2, ...], half-open token positions."
        )
    if len(flat) % 2:
        raise RequestError(f"blockreuse_spans has {len(flat)} numbers, but starts and ends come in pairs.")
    prompt_len = prompt_len if sent_len is None else sent_len
    starts, ends = first[::2], first[1::2]
    if all(map(lt, starts, ends)) and all(map(le, (0, *ends), (*starts, prompt_len))):
        return tuple(map(Interval, starts, ends))
    raise RequestError(_what_is_wrong(starts, ends, prompt_len))


def _what_is_wrong(starts: Sequence[int], ends: Sequence[int], prompt_len: int) -> str:
    """The first span that is not in its place."""
    before = (0, *ends)
    at = next(
        i for i, (s, e) in enumerate(zip(starts, ends, strict=True)) if not before[i] <= s < e <= prompt_len
    )
    where = f"blockreuse_spans[{2 * at}:{2 * at + 2}] = {short([starts[at], ends[at]])}"
    if starts[at] >= ends[at]:
        return f"{where} is empty or reversed. A span is [start, end) with start < end."
    if starts[at] < 0 or ends[at] > prompt_len:
        return f"{where} reaches outside the prompt of {prompt_len} tokens (0..{prompt_len})."
    return (
        f"{where} begins before position {before[at]}, where the span before it ends. "
        "Give spans in ascending order without overlap."
    )


def check_extra_key(extra_key: str | None) -> None:
    """Refuse a namespace of ours, which holds local KV. Raises RequestError."""
    if extra_key is not None and extra_key.startswith(PATH_PREFIX):
        raise RequestError(
            f"extra_key is {short(extra_key)}, but keys that begin with {PATH_PREFIX!r} are reserved. "
            "Choose another one."
        )


def check_prompt(tokens: Sequence[int], *, vocab_size: int, logprob_start_len: int) -> None:
    """Refuse what the host lets through and then dies of. Raises RequestError."""
    outside = next(
        (t for t in (min(tokens, default=0), max(tokens, default=0)) if not 0 <= t < vocab_size), None
    )
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
