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

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .match import Namespace, Tree
from .split import Home

HOME_ID_PREFIX = "blockreuse-home-"


@dataclass(frozen=True, slots=True)
class HomeJob:
    """One home to be prefilled as an ordinary request."""

    request_id: str
    home: Home
    waits_for: frozenset[str]  # ids of jobs that publish the shared compile prefix first


class Compiler:
    """Homes in flight. Every unseen block is prefilled once, however many requests wait for it."""

    def __init__(self) -> None:
        self._in_flight: dict[tuple[Namespace, bytes], str] = {}  # home -> request id
        self._homes: dict[str, tuple[Namespace, bytes]] = {}  # the inverse
        self._num_jobs = 0
        self._ahead: set[str] = set()  # ids of requests that background homes stay behind of

    def jobs_for(
        self, tree: Tree, homes: Sequence[Home], namespace: Namespace
    ) -> tuple[list[HomeJob], set[str]]:
        """Jobs that `homes` still need, and the ids of all jobs, new or running, to wait for."""
        unseen: list[tuple[Home, int]] = []
        waits_for: set[str] = set()
        for home in homes:
            running = self._in_flight.get((namespace, home.tokens.tobytes()))
            if running is not None:
                waits_for.add(running)
                continue
            length, _ = tree.lookup(home.tokens, namespace)
            if length < len(home.tokens):
                unseen.append((home, length))
        jobs: list[HomeJob] = []
        leader: str | None = (
            None  # computes the compile prefix, the others then hit it instead of repeating it
        )
        for home, length in unseen:
            key = (namespace, home.tokens.tobytes())
            if key in self._in_flight:
                continue  # the same text twice in one prompt
            request_id = f"{HOME_ID_PREFIX}{self._num_jobs}"
            self._num_jobs += 1
            needs_prefix = length < home.prefix_len
            jobs.append(HomeJob(request_id, home, frozenset((leader,) if leader and needs_prefix else ())))
            leader = leader or (request_id if needs_prefix else None)
            self._in_flight[key] = request_id
            self._homes[request_id] = key
        return jobs, waits_for | {job.request_id for job in jobs}

    def stay_behind(self, jobs: Sequence[HomeJob], request_id: str) -> list[HomeJob]:
        """The same jobs, to be run when the prompt of `request_id` is computed."""
        if jobs:
            self._ahead.add(request_id)
        return [replace(job, waits_for=job.waits_for | {request_id}) for job in jobs]

    def in_flight(self, request_ids: set[str]) -> set[str]:
        """Those of `request_ids` that have not ended yet."""
        return request_ids & (self._homes.keys() | self._ahead)

    def prompt_computed(self, request_id: str) -> None:
        """Homes that stay behind this request may run."""
        self._ahead.discard(request_id)

    def ended(self, request_id: str) -> None:
        """A request finished or was aborted: nobody waits for it any longer."""
        self._ahead.discard(request_id)
        key = self._homes.pop(request_id, None)
        if key is not None:
            del self._in_flight[key]
