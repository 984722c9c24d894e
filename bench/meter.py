"""Measures one context under one policy and budget: the oracle's answer forced, one request each."""

from __future__ import annotations

import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from contexts import Context
from homes import Homes
from records import Log
from tqdm import tqdm

from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.demo.client import EndOfTurn, Position, Scored, score, usage_of
from sglang_blockreuse.demo.compare import kl_divergence
from sglang_blockreuse.demo.prompts import Prompt
from sglang_blockreuse.server_process import Server

NUM_TOP = 200  # tokens of the oracle that are compared one by one, at most; the others are one event
COVERED = 0.9999  # probability beyond which fewer are enough
EXACT = {"blockreuse_mode": "exact"}
# How SGLang marks its own warm-up requests, which publish nothing to the tree: so no measurement finds what an earlier
# one repaired. A repaired head of a block that follows the exact prefix is exact, and would lengthen it.
TRACELESS = {"bootstrap_host": "2.2.2.2"}

Params = dict[str, Any]  # a request's custom_params


@dataclass(frozen=True)
class Arm:
    """One way to answer."""

    policy: str  # none: nothing is repaired
    budget: float | None  # None: the server's

    @property
    def name(self) -> str:
        return self.policy if self.budget is None else f"{self.policy} {self.budget:g}"


@dataclass(frozen=True)
class Forced:
    """A continuation and the oracle's distributions along it, cut to what is compared."""

    kind: str  # oracle | reference
    ids: tuple[int, ...]
    positions: tuple[Position, ...]

    @property
    def support(self) -> list[int]:
        return sorted({token for position in self.positions for token in position.logprobs} | set(self.ids))


class Meter:
    """Measures contexts on one server and writes every measurement to the log.

    homes: how the server compiles them.
    """

    def __init__(self, server: Server, *, homes: Homes, end: EndOfTurn, log: Log, label: str) -> None:
        self._homes = homes
        self._server = server
        self._end = end
        self._log = log
        self._label = label
        self._knows_question = knows_question(server)

    def oracle(self, context: Context, num_new_tokens: int, *, reference: bool = True) -> list[Forced]:
        """The full prefill's greedy answer and, with `reference`, the known one; its distributions along both.

        Also logs the floor: how far a full prefill is from itself, computed in other pieces.
        """
        self._server.flush_cache()
        answer = self._server.generate(
            input_ids=list(context.prompt.input_ids),
            sampling_params={"temperature": 0, "max_new_tokens": num_new_tokens, "custom_params": EXACT},
        )
        ids = self._end.cut(answer["output_ids"])
        forced = [self._forced(context, "oracle", ids)]
        if reference and context.reference_ids and ids[: len(context.reference_ids)] != context.reference_ids:
            forced.append(self._forced(context, "reference", context.reference_ids))
        self._server.flush_cache()
        for one in forced:
            again = self._score(context, one, EXACT)
            self._record(context, Arm("full", 1.0), one, again, problem=None, seconds=0.0)
        return forced

    def run(
        self,
        contexts: Sequence[Context],
        oracles: dict[str, list[Forced]],
        arms: Sequence[Arm],
        *,
        decode: bool = False,
    ) -> None:
        """Measure every context under every arm. With `decode` the answer is generated instead of forced.

        The documents are compiled and the exact prefix computed once per context; measurements leave no trace.
        """
        with tqdm(total=len(contexts) * len(arms), desc="measure", file=sys.stderr) as bar:
            for context in contexts:
                self._show(context)
                for arm in arms:
                    bar.set_postfix_str(f"{context.name} {arm.name}", refresh=False)
                    for forced in oracles[context.name][: 1 if decode else None]:
                        self._measure(context, arm, forced, self._decode if decode else self._score)
                    bar.update()

    def _show(self, context: Context) -> None:
        """Let the server see the documents on an empty tree, by requests whose tau no measurement shares."""
        self._server.flush_cache()
        earlier = self._homes.earlier(context)
        for prompt in [context.prompt] if earlier is None else [earlier, context.prompt]:
            self._show_prompt(prompt)

    def _show_prompt(self, prompt: Prompt) -> None:
        marks = {"blockreuse_spans": list(prompt.spans), "blockreuse_policy": "seam", "blockreuse_tau": 0}
        self._server.generate(
            input_ids=list(prompt.input_ids),
            sampling_params={"temperature": 0, "max_new_tokens": 1, "custom_params": marks},
        )

    def _measure(
        self, context: Context, arm: Arm, forced: Forced, ask: Callable[[Context, Forced, Params], Scored]
    ) -> None:
        started = time.perf_counter()
        params = self._params(context, arm)
        scored = ask(context, forced, params)
        seconds = time.perf_counter() - started
        found = problem(context, arm, scored.usage, homes=self._homes)
        self._record(context, arm, forced, scored, problem=found, seconds=seconds)

    def _params(self, context: Context, arm: Arm) -> dict[str, Any]:
        params: dict[str, Any] = {}
        if arm.budget is not None:
            params["blockreuse_budget"] = arm.budget
        if arm.policy != "none":
            params["blockreuse_policy"] = arm.policy
        if self._knows_question:
            # the forced answer behind it is nothing that a policy may look at
            params["blockreuse_question"] = [context.prompt.spans[-1], len(context.prompt.input_ids)]
        return params

    def _score(self, context: Context, forced: Forced, params: Params) -> Scored:
        return score(
            self._server,
            context.prompt,
            forced.ids,
            marked=True,
            num_top=1,
            token_ids=forced.support,
            custom_params=params,
            request=TRACELESS,
        )

    def _decode(self, context: Context, forced: Forced, params: Params) -> Scored:
        """Generate; positions behind the first other token are left out, because there the texts differ."""
        answer = self._server.generate(
            input_ids=list(context.prompt.input_ids),
            sampling_params={
                "temperature": 0,
                "max_new_tokens": len(forced.ids),
                "ignore_eos": True,
                "custom_params": {"blockreuse_spans": list(context.prompt.spans), **params},
            },
            return_logprob=True,
            top_logprobs_num=1,
            token_ids_logprob=forced.support,
            **TRACELESS,
        )
        meta = answer["meta_info"]
        pairs = zip(answer["output_ids"], forced.ids, strict=True)
        num_same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
        asked = meta["output_token_ids_logprobs"][: num_same + 1]
        positions = tuple(
            Position({int(token): float(value) for value, token, *_ in step}, top=int(top))
            for step, top in zip(asked, answer["output_ids"], strict=False)
        )
        return Scored(positions, usage_of(meta))

    def _forced(self, context: Context, kind: str, ids: tuple[int, ...]) -> Forced:
        scored = score(
            self._server,
            context.prompt,
            ids,
            marked=True,
            num_top=NUM_TOP,
            token_ids=sorted(set(ids)),
            custom_params=EXACT,
        )
        return Forced(kind, ids, tuple(covering(p) for p in scored.positions))

    def _record(
        self,
        context: Context,
        arm: Arm,
        forced: Forced,
        scored: Scored,
        *,
        problem: str | None,
        seconds: float,
    ) -> None:
        # a generated answer is as long as it is the oracle's
        pairs = list(zip(forced.positions, scored.positions, strict=False))
        num = len(context.reference_ids)
        value = context.reference_ids if forced.ids[:num] == context.reference_ids else ()
        self._log.add(
            {
                "record": "measurement",
                "label": self._label,
                "context": context.name,
                "category": context.category,
                "policy": arm.policy,
                "budget": arm.budget,
                "homes": self._homes.name,
                "forced": forced.kind,
                "kl": [kl_divergence(p, q) for p, q in pairs],
                "same_top": [p.top == q.top for p, q in pairs],
                **_value_found(value, scored.positions),
                "usage": scored.usage,
                "problem": problem,
                "seconds": round(seconds, 3),
            }
        )


