"""Sends one prompt to one server: timed as a stream, or scored over a given continuation."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests

from ..server_process import Server
from .prompts import Prompt

TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Timed:
    """One streamed answer."""

    ttft_ms: float  # request sent → first token received
    tpot_ms: float  # mean time of each further token
    answer_ids: tuple[int, ...]  # up to and including the end-of-turn token
    answer: str  # without it
    cached_tokens: int  # prompt tokens that SGLang's prefix cache served
    usage: dict[str, Any] | None  # meta_info["blockreuse"]; None from a server without the extension


@dataclass(frozen=True)
class Position:
    """The distribution of one next token, as far as it was asked for."""

    logprobs: dict[int, float]  # token id → natural log of its probability
    top: int  # the most probable token


@dataclass(frozen=True)
class Scored:
    """The distributions along one forced continuation, and what the extension says of the request."""

    positions: tuple[Position, ...]
    usage: dict[str, Any] | None


@dataclass(frozen=True)
class EndOfTurn:
    """The token that ends an answer."""

    token_id: int
    text: str

    def cut(self, ids: Sequence[int]) -> tuple[int, ...]:
        """`ids` up to and including the first end."""
        length = ids.index(self.token_id) + 1 if self.token_id in ids else len(ids)
        return tuple(ids[:length])


def time_prompt(
    server: Server, prompt: Prompt, *, marked: bool, num_new_tokens: int, end: EndOfTurn
) -> Timed:
    """Generate greedily and note when tokens arrive. `marked` adds the spans of the documents."""
    body = _body(prompt.input_ids, prompt, marked=marked, num_new_tokens=num_new_tokens)
    # every answer is equally long, so that times compare; what follows its end is cut off below
    body["sampling_params"] |= {"ignore_eos": True, "skip_special_tokens": False}
    body["stream"] = True
    arrivals: list[float] = []
    last: dict[str, Any] = {}
    sent = time.perf_counter()
    with requests.post(f"{server.url}/generate", json=body, stream=True, timeout=TIMEOUT_S) as response:
        response.raise_for_status()
        for line in response.iter_lines(chunk_size=None):
            if not line.startswith(b"data: {"):
                continue
            arrivals.append(time.perf_counter())
            last = json.loads(line[len(b"data: ") :])
            if "error" in last:
                raise requests.HTTPError(f"/generate: {last['error']}", response=response)
    meta = last["meta_info"]
    num_tokens = int(meta["completion_tokens"])
    return Timed(
        ttft_ms=1e3 * (arrivals[0] - sent),
        tpot_ms=1e3 * (arrivals[-1] - arrivals[0]) / max(1, num_tokens - 1),
        answer_ids=end.cut(last["output_ids"]),
        answer=last["text"].partition(end.text)[0].strip(),
        cached_tokens=int(meta["cached_tokens"]),
        usage=usage_of(meta),
    )


def score(
    server: Server,
    prompt: Prompt,
    continuation: Sequence[int],
    *,
    marked: bool,
    num_top: int,
    token_ids: Sequence[int] = (),
    custom_params: Mapping[str, Any] | None = None,
    request: Mapping[str, Any] | None = None,
) -> Scored:
    """Distributions of the tokens at and after the end of the prompt, along a forced continuation.

    Position 0 is the first answer token given the prompt, position i the next one given
    `continuation[:i]`. Each holds the `num_top` most probable tokens and all of `token_ids`.
    `custom_params` are added to those of a marked request and win over them; `request` holds further keys of
    the request.
    """
    forced = tuple(continuation[:-1])  # what follows its last token is not asked for
    body = _body((*prompt.input_ids, *forced), prompt, marked=marked, num_new_tokens=1)
    if custom_params:
        body["sampling_params"].setdefault("custom_params", {}).update(custom_params)
    body |= {
        "return_logprob": True,
        # input log-probabilities begin one token behind their start: with the first continuation token
        "logprob_start_len": len(prompt.input_ids) - 1 if forced else -1,
        "top_logprobs_num": num_top,
        "token_ids_logprob": list(token_ids) or None,
        **(request or {}),
    }
    meta = server.generate(timeout_s=TIMEOUT_S, **body)["meta_info"]
    tops = [*_forced(meta, "input_top_logprobs", len(forced)), *meta["output_top_logprobs"]]
    asked: list[Any] = [[]] * len(tops)
    if token_ids:
        asked = [*_forced(meta, "input_token_ids_logprobs", len(forced)), *meta["output_token_ids_logprobs"]]
    positions = tuple(_position(top, also) for top, also in zip(tops, asked, strict=True))
    return Scored(positions, usage_of(meta))


def usage_of(meta_info: dict[str, Any]) -> dict[str, Any] | None:
    """The extension's account of a request; the host may wrap it into a list."""
    usage = meta_info.get("blockreuse")
    while isinstance(usage, list):
        usage = usage[-1] if usage else None
    return usage


def _body(input_ids: Sequence[int], prompt: Prompt, *, marked: bool, num_new_tokens: int) -> dict[str, Any]:
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_new_tokens}
    if marked:
        sampling["custom_params"] = {"blockreuse_mode": "reuse", "blockreuse_spans": list(prompt.spans)}
    return {"input_ids": list(input_ids), "sampling_params": sampling}


def _forced(meta: dict[str, Any], key: str, num_positions: int) -> list[Any]:
    return list(meta[key][-num_positions:]) if num_positions else []


def _position(top: list[Any], also: list[Any]) -> Position:
    best = max(top, key=lambda entry: entry[0])
    return Position({int(entry[1]): float(entry[0]) for entry in [*top, *also]}, top=int(best[1]))
