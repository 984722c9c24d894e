"""Makes unseen blocks reusable: decides which homes to prefill and who waits for them.

`blocks.compile` chooses when a block that nobody has seen is prefilled in its home:

before      ahead of the request that brings it, which waits. Its first token comes later by the prefill of the
            homes, and it is the first to reuse them. A block that is never seen again has cost one prefill of its
            tokens behind the compile prefix; its home is an ordinary node of the tree that LRU evicts.
background  behind the request that brings it, which computes everything now and exactly; from the next one on
            the blocks are reused. A block that is never seen again costs the same prefill, but nobody waits for it
            except for the decode steps that share the device with it.
manual      by requests in `blockreuse_mode: compile` only (`sglang-blockreuse compile` sends them). Blocks that
            nobody compiled cost nothing and are computed.
off         never. Homes that stand in the tree already, because a compile request or an exact prompt put them
            there, are reused.
harvest     never; blocks are reused from exact prompts that held them, see discover.py for what that means.

Whatever the choice, a request whose prompt and unseen homes together would fill most of the pool compiles nothing:
the homes would push out what they are compiled for.
"""

from __future__ import annotations

import hashlib
import secrets
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from ..types import Usage, Wait
from .match import Namespace, Tree
from .split import Home

HOME_ID_PREFIX = "blockreuse-home-"

# How a home ended. Its KV is in the tree only where it was computed.
Outcome = Literal["computed", "aborted", "no_room"]


class HomeId(str):
    """Id of a home request, which is matched whole or not at all.

    The host aborts every request whose id *starts with* what a client sends; a home belongs to all who wait for it.
    """

    __slots__ = ()

    def startswith(self, prefix: Any, *args: Any) -> bool:
        return bool(self == prefix)


class HomeKey(NamedTuple):
    """What makes two homes one. Digests, because the compile prefix may be most of a long prompt."""

    namespace: Namespace
    prefix: bytes
    body: bytes


@dataclass(frozen=True, slots=True)
class HomeJob:
    """One home to be prefilled as an ordinary request."""

    request_id: HomeId
    home: Home
    # ids of what comes first: the job that publishes the shared compile prefix, the prompt that it stays behind
    waits_for: tuple[str, ...]


@dataclass(slots=True)
class _Flight:
    """A home between the decision to compile it and its end."""

    key: HomeKey
    job: HomeJob
    usage: Usage | None  # of the request that brought it
    waits: list[Wait] = field(default_factory=list)  # of all who wait for it
    request: Any = None  # the host's, once it is queued


@dataclass(slots=True)
class _FrontSeen:
    """A prefix that homes share, as one request meets it."""

    digest: bytes
    num_cached: int
    leader: HomeId | None  # computes it, the others then hit it instead of repeating it


