"""Compiled loops of the content index: keyed hashes of windows, and the longest stretches that begin at them.

A hash is a polynomial over the prime P = 2^61 - 1 at a secret point: two windows of W tokens that somebody chose
without knowing the point have the same hash with a probability of W / P. Modulo a power of two there would be pairs
that collide at every point (Thue-Morse sequences).

Dims: T tokens of one prompt, W tokens of a window, S slots (one per known window), M places of a window, D donors
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

PRIME = (1 << 61) - 1
NOWHERE = -1


class Compiled(NamedTuple):
    """windows(ids_T, W, point) -> int64 [T - W + 1]: hash of the window at each position, the same wherever it stands
    prefixes(ids_T, point) -> int64 [T + 1]: hash of the first n tokens
    enter(slots, donor, W, donor_SM, place_SM): the donor has these windows, one every W tokens
    leave(slots, donor, donor_SM, place_SM) -> int64: those of the slots that no donor has any longer
    search(...): see `_search`
    """

    windows: Any
    prefixes: Any
    enter: Any
    leave: Any
    search: Any


def point_of(secret: int) -> int:
    """Where the polynomials are evaluated; secret: what no client knows."""
    return secret % (PRIME - (1 << 32)) + (1 << 32)


@functools.cache
def compiled() -> Compiled:
    """The loops, compiled for int64 at the first call of this in a process, which takes a few seconds."""
    import numba
    import numba.extending

    ids, table, number = numba.int64[::1], numba.int64[:, ::1], numba.int64
    # read-only too: ids are views of what the host owns
    view = numba.types.Array(numba.int64, 1, "C", readonly=True)
    jit = functools.partial(numba.njit, nogil=True, error_model="numpy")
    numba.extending.register_jitable(_times)
    return Compiled(
        windows=jit([(view, number, number)])(_windows),
        prefixes=jit([(view, number)])(_prefixes),
        enter=jit([(ids, number, number, table, table)])(_enter),
        leave=jit([(ids, number, table, table)])(_leave),
        search=jit([(view, table, ids, table, table, ids, ids, ids, number, number)])(_search),
    )


def _times(a: Any, b: Any) -> Any:
    """a * b modulo P for 0 <= a, b < P: every partial sum stays below 2^63."""
    a_high, a_low = a >> 31, a & 0x7FFFFFFF
    b_high, b_low = b >> 31, b & 0x7FFFFFFF
    middle = a_low * b_high + a_high * b_low
    found = 2 * a_high * b_high + (middle >> 30) + ((middle & 0x3FFFFFFF) << 31) + a_low * b_low
    found = (found & PRIME) + (found >> 61)
    return found - PRIME if found >= PRIME else found


def _windows(ids_T: Any, window: Any, point: Any) -> Any:
    num = max(0, len(ids_T) - window + 1)
    hashes = np.empty(num, np.int64)
    if num == 0:
        return hashes
    highest = np.int64(1)  # point ** (W - 1)
    for _ in range(window - 1):
        highest = _times(highest, point)
    found = np.int64(0)
    for at in range(len(ids_T)):
        if at >= window:
            # + 1: id 0 would add nothing
            found -= _times(highest, ((ids_T[at - window] & PRIME) + 1) % PRIME)
            if found < 0:
                found += PRIME
        found = (_times(found, point) + (ids_T[at] & PRIME) + 1) % PRIME
        if at >= window - 1:
            hashes[at - window + 1] = found
    return hashes


def _prefixes(ids_T: Any, point: Any) -> Any:
    hashes = np.empty(len(ids_T) + 1, np.int64)
    hashes[0] = 0
    for at in range(len(ids_T)):
        hashes[at + 1] = (_times(hashes[at], point) + (ids_T[at] & PRIME) + 1) % PRIME
    return hashes


def _enter(slots: Any, donor: Any, window: Any, donor_SM: Any, place_SM: Any) -> Any:
    for index in range(len(slots)):
        slot = slots[index]
        for at in range(donor_SM.shape[1] - 1, 0, -1):  # the latest first, the oldest leaves
            donor_SM[slot, at] = donor_SM[slot, at - 1]
            place_SM[slot, at] = place_SM[slot, at - 1]
        donor_SM[slot, 0] = donor
        place_SM[slot, 0] = index * window


def _leave(slots: Any, donor: Any, donor_SM: Any, place_SM: Any) -> Any:
    emptied = np.empty(len(slots), np.int64)
    num_emptied = 0
    for slot in slots:
        kept, num_gone = 0, 0
        for at in range(donor_SM.shape[1]):
            if donor_SM[slot, at] == donor:
                num_gone += 1
                continue
            donor_SM[slot, kept], place_SM[slot, kept] = donor_SM[slot, at], place_SM[slot, at]
            kept += 1
        donor_SM[slot, kept:] = NOWHERE
        if num_gone and donor_SM[slot, 0] == NOWHERE:
            emptied[num_emptied] = slot
            num_emptied += 1
    return emptied[:num_emptied]


def _search(
    ids_T: Any,
    rooms: Any,
    slots: Any,
    donor_SM: Any,
    place_SM: Any,
    tokens: Any,
    first_D: Any,
    len_D: Any,
    window: Any,
    min_hit: Any,
) -> Any:
    """Hits inside the rooms, from left to right, at each position the longest.

    rooms: int64 [rooms, 2], ascending, disjoint; slots: of the window at each position, or NOWHERE;
    tokens: of the donors one behind the other, donor d's from first_D[d] on; min_hit >= W.
    Returns int64 [hits, 5]: start, end, donor, the donor's position, 1 where the prompt begins as the donor does up
    to the end of the hit. A comparison that leads to nothing ends within min_hit tokens, the others are paid for by
    the tokens that their hit covers, so the work is at most M * min_hit steps for each position.
    """
    hits = np.empty((len(ids_T) // min_hit + 1, 5), np.int64)
    num = 0
    same_D = np.full(
        len(len_D), NOWHERE, np.int64
    )  # leading tokens that donor and prompt share, once asked for
    for room in range(len(rooms)):
        low, high = rooms[room, 0], rooms[room, 1]
        for position in range(low, high - window + 1):
            if position < low or slots[position] == NOWHERE:
                continue
            slot, best = slots[position], min_hit - 1
            for at in range(donor_SM.shape[1]):
                donor, place = donor_SM[slot, at], place_SM[slot, at]
                if donor == NOWHERE:
                    break
                mine = tokens[first_D[donor] : first_D[donor] + len_D[donor]]
                ahead, most = 0, min(high - position, len_D[donor] - place)
                while ahead < most and ids_T[position + ahead] == mine[place + ahead]:
                    ahead += 1
                if ahead < window:
                    continue  # another window of the same hash
                behind, most = 0, min(position - low, place)
                while behind < most and ids_T[position - 1 - behind] == mine[place - 1 - behind]:
                    behind += 1
                if ahead + behind > best:
                    best = ahead + behind
                    hits[num, 0], hits[num, 1] = position - behind, position + ahead
                    hits[num, 2], hits[num, 3] = donor, place - behind
            if best < min_hit:
                continue
            low = hits[num, 1]  # no hit reaches in front of this
            donor, start = hits[num, 2], hits[num, 0]
            if hits[num, 3] == start and same_D[donor] == NOWHERE:
                same, first = 0, first_D[donor]
                while same < min(len(ids_T), len_D[donor]) and ids_T[same] == tokens[first + same]:
                    same += 1
                same_D[donor] = same
            hits[num, 4] = hits[num, 3] == start and same_D[donor] >= start
            num += 1
    return hits[:num]
