"""A small simulator of replicas: who holds which document, what is computed, how long that takes.

    work of a request   prefill_s * computed tokens + decode_s * answer tokens, on the replica that gets it
    cache of a replica  least recently used, in tokens, beside what the requests in flight occupy
    throughput          requests / work of the busiest replica, so uneven routing costs what it costs

A stock server keeps prefixes, ours keeps homes of documents and the paths of finished requests, in the order in which
the tree touches them. Work is served one after the other at the measured cost per token: no queueing delay, no network,
no failure. Random numbers come from the seed alone.
"""

from __future__ import annotations

import functools
import random
from collections import OrderedDict, deque
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from documents import draw, popularity

Routing = Literal["round_robin", "prefix", "blocks"]
ROUTINGS: tuple[Routing, ...] = ("round_robin", "prefix", "blocks")


@dataclass(frozen=True)
class Workload:
    """Requests of several documents each, by a Zipf law; lengths in tokens."""

    num_requests: int = 1000
    num_documents: int = 50
    per_prompt: int = 6
    zipf: float = 1.0
    doc_len: int = 250
    system_len: int = 45
    question_len: int = 20
    answer_len: int = 16
    shown: bool = False  # every document once in advance, to every replica
    seed: int = 0

    @property
    def prompt_len(self) -> int:
        return self.system_len + self.per_prompt * self.doc_len + self.question_len


@functools.lru_cache(maxsize=8)
def prompts_of(workload: Workload) -> tuple[tuple[int, ...], ...]:
    """Documents of each request, in their order."""
    rng = random.Random(f"{workload.seed}/scale")
    weights = popularity(workload.num_documents, workload.zipf)
    prompts = []
    for _ in range(workload.num_requests):
        order = draw(rng, weights, workload.per_prompt)
        rng.shuffle(order)
        prompts.append(tuple(order))
    return tuple(prompts)


@dataclass(frozen=True)
class Costs:
    """Seconds on one replica of one device."""

    prefill_s: float  # per computed prompt token
    decode_s: float  # per answer token, at the batch sizes of the run it comes from


@dataclass(frozen=True)
class Fleet:
    replicas: int = 1
    pool_len: float = 30_000  # KV slots of a replica of one device
    running: int = 8  # requests in flight per replica
    routing: Routing = "round_robin"
    prefix_threshold: float = (
        0.3  # share of a prompt that must match for routing `prefix`, as SGLang's router has it
    )
    tensor_parallel: int = 1  # devices per replica; KV heads are split, so the pool grows as well
    efficiency: float = 0.8  # share of the ideal speed-up that a further device brings

    @property
    def speed_up(self) -> float:
        return 1 + (self.tensor_parallel - 1) * self.efficiency


@dataclass(frozen=True)
class Server:
    """budget: recomputed share of the tokens up to the last block; None: stock SGLang, exact prefixes only."""

    budget: float | None = 0.1


@dataclass(frozen=True)
class Outcome:
    throughput: float  # requests per second, all replicas together
    document_hits: float  # lookups of documents that were found; of a stock server, behind the same documents
    computed_per_request: float  # tokens, homes included
    imbalance: float  # work of the busiest replica / mean


class Lru:
    """Sizes in tokens under a capacity; the least recently touched leaves first."""

    def __init__(self, capacity: float) -> None:
        self.capacity = capacity
        self.used = 0
        self._sizes: OrderedDict[Hashable, int] = OrderedDict()

    def __contains__(self, key: Hashable) -> bool:
        return key in self._sizes

    def __iter__(self) -> Iterator[Hashable]:
        """From the least recently touched on."""
        return iter(self._sizes)

    def touch(self, key: Hashable, size: int) -> bool:
        """Use `key`, entering it if it is missing; whether it was there. What is larger than all is not kept."""
        if key in self._sizes:
            self._sizes.move_to_end(key)
            return True
        if size <= self.capacity:
            self._sizes[key] = size
            self.used += size
            self.resize(self.capacity)
        return False

    def resize(self, capacity: float) -> None:
        """Evict until the capacity holds."""
        self.capacity = capacity
        while self.used > max(0.0, capacity):
            _, freed = self._sizes.popitem(last=False)
            self.used -= freed


@dataclass(frozen=True)
class Row:
    """A request in flight: what it takes of the pool beside what it shares with the cache."""

    number: int
    order: tuple[int, ...]
    own_len: int


