"""Which other documents stand in front of a block in its home.

A document that is computed right behind the leading text is computed as if it came first; in use it stands behind
others. So its home is

    | compile prefix | companions | block |
    |<------- the home's prefix ->|

The companions of a compile prefix are the first documents that a tenant's requests brought behind it. Each of them is
at home where it stands in that row, behind those that came before it; all other documents are behind the whole row:

    companions a b      home of a: prefix a      home of b: prefix a b      of any other: prefix a b other

So nothing moves when the next one joins, and no token is computed or kept for the row that would not be without it:
it consists of the companions' own homes, and at first sight it is the beginning of the very prompt that brings them.
They are chosen once and stay.

They are known by namespace: no tenant's text is ever part of what another reads.
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
# Tokens that are remembered over all compile prefixes, the least recently used are forgotten first: 8 MiB.
MAX_ROW_TOKENS = 1 << 20

Key = tuple[Namespace, bytes]
Row = tuple["array[int]", ...]


class Company:
    """The companions of every compile prefix, by namespace.

    wanted: how many stand in front of a block, or the operator's own text in their place.
    pool_size: of the KV pool, in tokens.
    Deterministic: every tensor-parallel rank that sees the same requests has the same ones.
    """

    def __init__(self, wanted: int | array[int], *, pool_size: int) -> None:
        self._text = None if isinstance(wanted, int) else wanted
        self._size = wanted if isinstance(wanted, int) else 0
        share = int(pool_size * MAX_POOL_SHARE) // max(1, self._size)
        self._max_tokens = min(MAX_COMPANION_TOKENS, share)
        self._rows: OrderedDict[Key, Row] = OrderedDict()
        self._num_tokens = 0

    def join(self, namespace: Namespace, base: array[int], bodies: Iterable[array[int]]) -> None:
        """Blocks are brought behind `base`: as long as its row is not full, they stand in it."""
        if not self._size or not self._max_tokens:
            return
        key = _key(namespace, base)
        row = self._rows.get(key, ())
        for body in bodies:
            if len(row) == self._size:
                break
            companion = body[: self._max_tokens]
            # a text and its continuation are no company for each other
            if not any(begin_alike(companion, known) for known in row):
                row += (companion,)
                self._num_tokens += len(companion)
        if row:
            self._rows[key] = row
        while self._num_tokens > MAX_ROW_TOKENS:
            _, forgotten = self._rows.popitem(last=False)
            self._num_tokens -= sum(map(len, forgotten))

    def front(self, namespace: Namespace, base: array[int], *, max_len: int | None = None) -> Front:
        """What stands in front of blocks behind `base`. max_len: of a home; beyond it a block goes without company."""
        if self._text is not None:
            return Front(base, (self._text,), max_len)
        if not self._rows:
            return Front(base)
        key = _key(namespace, base)
        row = self._rows.get(key, ())
        if row:
            self._rows.move_to_end(key)
        return Front(base, row, max_len)

    def forget(self) -> None:
        """The tree was emptied, and with it every home: the next documents are the first again."""
        self._rows.clear()
        self._num_tokens = 0


def _key(namespace: Namespace, base: array[int]) -> Key:
    return namespace, hashlib.sha256(base.tobytes()).digest()
