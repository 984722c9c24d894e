"""What a test sees of a running server: its counters, its pool, the error of an answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from prompts import ask

from sglang_blockreuse.server_process import Server


def state_of(server: Server) -> dict[str, Any]:
    """What block reuse says of itself in /server_info."""
    found: dict[str, Any] = server.get("/server_info")["internal_states"][0]["blockreuse"]
    return found


def counts(server: Server) -> dict[str, float]:
    """Counters since the server's start; one that never rose is absent."""
    found: dict[str, float] = state_of(server)["counts"]
    return found


def risen(server: Server, before: Mapping[str, float], name: str) -> float:
    return counts(server).get(name, 0) - before.get(name, 0)


def decode(server: Server, ids: Sequence[int], **options: Any) -> dict[str, Any]:
    """A greedy answer whose decode steps start from a dense prefill; leaves the tree empty."""
    answer = ask(server, ids, new_tokens=12, **options)
    server.flush_cache()
    return answer


def error(server: Server, ids: Sequence[int], answer: Mapping[str, Any]) -> float:
    """Largest difference of the answer's log-probabilities to those of a dense prefill of the same text."""
    tokens = answer["output_ids"]
    oracle = ask(server, [*ids, *tokens], new_tokens=1, logprob_start_len=len(ids) - 1)
    server.flush_cache()
    want = [value for value, *_ in oracle["meta_info"]["input_token_logprobs"] if value is not None]
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]]
    assert len(want) == len(got) == len(tokens)
    return max(abs(a - b) for a, b in zip(got, want, strict=True))
