"""Finds blocks that nobody marked: which stretches of a prompt were served before, in which prompt, and where.

The index holds prompts whose KV is exact (donors), bounded in tokens, the least recently used leave first. A
window of W tokens is entered for every W-th position of a donor; a prompt is hashed at *every* position, so any
stretch of 2W - 1 tokens that it shares with a donor contains an entered window, whatever its offset on either
side (the rolling-checksum scheme of rsync). A hit is verified by token ids and extended both ways as far as the
tokens agree. The namespace is part of the key.

    donor      |..w..|..w..|..w..|..w..|         windows at multiples of W
    prompt  ...........[=======hit======]......  hashed at every position

The index knows tokens only. Whether the tree still holds a donor's KV is asked when a hit is used.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from ..types import Interval

# Dims: T tokens of one prompt, W tokens of a window
U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

AUTO_MAX_TOKENS = 1 << 20  # donor tokens kept: 8 MiB of ids and about as much of windows
MAX_PLACES = 4  # donors remembered for one window; a system prompt stands in all of them

_MASK = (1 << 64) - 1
_BASE = 0x9E3779B97F4A7C15  # odd, hence invertible modulo 2^64
_MIX = 0xBF58476D1CE4E5B9  # of splitmix64, so that neighbouring ids are far apart


@dataclass(frozen=True, slots=True)
class DonorHit:
    """tokens[span] of the prompt equal the donor's tokens from `offset` on, and no longer range around does."""

    span: Interval
    donor: Donor
    offset: int

    @property
    def tokens(self) -> array[int]:
        """The donor up to the end of the hit: the sequence in which its KV was computed."""
        return array("q", self.donor.tokens_T[: self.offset + len(self.span)].tobytes())


@dataclass(eq=False, slots=True)
class Donor:
    """One exactly served prompt."""

    tokens_T: I64
    space: Hashable
    windows: list[int]  # hashes of its aligned windows
    whole: int  # hash of all of it


