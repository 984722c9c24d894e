"""The nouns: records that pass between the stages. A field's comment is its law.

Everything here is plain Python and frozen unless it says otherwise; positions are
token positions of one request, intervals are half-open.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Literal

Mode = Literal["off", "exact", "reuse", "compile"]
PATH = -1  # in place of a block's index: KV of a local path, which was repaired when it was made
MODES: tuple[Mode, ...] = ("off", "exact", "reuse", "compile")


@dataclass(frozen=True, slots=True, order=True)
class Interval:
    """Half-open range of token positions [start, end); empty where end <= start."""

    start: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.start)

    def clip(self, low: int, high: int) -> Interval:
        if low <= self.start and self.end <= high:
            return self
        return Interval(max(self.start, low), min(self.end, high))


@dataclass(frozen=True, slots=True)
class BlockOptions:
    """What one request asks of the block machinery, validated."""

    mode: Mode
    spans: tuple[Interval, ...]  # marked blocks, ascending, disjoint, inside the prompt
    policy: str
    tau: int | None  # tokens on each side of a seam; None: derived from the budget
    budget: float  # what may be repaired: a share, 0..1, of the tokens up to the last block's end; above 1: tokens
    question: Interval | None = None  # tokens whose attention chooses; None: what follows the last block
    explain: bool = False  # tell in the usage where each token came from
    num_cut: int = 0  # spans that lay wholly behind the end of a prompt that the host cut

    def budget_tokens(self, block_end: int) -> int:
        """How many tokens may be repaired; block_end: the N of |T|/N, exact prefix and leading text included."""
        return int(self.budget * block_end) if self.budget <= 1 else min(int(self.budget), block_end)


@dataclass(frozen=True, slots=True)
class LocalSegment:
    """A stretch of the prompt whose KV the tree holds: of one block, at its home, or of a local path."""

    interval: Interval  # positions in the request, behind the exact prefix
    delta: int  # new position - home position, the same for every token of the segment
    block: int  # index of the block among the request's spans, or PATH
    block_start: (
        int  # position where the block begins; before interval.start where its head is an exact prefix
    )

    @property
    def is_path(self) -> bool:
        return self.block == PATH


@dataclass(frozen=True, slots=True)
class Copy:
    """KV to take over: positions `interval`, read at `segment`'s home."""

    interval: Interval
    segment: int  # index into the plan's segments


_ITSELF: Callable[[Interval], Interval] = lambda interval: interval  # noqa: E731
_COPIED = attrgetter("interval")


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """How the positions behind the exact prefix come to be: copied or computed.

        |<- prefix ->|<- run ->|<------ copy ------>|<- run ->| ... |<- run ->|
        0            start                                                  end

    Copies and runs tile [start, end); the last position is always computed,
    because a request samples from it.
    """

    start: int  # length of the exact prefix
    end: int  # length of the sequence to prefill
    segments: tuple[LocalSegment, ...]  # ascending, disjoint; so are copies and runs
    copies: tuple[Copy, ...]
    runs: tuple[Interval, ...]
    num_repaired: int  # computed positions inside segments
    block_end: int  # end of the last block: the N of |T|/N

    @property
    def num_reused(self) -> int:
        return sum(len(c.interval) for c in self.copies)

    @property
    def first_local(self) -> int:
        """First position whose KV does not equal a full prefill's; `end` if there is none."""
        return self.copies[0].interval.start if self.copies else self.end

    def runs_within(self, low: int, high: int) -> list[Interval]:
        """Positions of the chunk [low, high) that are computed, as runs.

        The chunk's last position is computed even inside a copy: the host samples
        from the end of every chunk, also where it throws the sample away.
        """
        runs = [self.runs[at].clip(low, high) for at in _meeting(self.runs, low, high, interval=_ITSELF)]
        if not runs or runs[-1].end < high:
            runs.append(Interval(high - 1, high))
        return runs

    def copies_within(self, low: int, high: int) -> Iterator[tuple[int, Interval]]:
        """(segment index, positions) of what is copied in the chunk [low, high)."""
        for at in _meeting(self.copies, low, high, interval=_COPIED):
            yield self.copies[at].segment, self.copies[at].interval.clip(low, high)

    def repairs_within(self, low: int, high: int) -> Iterator[Interval]:
        """Positions of the chunk [low, high) that are computed inside copied blocks, ascending.

        What stands before the first copy sees only exact KV and is exact itself, and the last position is what
        the request samples from: neither counts.
        """
        for run in self.runs_within(low, high):
            run = run.clip(self.first_local, self.end - 1)
            for at in _meeting(self.segments, run.start, run.end, interval=_COPIED):
                if not self.segments[at].is_path:
                    yield self.segments[at].interval.clip(run.start, run.end)

    def num_computed(self, low: int, high: int) -> int:
        return sum(len(r) for r in self.runs_within(low, high))

    def chunk_end(self, low: int, num_tokens: int) -> int:
        """The furthest chunk end so that [low, end) computes at most `num_tokens` (>= 1) tokens.

        A chunk that does not finish the sequence ends inside or at the end of a run,
        never inside a copy.
        """
        end = low
        for at in _meeting(self.runs, low, self.end, interval=_ITSELF):
            run = self.runs[at].clip(low, self.end)
            if len(run) >= num_tokens:
                return run.start + num_tokens
            num_tokens -= len(run)
            end = run.end
        return max(end, low + 1)


