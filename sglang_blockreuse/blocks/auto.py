"""Finds blocks that nobody marked: which stretches of a prompt were served before, in which prompt, and where.

The index holds prompts whose KV is exact (donors), bounded in tokens, the least recently used leave first. A
window of W tokens is entered for every W-th position of a donor; a prompt is hashed at *every* position, so any
stretch of 2W - 1 tokens that it shares with a donor contains an entered window, whatever its offset on either
side (the rolling-checksum scheme of rsync). A hit is verified by token ids and extended both ways as far as the
tokens agree. The namespace is part of the key.

    donor      |..w..|..w..|..w..|..w..|         windows at multiples of W
    prompt  ...........[=======hit======]......  hashed at every position

The index knows tokens only. Whether the tree still holds a donor's KV is asked when a hit is used. All of it runs in
the scheduler's thread: what a prompt costs is linear in its tokens, whatever stands in it, see windows.py.
"""

from __future__ import annotations

import itertools
from array import array
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..types import Interval
from .windows import I64, NOWHERE, compiled, point_of

# Dims: T tokens of one prompt, W tokens of a window, S slots, M places of a window, D donors

AUTO_MAX_TOKENS = 1 << 20  # donor tokens kept: 8 MiB of ids and about as much of windows
MAX_PLACES = 4  # places remembered for one window; a system prompt stands in all donors


@dataclass(frozen=True, slots=True)
class DonorHit:
    """tokens[span] of the prompt equal the donor's tokens from `offset` on, and no longer range around does."""

    span: Interval
    donor: Donor
    offset: int

    def __len__(self) -> int:
        """Tokens of the sequence in which its KV was computed: the donor up to the end of the hit."""
        return self.offset + len(self.span)


@dataclass(eq=False, slots=True)
class Donor:
    """One exactly served prompt."""

    tokens_T: I64
    space: Hashable
    number: int  # its name in the tables
    slots: I64  # of its aligned windows
    whole: int  # hash of all of it

    def first(self, num: int) -> array[int]:
        """Its first `num` tokens."""
        return array("q", self.tokens_T[:num].tobytes())


@dataclass(slots=True)
class _Space:
    """What one namespace holds; mutable."""

    slots: dict[int, int] = field(default_factory=dict)  # window hash -> slot
    wholes: dict[int, Donor] = field(default_factory=dict)  # hash of a prompt -> the latest donor that has it
    num_donors: int = 0


