"""Mixed requests whose answers can be checked under load: what a soak and the load test send."""

from __future__ import annotations

import concurrent.futures
import contextlib
import random
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import requests
from tqdm import tqdm

from sglang_blockreuse.demo.client import usage_of
from sglang_blockreuse.server_process import Server

# kind of request → how often it is sent
WEIGHTS = {"reuse": 45, "exact": 15, "unmarked": 15, "aborted": 8, "closed": 7, "malformed": 10}
NUM_TOP = 20
TIMEOUT_S = 600.0
TOKEN_KINDS = ("prefix", "reused", "repaired", "fresh")


@dataclass(frozen=True)
class Case:
    """A prompt and its answer, taken while nothing else ran."""

    ids: list[int]
    spans: list[int]
    reference: dict[str, Any]


@dataclass(frozen=True)
class Outcome:
    kind: str
    problem: str | None  # what went wrong
    seconds: float


def greedy(num_new_tokens: int, **custom_params: Any) -> dict[str, Any]:
    """Sampling parameters of an answer of a fixed length."""
    sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
    return {**sampling, "custom_params": custom_params} if custom_params else sampling


def scored(server: Server, ids: Sequence[int], num_new_tokens: int, **custom_params: Any) -> dict[str, Any]:
    """A greedy answer with its log-probabilities."""
    return server.generate(
        input_ids=list(ids),
        sampling_params=greedy(num_new_tokens, **custom_params),
        return_logprob=True,
        top_logprobs_num=NUM_TOP,
    )


def take_references(
    server: Server, prompts: Sequence[tuple[list[int], list[int]]], num_new_tokens: int
) -> list[Case]:
    """Answer each prompt alone, on an empty tree, without block reuse; leaves the tree empty."""
    cases = []
    for ids, spans in tqdm(prompts, desc="references", file=sys.stderr):
        server.flush_cache()
        cases.append(Case(ids, spans, scored(server, ids, num_new_tokens, blockreuse_mode="off")))
    server.flush_cache()
    return cases


def same_up_to_a_tie(got: Mapping[str, Any], reference: Mapping[str, Any], *, tie: float) -> bool:
    """Equal token ids; where they part, the reference had no preference between the two tokens.

    tie: nats that count as none. Behind the first difference the texts differ, so nothing is compared.
    """
    for step, (a, b) in enumerate(zip(got["output_ids"], reference["output_ids"], strict=True)):
        if a != b:
            top = reference["meta_info"]["output_top_logprobs"][step]
            known = {token: value for value, token, *_ in top}
            return a in known and known[b] - known[a] <= tie
    return True


