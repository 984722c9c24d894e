"""One pass over one server: warm up, time every prompt, then score the answers."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ..server_process import Server
from .client import EndOfTurn, Position, Timed, score, time_prompt
from .prompts import Prompt

NUM_TOP = 50  # support of the compared distributions
NUM_BOUND_PROMPTS = 5


@dataclass(frozen=True)
class Workload:
    """What both servers get."""

    warm_up: tuple[Prompt, ...]  # shows every document once
    measured: tuple[Prompt, ...]
    num_new_tokens: int
    num_scored: int  # answer tokens whose distributions are compared
    end: EndOfTurn


@dataclass(frozen=True)
class Bound:
    """What the same server needs to extend an exactly cached prefix: no reuse can be faster than its arithmetic."""

    num_cached: int  # tokens of the prefix
    num_computed: int  # tokens behind it, as many as a measured prompt has repaired and fresh ones (median)
    ttft_ms: tuple[float, ...]


@dataclass(frozen=True)
class Pass:
    """What one server did with the workload; `timed` and `scored` belong to `Workload.measured`."""

    warm_up: tuple[Timed, ...]
    timed: tuple[Timed, ...]
    scored: tuple[tuple[Position, ...], ...]
    bound: Bound | None = None  # of our server


def run_stock(server: Server, work: Workload, tick: Callable[[str], None]) -> Pass:
    """Measure the stock server; its own answers are the continuations that both servers are scored on."""
    warm_up, timed = _time_all(server, work, tick, marked=False)
    scored = []
    for prompt, answer in zip(work.measured, timed, strict=True):
        forced = answer.answer_ids[: work.num_scored]
        scored.append(score(server, prompt, forced, marked=False, num_top=NUM_TOP).positions)
        tick("score")
    return Pass(warm_up, timed, tuple(scored))


def run_extended(server: Server, work: Workload, stock: Pass, tick: Callable[[str], None]) -> Pass:
    """Measure our server on the same prompts with their documents marked, along the stock server's answers."""
    warm_up, timed = _time_all(server, work, tick, marked=True)
    scored = []
    for prompt, answer, reference in zip(work.measured, stock.timed, stock.scored, strict=True):
        forced = answer.answer_ids[: work.num_scored]
        support = sorted({token for position in reference for token in position.logprobs})
        ours = score(server, prompt, forced, marked=True, num_top=NUM_TOP, token_ids=support)
        scored.append(ours.positions)
        tick("score")
    return Pass(warm_up, timed, tuple(scored), time_bound(server, work, timed, tick))


def time_bound(
    server: Server, work: Workload, timed: Sequence[Timed], tick: Callable[[str], None]
) -> Bound | None:
    """Time unmarked prompts of the measured length of which only the last tokens are new; None without usage."""
    usages = [answer.usage for answer in timed if answer.usage]
    if not usages:
        return None
    computed = round(statistics.median(u["repaired_tokens"] + u["fresh_tokens"] for u in usages))
    base = work.measured[0]
    num_cached = max(1, len(base.input_ids) - computed)
    prefix = replace(base, input_ids=base.input_ids[:num_cached], spans=())
    # other tails begin elsewhere in the prompt, so that none of them is cached
    tails = [(base.input_ids * 2)[start : start + computed] for start in range(0, NUM_BOUND_PROMPTS * 97, 97)]
    prompts = [prefix, *(replace(prefix, input_ids=prefix.input_ids + tail) for tail in tails)]
    times = []
    for prompt in prompts:
        times.append(time_prompt(server, prompt, marked=False, num_new_tokens=1, end=work.end).ttft_ms)
        tick("bound")
    # the first one only put the prefix into the cache
    return Bound(num_cached, computed, tuple(times[1:]))


def _time_all(
    server: Server, work: Workload, tick: Callable[[str], None], *, marked: bool
) -> tuple[tuple[Timed, ...], tuple[Timed, ...]]:
    def timed(prompts: Sequence[Prompt], what: str) -> tuple[Timed, ...]:
        answers = []
        for prompt in prompts:
            answers.append(
                time_prompt(server, prompt, marked=marked, num_new_tokens=work.num_new_tokens, end=work.end)
            )
            tick(what)
        return tuple(answers)

    return timed(work.warm_up, "warm up"), timed(work.measured, "time")