def _value_found(value: Sequence[int], positions: Sequence[Position]) -> dict[str, Any]:
    """Whether greedy decoding gives the known value, and its mean negative log-likelihood; None where none is known."""
    if not value:
        return {"exact": None, "nll": None}
    along = list(zip(value, positions, strict=False))
    return {
        "exact": all(position.top == token for token, position in along),
        "nll": -sum(position.logprobs[token] for token, position in along) / len(along),
    }


def covering(position: Position) -> Position:
    """The most probable tokens that hold COVERED of the probability."""
    ordered = sorted(position.logprobs.items(), key=lambda item: -item[1])
    kept, mass = {}, 0.0
    for token, value in ordered:
        kept[token] = value
        mass += math.exp(value)
        if mass >= COVERED:
            break
    return Position(kept, position.top)


def local_tokens(context: Context, homes: Homes, prefix_len: int) -> int | None:
    """Tokens behind the exact prefix that only a home can serve; None where the prefix is longer than it may be.

    The first block is exact where it stands as at home. Otherwise its first tokens may be, where another document in
    front of which it could stand begins with the same. Short blocks are computed: on a server with another
    `min_block_tokens` a prompt of such blocks would be a problem.
    """
    spans = context.prompt.spans
    blocks = list(zip(spans[::2], spans[1::2], strict=True))
    if not homes.has_first:
        prefix_len = blocks.pop(0)[1]
    elif prefix_len >= blocks[0][1]:
        return None
    shortest = BlocksConfig().min_block_tokens
    return sum(end - max(start, prefix_len) for start, end in blocks if end - start >= shortest)


def problem(context: Context, arm: Arm, usage: dict[str, Any] | None, *, homes: Homes) -> str | None:
    """Why a measurement is none; None where it is one."""
    if usage is None:
        return "the server reports no meta_info.blockreuse"
    if usage["skipped_reason"]:
        return f"reuse was skipped: {usage['skipped_reason']}"
    if arm.policy not in ("none", usage["policy"]):
        return f"policy {usage['policy']} chose what was repaired, not {arm.policy}"
    found = usage["reused_tokens"] + usage["repaired_tokens"]
    expected = local_tokens(context, homes, usage["prefix_tokens"])
    if expected is None:
        return f"{usage['prefix_tokens']} tokens are an exact prefix, and with them the first block"
    if found != expected:
        return f"{found} reused and repaired tokens, but the blocks have {expected}"
    return None


def knows_question(server: Server) -> bool:
    """Whether this server takes the span of the question; an older one refuses the key."""
    try:
        server.generate(
            input_ids=[1, 2, 3, 4],
            sampling_params={
                "max_new_tokens": 1,
                "custom_params": {"blockreuse_mode": "off", "blockreuse_question": [3, 4]},
            },
        )
    except requests.HTTPError as error:
        if "blockreuse_question is unknown" in str(error):
            return False
        raise
    return True
