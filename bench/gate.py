"""The quality gate: no speed-up is printed for answers that are not good enough, or not what was asked for."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sglang_blockreuse.demo.prompts import Prompt
from sglang_blockreuse.server_process import Server

# skipped_reason values of exact answers that are no failure: every block was an exact hit, or reuse would not have paid
FINE_OUTCOMES = {"reused", "exact_prefix", "cost_gate"}
UNMARKED_OUTCOMES = {"no_blocks"}


@dataclass(frozen=True)
class Bounds:
    """What a sample of the prompts must hold against mode exact."""

    max_kl: float = 0.15  # nats per answer token, mean
    min_top1: float = 0.9  # share of answer tokens with the same most probable token
    min_first: float = 0.8  # share of answers with the same first token


@dataclass(frozen=True)
class Verdict:
    """A gate's finding; green where `problems` is empty."""

    problems: tuple[str, ...]
    num_answers: int
    mean_kl: float | None = None
    top1: float | None = None
    same_first: float | None = None

    @property
    def green(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "green": self.green}


def judge(measurements: Sequence[Mapping[str, Any]], bounds: Bounds) -> Verdict:
    """Measurements of one arm on the sample, as quality.py records them."""
    if not measurements:
        return Verdict(("no answer was compared",), 0)
    kls = [kl for m in measurements for kl in m["kl"]]
    tops = [same for m in measurements for same in m["same_top"]]
    first = statistics.fmean(m["same_top"][0] for m in measurements)
    mean_kl, top1 = statistics.fmean(kls), statistics.fmean(tops)
    rules = [
        (mean_kl <= bounds.max_kl, f"mean KL is {mean_kl:.3f} nats, allowed {bounds.max_kl:g}"),
        (top1 >= bounds.min_top1, f"top-1 agrees in {top1:.1%}, needed {bounds.min_top1:.0%}"),
        (first >= bounds.min_first, f"first tokens agree in {first:.1%}, needed {bounds.min_first:.0%}"),
    ]
    problems = [f"{m['context']}: {m['problem']}" for m in measurements if m["problem"]]
    problems += [text for holds, text in rules if not holds]
    return Verdict(tuple(problems), len(measurements), mean_kl, top1, first)


def same_answers(stock: Server, ours: Server, prompts: Sequence[Prompt], *, num_new_tokens: int) -> Verdict:
    """Unmarked prompts, each on two empty trees, must be answered in the same tokens."""
    differing = []
    first = []
    for number, prompt in enumerate(prompts):
        answers = []
        for server in (stock, ours):
            server.flush_cache()
            answer = server.generate(
                input_ids=list(prompt.input_ids),
                sampling_params={"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True},
            )
            answers.append(answer["output_ids"])
        first.append(answers[0][0] == answers[1][0])
        if answers[0] != answers[1]:
            differing.append(f"prompt {number}: stock answers {answers[0]}, ours {answers[1]}")
    return Verdict(tuple(differing), len(prompts), same_first=statistics.fmean(first))


def outcome_problems(outcomes: Mapping[str, float], num_marked: int) -> list[str]:
    """Why a timed run with marks is none: requests that were served without reuse, or are not accounted for.

    outcomes: requests by outcome, as the server counted them during the run.
    """
    problems = [
        f"{count:.0f} requests: {name}"
        for name, count in sorted(outcomes.items())
        if name not in FINE_OUTCOMES and name not in UNMARKED_OUTCOMES and count
    ]
    num_fine = sum(outcomes.get(name, 0) for name in FINE_OUTCOMES)
    if not problems and num_fine != num_marked:
        problems.append(f"{num_marked} marked requests were sent, the server counted {num_fine:.0f}")
    return problems
