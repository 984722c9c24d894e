"""Finds blocks in the tree: the radix path  compile prefix -> block  of each home, locked."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..types import Interval, LocalSegment
from .split import Home
from .tiers import Found, HomeSlots


class Namespace(NamedTuple):
    """Part of every tree key: requests of different namespaces never see each other's KV."""

    extra_key: str | None
    cache_salt: str | None


class Tree(Protocol):
    """What is asked of the host's tree cache."""

    def lookup(self, tokens: array[int], namespace: Namespace) -> tuple[int, Found]:
        """Length of the cached prefix of `tokens`, on the device and in host memory, and where it lies."""

    def slots(self, found: Found) -> HomeSlots:
        """Slots of all that was found, from the root on; valid while it is held."""

    def hold(self, found: Found) -> Any:
        """Keep what was found from eviction, on both tiers."""

    def let_go(self, lock: Any) -> None:
        """Give a lock back, once."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A home that the tree holds, locked by whoever asked."""

    segment: LocalSegment
    slots: HomeSlots  # of the segment's positions, at home
    lock: Any


def find(tree: Tree, homes: Sequence[Home], *, start: int, end: int, namespace: Namespace) -> list[Hit]:
    """Match and lock the homes of the blocks that reach into [start, end).

    A block that the tree holds in part is reused in part. The tree compares the token
    ids themselves, and the namespace is part of its key.
    """
    hits = []
    missing: set[int] = (
        set()
    )  # identities of prefixes that the tree does not hold, and so none of their homes
    for home in homes:
        if home.span.end <= start or id(home.prefix) in missing:
            continue
        length, where = tree.lookup(home.tokens, namespace)
        if length < home.prefix_len:
            missing.add(id(home.prefix))
        held = Interval(home.span.start, home.span.start + length - home.prefix_len).clip(start, end)
        if not len(held):
            continue
        lock = tree.hold(where)
        first = held.start - home.delta
        slots = tree.slots(where).part(first, first + len(held))
        hits.append(Hit(LocalSegment(held, home.delta, home.block, home.span.start), slots, lock))
    return hits