def _meeting(
    items: Sequence[Any], low: int, high: int, *, interval: Callable[[Any], Interval]
) -> Iterator[int]:
    """Indices of the items, ascending and disjoint, that meet [low, high), found without a look at the others."""
    if low >= high:
        return
    for at in range(bisect_right(items, low, key=lambda item: interval(item).end), len(items)):
        if interval(items[at]).start >= high:
            return
        yield at


@dataclass(slots=True)
class Usage:
    """What happened to one request's prompt tokens; mutable, reported as `meta_info["blockreuse"]`.

    prefix + reused + repaired + fresh = prompt tokens.
    """

    mode: Mode = "reuse"
    policy: str | None = None
    prefix_tokens: int = 0
    reused_tokens: int = 0
    repaired_tokens: int = 0
    fresh_tokens: int = 0
    host_tokens: int = 0  # of reused_tokens: taken from host memory
    storage_tokens: int = 0  # block tokens of homes that were fetched from storage for this request
    # block tokens of the homes that this request brought, less those that were lost or fetched
    compiled_tokens: int = 0
    recompute_ratio: float = 0.0  # |T| / N, N = tokens up to the end of the last block
    skipped_reason: str | None = None
    # {"verdict": passed | raised | full, "measure": leftover | deviation, "value": float}; None where none judged
    guard: dict[str, Any] | None = None
    prompt_truncated: bool = False  # the host cut the end of the prompt off, and with it of the marks
    pieces: list[list[Any]] | None = None  # see blocks/explain.py; told only where the request asks

    def as_dict(self) -> dict[str, Any]:
        found = {name: getattr(self, name) for name in self.__slots__}
        if self.pieces is None:
            del found["pieces"]
        return found


@dataclass(slots=True)
class Wait:
    """What one queued request stands behind; mutable, kept up to date by the compiler."""

    num_open: int = 0  # requests that have not ended yet
    homes: list[Any] = field(
        default_factory=list
    )  # ids of the homes among them, in the order they are queued in
    lost: list[Any] = field(default_factory=list)  # (Home, how it ended): those whose KV is not in the tree
    asked_again: bool = False  # lost homes are asked for once more, and only once
    wants: bool = True  # the homes are for its sake; no longer where it was aborted
    since: float | None = None  # seconds, monotonic; None where it waits for nothing


@dataclass(slots=True)
class RequestState:
    """Everything the extension keeps for one host request; mutable, lives on the request."""

    options: BlockOptions
    usage: Usage
    refused: str | None = None  # why it may not reuse, whatever the tree holds: a skipped_reason
    compile_prefix: Any = ()  # array[int], what all homes of the request begin with
    homes: list[Any] = field(default_factory=list)  # Home: where the KV of its blocks is to be found
    wait: Wait = field(default_factory=Wait)
    plan: BlockPlan | None = None  # while the prompt is prefilled
    first_local: int | None = None  # from here on the row's KV is never published; outlives the plan
    not_compiled: str | None = None  # why unseen blocks of this request were left unseen
    found_blocks: tuple[
        str, ...
    ] = ()  # of each block behind the exact prefix, how much the last admission found
    # slots of each plan segment's home tokens, int64, position-aligned with the segment from its start on
    home_slots: list[Any] = field(default_factory=list)
    # and of those behind them, which lie in the host's memory pool: int64 on the CPU, together [len(segment)]
    host_slots: list[Any] = field(default_factory=list)
    exact_len: int = 0  # length of the exact prefix, on whichever tier, as the last admission found it
    took_path: bool = False  # it went on from the local path of an earlier request
    locks: list[Any] = field(default_factory=list)  # tree locks on the homes
    num_put_off: int = 0  # steps that it left to others, to be measured whole
    outcome: Any = None  # of a home that was ended for a reason of ours: compile.Outcome

    def may_reuse(self) -> bool:
        return self.options.mode == "reuse" and self.refused is None


@dataclass(frozen=True, slots=True)
class Fold:
    """A forward in which one request may own several rows (virtual rows).

    Per-request values that the host needs back after the model forward.
    """

    num_rows: int
    tokens: tuple[int, ...]  # computed tokens per request
    tokens_B: Any  # the same beside the batch, int64 [requests], for what runs behind the model
    logprob_starts: tuple[int, ...]  # first computed token per request that wants input log-probabilities
    per_request: dict[str, Any]  # fields of the host's forward batch as they are without a fold
    last_rows: tuple[int, ...]  # of each request, the row that holds its last position
    repair_T: Any = None  # bool [computed tokens]: those that a layer plan may make sparse; None: no token
    unread: bool = False  # nobody reads what the forward answers; it writes KV