class Compiler:
    """Homes in flight. Every unseen block is prefilled once, however many requests wait for it.

    token: what makes the ids of homes unguessable; the same on every tensor-parallel rank.
    """

    def __init__(self, token: str | None = None) -> None:
        self._token = token or secrets.token_hex(16)
        self._num_jobs = 0
        self._flights: dict[str, _Flight] = {}  # by request id
        self._in_flight: dict[HomeKey, HomeId] = {}
        # homes that compute what stands in front of others, by namespace and digest of that
        self._leading: dict[tuple[Namespace, bytes], HomeId] = {}
        self._ahead: dict[str, list[Wait]] = {}  # requests that background homes stay behind of
        self._waiting: dict[
            str, Wait
        ] = {}  # of requests whose homes are for nobody's sake once they are aborted

    def jobs_for(
        self, tree: Tree, homes: Sequence[Home], namespace: Namespace, usage: Usage | None = None
    ) -> tuple[list[HomeJob], list[HomeId]]:
        """Jobs that `homes` still need, and the ids of all jobs, new or running, to wait for.

        usage: of the request that brings the homes; it counts the tokens that are compiled for it.
        """
        jobs: list[HomeJob] = []
        ids: dict[HomeId, None] = {}  # in order, the same text twice in one prompt once
        fronts: dict[int, _FrontSeen] = {}  # by the identity of the prefix, which homes share
        for home in homes:
            front = fronts.get(id(home.prefix))
            if front is None:
                num_cached = tree.lookup(home.prefix, namespace)[0] if home.prefix else 0
                digest = _digest(home.prefix)
                front = _FrontSeen(digest, num_cached, self._leading.get((namespace, digest)))
                fronts[id(home.prefix)] = front
            key = HomeKey(namespace, front.digest, _digest(home.body))
            running = self._in_flight.get(key)
            if running is not None:
                ids[running] = None
                continue
            needs_prefix = front.num_cached < home.prefix_len
            if not needs_prefix and tree.lookup(home.tokens, namespace)[0] >= len(home):
                continue
            # what stands in front of several homes begins with the compile prefix, which one of them computes for all
            first = next((f.leader for f in fronts.values() if f.leader is not None), None)
            waits_for = tuple(dict.fromkeys(i for i in (first, front.leader) if i is not None))
            job = HomeJob(self._new_id(), home, waits_for if needs_prefix else ())
            if needs_prefix and front.leader is None:
                front.leader = self._leading[namespace, front.digest] = job.request_id
            jobs.append(job)
            ids[job.request_id] = None
            self._in_flight[key] = job.request_id
            self._flights[job.request_id] = _Flight(key, job, usage)
            if usage is not None:
                usage.compiled_tokens += len(home.span)
        return jobs, list(ids)

    def stay_behind(self, jobs: Sequence[HomeJob], request_id: str) -> list[HomeJob]:
        """The same jobs, to be run when the prompt of `request_id` is computed."""
        if jobs:
            self._ahead.setdefault(request_id, [])
        return [replace(job, waits_for=(*job.waits_for, request_id)) for job in jobs]

    def wait(self, wait: Wait, request_ids: Sequence[str], *, waiting: str | None = None) -> None:
        """Count those of `request_ids` that have not ended; `wait` is told of their ends.

        waiting: id of the request that waits, where the homes go with it.
        """
        if waiting is not None:
            self._waiting[waiting] = wait
        for request_id in request_ids:
            flight = self._flights.get(request_id)
            waits = self._ahead.get(request_id) if flight is None else flight.waits
            if waits is None:
                continue
            waits.append(wait)
            wait.num_open += 1
            if flight is not None:
                wait.homes.append(flight.job.request_id)

    def queued(self, request_id: str, request: Any) -> None:
        """The home has a request of the host's."""
        self._flights[request_id].request = request

    def request_of(self, request_id: str) -> Any:
        """The host's request of a home in flight; None where the home has ended or was never queued."""
        flight = self._flights.get(request_id)
        return None if flight is None else flight.request

    def first_ahead(self, wait: Wait) -> Any:
        """The host's request of the first home that somebody waits for and that has not ended."""
        while wait.homes and wait.homes[0] not in self._flights:
            wait.homes.pop(0)
        return self.request_of(wait.homes[0]) if wait.homes else None

    def is_unwanted(self, request_id: str) -> bool:
        """Whether everybody who waited for a home is gone."""
        flight = self._flights.get(request_id)
        return flight is not None and not any(wait.wants for wait in flight.waits)

    def requests_ahead(self, wait: Wait) -> Iterator[Any]:
        """The host's requests of the homes that somebody waits for, and of those that they wait for in turn."""
        for request_id in wait.homes:
            flight = self._flights.get(request_id)
            for ahead in () if flight is None else (*flight.job.waits_for, request_id):
                request = self.request_of(ahead)
                if request is not None:
                    yield request

    def prompt_computed(self, request_id: str) -> None:
        """Homes that stay behind this request may run."""
        for wait in self._ahead.pop(request_id, ()):
            wait.num_open -= 1

    def ended(self, request_id: str, outcome: Outcome = "computed", *, num_fetched: int = 0) -> None:
        """A request is gone: nobody waits for it any longer. Safe to call for any request, any number of times.

        num_fetched: tokens of it that came from storage.
        """
        self.prompt_computed(request_id)
        gone = self._waiting.pop(request_id, None)
        if gone is not None:
            gone.wants = False
        flight = self._flights.pop(request_id, None)
        if flight is None:
            return
        del self._in_flight[flight.key]
        front = (flight.key.namespace, flight.key.prefix)
        if self._leading.get(front) == request_id:
            del self._leading[front]
        home = flight.job.home
        for wait in flight.waits:
            wait.num_open -= 1
            if outcome != "computed":
                wait.lost.append((home, outcome))
        if flight.usage is None:
            return
        if outcome != "computed":
            flight.usage.compiled_tokens -= len(home.span)
        elif num_fetched:
            # the last token of a prompt is computed in any case
            fetched = min(num_fetched + 1, len(home.span))
            flight.usage.compiled_tokens -= fetched
            flight.usage.storage_tokens += fetched

    def drop_unqueued(self) -> None:
        """End the homes that were decided on and never got a request: nobody will run them."""
        for request_id in [i for i, flight in self._flights.items() if flight.request is None]:
            self.ended(request_id, "aborted")

    def _new_id(self) -> HomeId:
        self._num_jobs += 1
        return HomeId(f"{HOME_ID_PREFIX}{self._token}-{self._num_jobs}")


def _digest(tokens: array[int]) -> bytes:
    return hashlib.sha256(tokens.tobytes()).digest()
