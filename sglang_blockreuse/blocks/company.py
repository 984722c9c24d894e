"""Which other documents stand in front of a block in its home.

A document that is computed right behind the leading text is computed as if it came first; in use it stands behind
others. So its home is

    | compile prefix | companions | block |
    |<------- the home's prefix ->|

The companions of a compile prefix are the first documents that a tenant's requests brought behind it, one more
than stand in front of a block, so that each of them has others too:

    members a b c      home of a: prefix b c a      home of b: prefix a c b      of c and all others: prefix a b ...

They are chosen once and stay, so a home stays where it is: only what was compiled while the members were fewer is
compiled again. All homes but those of the first members lie behind one common front, which is computed once. It is the
beginning of the very prompt that brought the members, so at first sight it costs nothing that the prompt does not.

Members are known by namespace: no tenant's text is ever part of what another reads.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable

from .match import Namespace
from .split import Front, begin_alike

# Of a long document so much stands in front of others; and of the KV pool all companions together take this share.
MAX_COMPANION_TOKENS = 512
MAX_POOL_SHARE = 1 / 16
# Tokens of members that are remembered over all compile prefixes, the least recently used are forgotten first: 8 MiB.
MAX_MEMBER_TOKENS = 1 << 20

Key = tuple[Namespace, bytes]
Members = tuple["array[int]", ...]


class Company:
    """The members of every compile prefix, by namespace.

    wanted: how many companions stand in front of a block, or the operator's own text in their place.
    pool_size: of the KV pool, in tokens.
    Deterministic: every tensor-parallel rank that sees the same requests has the same members.
    """

    def __init__(self, wanted: int | array[int], *, pool_size: int) -> None:
        self._text = None if isinstance(wanted, int) else wanted
        self._size = wanted if isinstance(wanted, int) else 1
        share = int(pool_size * MAX_POOL_SHARE) // max(1, self._size)
        self._max_tokens = min(MAX_COMPANION_TOKENS, share)
        if not self._max_tokens:
            self._size = 0
        self._members: OrderedDict[Key, Members] = OrderedDict()
        self._num_tokens = 0

    def join(self, namespace: Namespace, base: array[int], bodies: Iterable[array[int]]) -> bool:
        """Blocks are brought behind `base`: as long as it wants members, they become some. Whether any did."""
        if self._text is not None or not self._size:
            return False
        key = _key(namespace, base)
        before = members = self._members.get(key, ())
        for body in bodies:
            if len(members) > self._size:
                break
            # a text and its continuation are no company for each other
            if not any(begin_alike(body[: self._max_tokens], known) for known in members):
                members += (body,)
                self._num_tokens += len(body)
        if members:
            self._members[key] = members
        while self._num_tokens > MAX_MEMBER_TOKENS:
            _, forgotten = self._members.popitem(last=False)
            self._num_tokens -= sum(map(len, forgotten))
        return members is not before

    def front(self, namespace: Namespace, base: array[int], *, max_len: int | None = None) -> Front:
        """What stands in front of blocks behind `base`, as far as members are known."""
        if self._text is not None:
            return Front(base, (self._text,), 1, max_len)
        members = self.members(namespace, base)
        return Front(base, tuple(member[: self._max_tokens] for member in members), self._size, max_len)

    def members(self, namespace: Namespace, base: array[int]) -> Members:
        """The documents that are companions behind `base`, whole; none where it is the operator's text."""
        if not self._members:
            return ()
        key = _key(namespace, base)
        members = self._members.get(key, ())
        if members:
            self._members.move_to_end(key)
        return members

    def forget(self) -> None:
        """The tree was emptied, and with it every home: the next documents are the first again."""
        self._members.clear()
        self._num_tokens = 0


def _key(namespace: Namespace, base: array[int]) -> Key:
    return namespace, hashlib.sha256(base.tobytes()).digest()