class AutoIndex:
    """Content index over exact prompts.

    min_hit: shortest stretch that counts as a hit; secret: keys the hashes, equal on all tensor-parallel ranks;
    max_tokens: bound on the donors' tokens together; max_places: places remembered for one window.
    Deterministic: the same calls give the same hits in every process that has the same secret.
    """

    def __init__(
        self, *, min_hit: int, secret: int, max_tokens: int = AUTO_MAX_TOKENS, max_places: int = MAX_PLACES
    ) -> None:
        self.min_hit = max(1, min_hit)
        self.window = (self.min_hit + 1) // 2
        self.max_tokens = max_tokens
        self.num_tokens = 0
        self._point = point_of(secret)
        self._loops = compiled()
        self._spaces: dict[Hashable, _Space] = {}
        self._recent: OrderedDict[Donor, None] = OrderedDict()
        self._donors: list[Donor | None] = []  # by number
        self._free_numbers: list[int] = []
        # of each slot: its hash, and where its window stands, the latest first
        self._hashes: list[int] = []
        self._free_slots: list[int] = []
        self._donor_SM = np.full((1024, max_places), NOWHERE)
        self._place_SM = np.full((1024, max_places), NOWHERE)

    def __len__(self) -> int:
        return len(self._recent)

    def register(self, tokens: Sequence[int], space: Hashable) -> None:
        """Enter a prompt whose KV is exact; a donor that it continues is replaced by it."""
        tokens_T = _as_ids(tokens)[: self.max_tokens]
        if len(tokens_T) < self.min_hit:
            return
        prefixes: list[int] = self._loops.prefixes(tokens_T, self._point).tolist()
        wholes = self._spaces[space].wholes if space in self._spaces else {}
        for donor in [wholes[h] for h in prefixes[1:] if h in wholes]:
            if np.array_equal(donor.tokens_T, tokens_T[: len(donor.tokens_T)]):
                self.forget(donor)
        home = self._spaces.setdefault(space, _Space())  # `forget` drops a namespace with its last donor
        hashes = self._loops.windows(tokens_T, self.window, self._point)[:: self.window].tolist()
        slots = np.array([self._slot(home, window) for window in hashes], dtype=np.int64)
        donor = Donor(tokens_T.copy(), space, self._new_number(), slots, prefixes[-1])
        self._donors[donor.number] = donor
        self._loops.enter(slots, donor.number, self.window, self._donor_SM, self._place_SM)
        home.wholes[donor.whole] = donor
        home.num_donors += 1
        self._recent[donor] = None
        self.num_tokens += len(tokens_T)
        while self.num_tokens > self.max_tokens:
            self.forget(next(iter(self._recent)))

    def find(
        self, tokens: Sequence[int], space: Hashable, rooms: Sequence[Interval] | None = None
    ) -> list[DonorHit]:
        """Hits inside the rooms (ascending, disjoint), ascending and disjoint, from left to right the longest first.

        rooms: where hits may lie; None: anywhere. A stretch that continues the donor's own beginning is an exact
        prefix and no hit.
        """
        home = self._spaces.get(space)
        ids_T = _as_ids(tokens)
        rooms = [Interval(0, len(ids_T))] if rooms is None else rooms
        edges = np.array([(r.start, r.end) for r in rooms if len(r) >= self.min_hit], dtype=np.int64)
        if home is None or not len(edges):
            return []
        hashes: list[int] = self._loops.windows(ids_T, self.window, self._point).tolist()
        slots = np.fromiter(
            map(home.slots.get, hashes, itertools.repeat(NOWHERE)), np.int64, count=len(hashes)
        )
        numbers = np.unique(self._donor_SM[np.unique(slots[slots != NOWHERE])])
        donors = [donor for n in numbers.tolist() if n != NOWHERE and (donor := self._donors[n])]
        if not donors:
            return []
        first_D, len_D = np.zeros((2, len(self._donors)), dtype=np.int64)
        lens = [len(d.tokens_T) for d in donors]
        first_D[numbers[numbers != NOWHERE]] = np.cumsum([0, *lens[:-1]])
        len_D[numbers[numbers != NOWHERE]] = lens
        found = self._loops.search(
            ids_T,
            edges,
            slots,
            self._donor_SM,
            self._place_SM,
            np.concatenate([d.tokens_T for d in donors]),
            first_D,
            len_D,
            self.window,
            self.min_hit,
        )
        hits: list[DonorHit] = []
        for start, end, number, offset, is_prefix in found.tolist():
            hit_donor = self._donors[number]
            assert hit_donor is not None
            if not is_prefix:
                self._recent.move_to_end(hit_donor)
                hits.append(DonorHit(Interval(start, end), hit_donor, offset))
        return hits

    def forget(self, donor: Donor) -> None:
        """Drop a donor; unknown donors are fine."""
        if donor not in self._recent:
            return
        del self._recent[donor]
        self.num_tokens -= len(donor.tokens_T)
        home = self._spaces[donor.space]
        for slot in self._loops.leave(donor.slots, donor.number, self._donor_SM, self._place_SM).tolist():
            del home.slots[self._hashes[slot]]
            self._free_slots.append(slot)
        # two prompts of one hash share its entry, which is the later one's
        if home.wholes.get(donor.whole) is donor:
            del home.wholes[donor.whole]
        home.num_donors -= 1
        if not home.num_donors:
            del self._spaces[donor.space]
        self._donors[donor.number] = None
        self._free_numbers.append(donor.number)

    def _slot(self, home: _Space, window: int) -> int:
        """The slot of a window in its namespace, a new one where nobody has it."""
        slot = home.slots.get(window)
        if slot is not None:
            return slot
        if self._free_slots:
            slot = self._free_slots.pop()
            self._hashes[slot] = window
        else:
            slot = len(self._hashes)
            self._hashes.append(window)
            if slot == len(self._donor_SM):
                self._donor_SM, self._place_SM = (
                    np.concatenate([table, np.full_like(table, NOWHERE)])
                    for table in (self._donor_SM, self._place_SM)
                )
        home.slots[window] = slot
        return slot

    def _new_number(self) -> int:
        if self._free_numbers:
            return self._free_numbers.pop()
        self._donors.append(None)
        return len(self._donors) - 1


def _as_ids(tokens: Sequence[int]) -> I64:
    """A read-only view of the ids, or of a copy."""
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "q" else array("q", tokens)
    found = np.frombuffer(ids, dtype=np.int64)
    found.flags.writeable = False
    return found