class MixedTraffic:
    """Sends request `number`; kind, prompt and marks follow from the number alone."""

    def __init__(
        self,
        server: Server,
        cases: Sequence[Case],
        *,
        policies: Sequence[str],
        num_new_tokens: int,
        tie: float,
        seed: int = 0,
    ) -> None:
        self._server = server
        self._cases = cases
        self._policies = policies
        self._num_new_tokens = num_new_tokens
        self._tie = tie
        self._seed = seed

    def run(self, number: int) -> Outcome:
        rng = random.Random(f"{self._seed}/{number}")
        (kind,) = rng.choices(list(WEIGHTS), weights=list(WEIGHTS.values()))
        started = time.perf_counter()
        try:
            problem = getattr(self, f"_{kind}")(rng.choice(self._cases), rng, number)
        except requests.RequestException as error:
            problem = f"{type(error).__name__}: {error}"
        return Outcome(
            kind, problem and f"request {number}, {kind}: {problem}", time.perf_counter() - started
        )

    def _reuse(self, case: Case, rng: random.Random, number: int) -> str | None:
        """Without log-probabilities, so that it may share mixed batches."""
        policy = rng.choice(self._policies)
        marks: dict[str, Any] = {"blockreuse_spans": case.spans, "blockreuse_policy": policy}
        if policy == "seam" and rng.random() < 0.5:
            marks["blockreuse_tau"] = rng.choice([0, 4, 8])
        else:
            marks["blockreuse_budget"] = rng.choice([0.0, 0.05, 0.1, 0.3])
        answer = self._server.generate(
            input_ids=case.ids, sampling_params=greedy(self._num_new_tokens, **marks)
        )
        usage = usage_of(answer["meta_info"]) or {}
        total = sum(usage.get(f"{kind}_tokens", 0) for kind in TOKEN_KINDS)
        if usage.get("skipped_reason") == "internal_error":
            return "an error of ours cost the request its reuse"
        return None if total == len(case.ids) else f"usage adds up to {total} of {len(case.ids)} tokens"

    def _exact(self, case: Case, rng: random.Random, number: int) -> str | None:
        return self._compared(case, blockreuse_mode="exact", blockreuse_spans=case.spans)

    def _unmarked(self, case: Case, rng: random.Random, number: int) -> str | None:
        return self._compared(case)

    def _compared(self, case: Case, **marks: Any) -> str | None:
        answer = scored(self._server, case.ids, self._num_new_tokens, **marks)
        if same_up_to_a_tie(answer, case.reference, tie=self._tie):
            return None
        return f"answers {answer['output_ids']}, unloaded {case.reference['output_ids']}"

    def _malformed(self, case: Case, rng: random.Random, number: int) -> str | None:
        marks = rng.choice(
            [
                {"blockreuse_spans": [9, 3]},
                {"blockreuse_spans": [0, len(case.ids) + 1]},
                {"blockreuse_spans": "all", "blockreuse_mode": "reuse"},
                {"blockreuse_mode": "sometimes"},
                {"blockreuse_budget": 7},
                {"blockreuse_unheard_of": 1},
            ]
        )
        try:
            self._server.generate(input_ids=case.ids, sampling_params=greedy(1, **marks))
        except requests.HTTPError as error:
            status = error.response.status_code
            return None if status == 400 else f"{marks} was answered with HTTP {status}"
        return f"{marks} was accepted"

    def _aborted(self, case: Case, rng: random.Random, number: int) -> str | None:
        """Abort by id wherever the request is by then: queued, compiling, prefilling or decoding."""
        rid = f"mixed-{self._seed}-{number}-"
        body = {"input_ids": case.ids, "rid": rid, "sampling_params": self._long(case)}
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            running = pool.submit(requests.post, f"{self._server.url}/generate", json=body, timeout=TIMEOUT_S)
            time.sleep(rng.uniform(0.0, 1.5))
            requests.post(f"{self._server.url}/abort_request", json={"rid": rid}, timeout=TIMEOUT_S)
            running.result()
        return None

    def _closed(self, case: Case, rng: random.Random, number: int) -> str | None:
        """The client goes away: before the first token, or in the middle of the stream."""
        body = {"input_ids": case.ids, "stream": True, "sampling_params": self._long(case)}
        with (
            contextlib.suppress(requests.ReadTimeout, requests.ConnectionError),
            requests.post(
                f"{self._server.url}/generate", json=body, stream=True, timeout=rng.uniform(0.2, 3.0)
            ) as response,
        ):
            for _, _line in zip(range(rng.randint(1, 12)), response.iter_lines(), strict=False):
                pass
        return None

    def _long(self, case: Case) -> dict[str, Any]:
        return greedy(200, blockreuse_spans=case.spans)


def state_of(server: Server) -> dict[str, Any]:
    """Our counters and the KV pool by owner."""
    state: dict[str, Any] = server.get("/server_info", timeout_s=TIMEOUT_S)["internal_states"][0][
        "blockreuse"
    ]
    return state


def num_retracted(server: Server) -> int:
    """Requests that were taken out of the running batch, by the server's log; a line may say that nobody was."""
    return sum(int(num) for num in re.findall(r"#retracted_reqs: (\d+)", server.log_text()))


def leaks(server: Server, *, wait_s: float = 30.0) -> list[str]:
    """What the drained server still holds; flushes it. Empty where every slot is accounted for and came back."""
    deadline = time.monotonic() + wait_s
    # the last aborted rows are released by a later idle step
    while (pool := state_of(server)["pool"])["protected"] and time.monotonic() < deadline:
        time.sleep(0.5)
    problems = []
    if pool["protected"] or pool["free"] + pool["evictable"] + pool["protected"] != pool["size"]:
        problems.append(f"after the drain: {pool}")
    server.flush_cache()
    pool = state_of(server)["pool"]
    if pool["free"] != pool["size"]:
        problems.append(f"after the flush: {pool}")
    return problems
