"""What two answers to one request may differ in, and every field in which they differ besides."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tolerances import FULL_PREFILL_LOGPROB, HIDDEN_STATES

# When it happened, what it is called, what others had left in the tree, how the scheduler chose to serve it.
FREE = frozenset(
    ("id", "queue_time", "cached_tokens", "cached_tokens_details", "num_retractions", "decode_throughput")
)
FREE_ENDINGS = ("_ts", "_time", "_latency", "_wait")
FREE_USAGE = frozenset(("prefix_tokens", "fresh_tokens"))  # their sum is held

# Of a request that asks for no token: the host samples one where a neighbour asks for some, and tells it or not.
UNSAMPLED = (
    "output_token_logprobs",
    "output_token_logprobs_length",
    "output_top_logprobs",
    "output_token_ids_logprobs",
)


@dataclass(frozen=True)
class Difference:
    where: str  # path in the answer
    alone: Any
    among: Any

    def __str__(self) -> str:
        return f"{self.where}: alone {_short(self.alone)}, among neighbours {_short(self.among)}"


def differences(alone: Any, among: Any, *, shared_homes: bool = False) -> list[Difference]:
    """shared_homes: another request may have brought the homes of this one."""
    found = list(_compare("", alone, among))
    free = ["compiled_tokens"] if shared_homes else []
    if all(_answers_nothing(a) for a in (*_each(alone), *_each(among))):
        free += UNSAMPLED
    return [d for d in found if d.where.rpartition(".")[2] not in free]


def first_token_difference(alone: Any, among: Any) -> int | None:
    """Index of the first answer token in which two answers differ; None: they agree, or are no answers."""
    for a, b in zip(_each(alone), _each(among), strict=False):
        ids, others = a.get("output_ids") or [], b.get("output_ids") or []
        if ids != others:
            return next((i for i, (x, y) in enumerate(zip(ids, others, strict=False)) if x != y), None)
    return None


def _each(answer: Any) -> list[Any]:
    answers = answer.get("answer") if isinstance(answer, dict) else None
    return [a for a in (answers if isinstance(answers, list) else [answers]) if isinstance(a, dict)]


def _answers_nothing(answer: dict[str, Any]) -> bool:
    return bool((answer.get("meta_info") or {}).get("completion_tokens") == 0)


def _compare(where: str, a: Any, b: Any) -> Iterator[Difference]:
    key = where.rpartition(".")[2]
    if key in ("input_top_logprobs", "output_top_logprobs") and isinstance(a, list) and isinstance(b, list):
        yield from _compare_top(where, a, b)
    elif key == "hidden_states":
        yield from _compare_hidden(where, a, b)
    elif isinstance(a, dict) and isinstance(b, dict):
        if "prefix_tokens" in a and "prefix_tokens" in b:
            yield from _compare_sum(where, a, b)
        for name in sorted(a.keys() | b.keys()):
            if name in FREE or name.endswith(FREE_ENDINGS) or (name in FREE_USAGE and "reused_tokens" in a):
                continue
            if (name in a) != (name in b):
                yield Difference(f"{where}.{name}", a.get(name, "absent"), b.get(name, "absent"))
            else:
                yield from _compare(f"{where}.{name}", a[name], b[name])
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from _compare(f"{where}[{i}]", x, y)
    elif isinstance(a, float) and isinstance(b, float):
        if not _near(a, b):
            yield Difference(where, a, b)
    elif a != b:
        yield Difference(where, a, b)


def _near(a: float, b: float) -> bool:
    return a == b or abs(a - b) <= FULL_PREFILL_LOGPROB * max(1.0, abs(a))


def _compare_sum(where: str, a: dict[str, Any], b: dict[str, Any]) -> Iterator[Difference]:
    sums = [sum(x[name] for name in FREE_USAGE) for x in (a, b)]
    if sums[0] != sums[1]:
        yield Difference(f"{where}.prefix_tokens + fresh_tokens", *sums)


def _compare_top(where: str, a: list[Any], b: list[Any]) -> Iterator[Difference]:
    """Lists per position of [log-probability, token, text], best first; what ties may change places."""
    if len(a) != len(b):
        yield Difference(f"{where} (positions)", len(a), len(b))
        return
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        if not x or not y or len(x) != len(y):
            if x != y:
                yield Difference(f"{where}[{i}]", x, y)
            continue
        mine, other = ({token: value for value, token, *_ in step} for step in (x, y))
        last = max(min(mine.values()), min(other.values()))
        for token in mine.keys() | other.keys():
            if not _near(mine.get(token, last), other.get(token, last)):
                yield Difference(f"{where}[{i}][token {token}]", mine.get(token), other.get(token))


def _compare_hidden(where: str, a: Any, b: Any) -> Iterator[Difference]:
    """Rows of the prompt's last chunk, which may be cut elsewhere, then one per further token."""
    if not isinstance(a, list) or not isinstance(b, list) or len(a) != len(b):
        yield Difference(f"{where} (entries)", _len(a), _len(b))
        return
    for i, (x, y) in enumerate(zip(a, b, strict=True)):
        mine, other = list(_numbers(x)), list(_numbers(y))
        num = min(len(mine), len(other))
        far = _distance(mine[-num:], other[-num:]) if num else 0.0 if mine == other else float("inf")
        if far > 1.0:
            yield Difference(
                f"{where}[{i}]", f"{len(mine)} numbers", f"{len(other)} numbers, {far:.3g} tolerances away"
            )


def _numbers(entry: Any) -> Iterator[float]:
    """Of an entry, which is a vector or holds vectors at some depth, in order."""
    if not isinstance(entry, list):
        yield entry
        return
    for part in entry:
        yield from _numbers(part)


def _distance(a: list[float], b: list[float]) -> float:
    """In units of the tolerance."""
    absolute, relative = HIDDEN_STATES["atol"], HIDDEN_STATES["rtol"]
    return max(abs(x - y) / (absolute + relative * abs(x)) for x, y in zip(a, b, strict=True))


def _len(x: Any) -> Any:
    return len(x) if isinstance(x, list) else x


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 160 else text[:157] + "..."