class Replica:
    """One server: its cache, what runs on it, the work it was given."""

    def __init__(self, workload: Workload, fleet: Fleet, server: Server) -> None:
        self._workload, self._fleet, self._server = workload, fleet, server
        self._pool_len = fleet.pool_len * fleet.tensor_parallel
        self.cache = Lru(self._pool_len)
        self._rows: deque[Row] = deque()
        self.prefixes: set[tuple[int, ...]] = set()  # what a prefix router believes to be here
        self.num_served = 0
        self.work_s = 0.0
        if workload.shown:
            self._show()

    def _show(self) -> None:
        """Every document once, one request after the other, as `bench serving` warms a server."""
        num, step = self._workload.num_documents, self._workload.per_prompt
        for start in range(0, num, step):
            self.serve(tuple(range(start, min(start + step, num))))
            self._finish()

    def serve(self, order: tuple[int, ...]) -> tuple[int, int]:
        """A request arrives: (documents found, tokens computed).

        It joins those in flight; the oldest of them finishes first where they are too many, and what it leaves
        becomes part of the cache then, not when it arrived.
        """
        if len(self._rows) == self._fleet.running:
            self._finish()
        self.num_served += 1
        num_found, computed, own_len = (
            self._prefix_only(order) if self._server.budget is None else self._blocks(order)
        )
        self._rows.append(Row(self.num_served, order, own_len))
        self._resize()
        return num_found, computed

    def _prefix_only(self, order: tuple[int, ...]) -> tuple[int, int, int]:
        w = self._workload
        num_found = 0
        while num_found < len(order) and order[: num_found + 1] in self.cache:
            num_found += 1
        for length in range(num_found, 0, -1):
            self.cache.touch(order[:length], w.doc_len)
        found = w.system_len + num_found * w.doc_len
        computed = w.system_len + len(order) * w.doc_len + w.question_len - found
        return num_found, computed, computed + w.answer_len

    def _blocks(self, order: tuple[int, ...]) -> tuple[int, int, int]:
        """Unseen documents are compiled first; the first document of a prompt is an exact prefix then."""
        w = self._workload
        assert self._server.budget is not None
        num_found = self._touch_homes(order)
        compiled = (len(order) - num_found) * w.doc_len
        local = (len(order) - 1) * w.doc_len
        blocks_len = w.system_len + len(order) * w.doc_len
        repaired = min(local, int(self._server.budget * blocks_len))
        own_len = local + w.question_len + w.answer_len
        return num_found, compiled + repaired + w.question_len, own_len

    def _finish(self) -> None:
        """The oldest row's KV goes to the cache, and what it used is touched behind it, so that it leaves later."""
        row = self._rows.popleft()
        self._resize()
        w, length = self._workload, len(row.order)
        if self._server.budget is not None:
            self.cache.touch(("path", row.number), row.own_len)
            self._touch_homes(row.order)
            return
        self.cache.touch(("tail", row.number), w.question_len + w.answer_len)
        for num in range(length, 0, -1):
            self.cache.touch(row.order[:num], w.doc_len)

    def _resize(self) -> None:
        self.cache.resize(self._pool_len - sum(row.own_len for row in self._rows))

    def _touch_homes(self, documents: Sequence[int]) -> int:
        return sum(self.cache.touch((document,), self._workload.doc_len) for document in documents)


def simulate(workload: Workload, costs: Costs, fleet: Fleet, server: Server) -> Outcome:
    """Send the workload's requests through the fleet."""
    replicas = [Replica(workload, fleet, server) for _ in range(fleet.replicas)]
    router = Router(workload, fleet, replicas)
    documents = computed = 0
    for order in prompts_of(workload):
        replica = router.choose(order)
        more_documents, more_computed = replica.serve(order)
        work_s = costs.prefill_s * more_computed + costs.decode_s * workload.answer_len
        replica.work_s += work_s / fleet.speed_up
        documents, computed = documents + more_documents, computed + more_computed
    num, total_s = workload.num_requests, sum(replica.work_s for replica in replicas)
    busiest_s = max(replica.work_s for replica in replicas)
    return Outcome(
        throughput=num / busiest_s,
        document_hits=documents / (num * workload.per_prompt),
        computed_per_request=computed / num,
        imbalance=busiest_s * fleet.replicas / total_s,
    )


class Router:
    """Chooses a replica; never one that is far behind the others, as SGLang's router does.

    round_robin  in turn
    prefix       the one that got the longest equal beginning before, if that is at least the threshold's share of the
                 prompt, else the one that was given the fewest beginnings: the rule of SGLang's `cache_aware`
    blocks       the one that holds most of the documents, wherever they stood: what marks would allow a router
    """

    SLACK = 1.1  # work of a replica / mean beyond which it gets nothing new

    def __init__(self, workload: Workload, fleet: Fleet, replicas: Sequence[Replica]) -> None:
        self._workload, self._fleet, self._replicas = workload, fleet, replicas
        self._num_routed = 0

    def choose(self, order: tuple[int, ...]) -> Replica:
        self._num_routed += 1
        if self._fleet.routing == "round_robin" or len(self._replicas) == 1:
            return self._replicas[self._num_routed % len(self._replicas)]
        mean_s = sum(r.work_s for r in self._replicas) / len(self._replicas)
        free = [r for r in self._replicas if r.work_s <= self.SLACK * mean_s] or list(self._replicas)
        chosen = (
            self._by_prefix(order, free) if self._fleet.routing == "prefix" else self._by_blocks(order, free)
        )
        chosen.prefixes.update(order[:n] for n in range(1, len(order) + 1))
        return chosen

    def _by_prefix(self, order: tuple[int, ...], free: Sequence[Replica]) -> Replica:
        def matched(replica: Replica) -> int:
            return max((n for n in range(1, len(order) + 1) if order[:n] in replica.prefixes), default=0)

        best = max(free, key=matched)
        w = self._workload
        # the router sees text before the template is applied, system prompt included
        share = (w.system_len + matched(best) * w.doc_len) / w.prompt_len
        if matched(best) and share > self._fleet.prefix_threshold:
            return best
        return min(free, key=lambda r: (len(r.prefixes), r.work_s))

    def _by_blocks(self, order: tuple[int, ...], free: Sequence[Replica]) -> Replica:
        return max(free, key=lambda r: (sum((document,) in r.cache for document in order), -r.work_s))


def expected_hits(workload: Workload) -> float:
    """Share of document lookups that an unbounded cache answers, one document per prompt, nothing shown before.

    The k-th request finds document i if one of the k-1 before it wanted it:

        1/n * sum_k sum_i p_i (1 - (1 - p_i)^(k-1))
    """
    if workload.per_prompt != 1 or workload.shown:
        raise ValueError("the closed form is for one document per prompt and a cold start")
    n = workload.num_requests
    weights = popularity(workload.num_documents, workload.zipf)
    # sum over k of the geometric series
    return 1 - sum(p * (1 - (1 - p) ** n) / p for p in weights) / n