class AutoIndex:
    """Content index over exact prompts.

    min_hit: shortest stretch that counts as a hit; max_tokens: bound on the donors' tokens together;
    max_places: donors remembered for one window.
    Deterministic: the same calls give the same hits in every process.
    """

    def __init__(
        self, *, min_hit: int, max_tokens: int = AUTO_MAX_TOKENS, max_places: int = MAX_PLACES
    ) -> None:
        self.min_hit = min_hit
        self.max_places = max_places
        self.window = max(1, (min_hit + 1) // 2)
        self.max_tokens = max_tokens
        self.num_tokens = 0
        # namespace -> window hash -> (donor, position), the latest last
        self._places: dict[Hashable, dict[int, list[tuple[Donor, int]]]] = {}
        self._wholes: dict[Hashable, dict[int, Donor]] = {}
        self._recent: OrderedDict[Donor, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._recent)

    def register(self, tokens: Sequence[int], space: Hashable) -> None:
        """Enter a prompt whose KV is exact; a donor that it continues is replaced by it."""
        tokens_T = _as_ids(tokens)[: self.max_tokens]
        if len(tokens_T) < self.min_hit:
            return
        sums = _prefix_sums(tokens_T)
        wholes = self._wholes.setdefault(space, {})
        shorter = [wholes[h] for h in sums[1:].tolist() if h in wholes]
        for donor in shorter:
            if _common(donor.tokens_T, tokens_T) == len(donor.tokens_T):
                self.forget(donor)
        windows: list[int] = _windows(sums, self.window)[:: self.window].tolist()
        donor = Donor(tokens_T.copy(), space, windows, int(sums[-1]))
        places = self._places.setdefault(space, {})
        for index, window in enumerate(windows):
            known = places.setdefault(window, [])
            known.append((donor, index * self.window))
            if len(known) > self.max_places:
                del known[0]
        # `forget` drops a namespace with its last donor
        self._wholes.setdefault(space, {})[donor.whole] = donor
        self._recent[donor] = None
        self.num_tokens += len(tokens_T)
        while self.num_tokens > self.max_tokens:
            self.forget(next(iter(self._recent)))

    def find(
        self, tokens: Sequence[int], space: Hashable, *, start: int = 0, end: int | None = None
    ) -> list[DonorHit]:
        """Hits inside [start, end), ascending and disjoint, from left to right the longest first.

        A stretch that continues the donor's own beginning is an exact prefix and no hit.
        """
        places = self._places.get(space)
        ids_T = _as_ids(tokens)
        end = len(ids_T) if end is None else end
        if places is None or end - start < self.min_hit:
            return []
        hashes: list[int] = _windows(_prefix_sums(ids_T[start:end]), self.window).tolist()
        hits: list[DonorHit] = []
        free = start  # no hit reaches in front of this
        for position in [i for i, h in enumerate(hashes, start) if h in places]:
            if position < free:
                continue
            found = self._longest(ids_T, position, Interval(free, end), places[hashes[position - start]])
            if found is None:
                continue
            free = found.span.end
            if found.offset != found.span.start or not _is_prefix(found, ids_T):
                self._recent.move_to_end(found.donor)
                hits.append(found)
        return hits

    def _longest(
        self, ids_T: I64, position: int, room: Interval, places: list[tuple[Donor, int]]
    ) -> DonorHit | None:
        best: DonorHit | None = None
        for donor, place in reversed(places):
            ahead = _common(ids_T[position : room.end], donor.tokens_T[place:])
            if ahead < self.window:
                continue  # another window of the same hash
            behind = _common(ids_T[room.start : position][::-1], donor.tokens_T[:place][::-1])
            if ahead + behind >= max(self.min_hit, 1 + (len(best.span) if best else 0)):
                best = DonorHit(Interval(position - behind, position + ahead), donor, place - behind)
        return best

    def forget(self, donor: Donor) -> None:
        """Drop a donor; unknown donors are fine."""
        if donor not in self._recent:
            return
        del self._recent[donor]
        self.num_tokens -= len(donor.tokens_T)
        places, wholes = self._places[donor.space], self._wholes[donor.space]
        for window in donor.windows:
            left = [place for place in places.get(window, ()) if place[0] is not donor]
            if left:
                places[window] = left
            else:
                places.pop(window, None)
        if wholes.get(donor.whole) is donor:
            del wholes[donor.whole]
        if not wholes:
            del self._places[donor.space], self._wholes[donor.space]


def _is_prefix(hit: DonorHit, ids_T: I64) -> bool:
    return bool(np.array_equal(ids_T[: hit.span.start], hit.donor.tokens_T[: hit.offset]))


def _as_ids(tokens: Sequence[int]) -> I64:
    if isinstance(tokens, array) and tokens.typecode == "q":
        return np.frombuffer(tokens, dtype=np.int64)
    return np.asarray(tokens, dtype=np.int64)


def _common(a_T: I64, b_T: I64) -> int:
    """Number of leading tokens that are equal."""
    num = min(len(a_T), len(b_T))
    different = np.flatnonzero(a_T[:num] != b_T[:num])
    return int(different[0]) if len(different) else num


def _prefix_sums(ids_T: I64) -> U64:
    """uint64 [T + 1]: sum of mix(token i) * BASE^i over the tokens before each position, modulo 2^64."""
    # not of the id itself: id 0 would add nothing, and prompts of it would have one hash whatever their length
    mixed = (ids_T.astype(np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.uint64(_BASE)
    sums = np.zeros(len(ids_T) + 1, dtype=np.uint64)
    np.cumsum(mixed * _powers(len(ids_T), _BASE), out=sums[1:])
    return sums


def _windows(sums: U64, window: int) -> U64:
    """uint64 [T - W + 1]: hash of the window that begins at each position, the same wherever it stands."""
    num = len(sums) - window
    if num <= 0:
        return np.zeros(0, dtype=np.uint64)
    return (sums[window:] - sums[:-window]) * _powers(num, pow(_BASE, -1, 1 << 64))


def _powers(num: int, base: int) -> U64:
    # a few sizes only, so that the table is computed once
    return _power_table(1 << max(10, (num - 1).bit_length()), base)[:num]


@lru_cache(maxsize=64)
def _power_table(num: int, base: int) -> U64:
    table = np.full(num, base & _MASK, dtype=np.uint64)
    table[0] = 1
    return np.cumprod(table)
