"""Where blocks stand in a prompt and which home each of them has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np

from ..config import BlocksConfig
from ..types import Interval
from .plan import MAX_RUNS

# A request's homes together hold at most so many times the tokens of its prompt, the compile prefix counted in each:
# every lookup walks the whole home, in the scheduler's thread.
MAX_HOME_VOLUME = 64


@dataclass(frozen=True, slots=True)
class Home:
    """The sequence in which a block's reusable KV is computed: compile prefix + companions + block."""

    block: int  # index among the request's spans
    span: Interval  # where the block stands in this request
    prefix: array[
        int
    ]  # compile prefix + companions; one array for all homes that share it, because it may be most of the prompt
    body: array[int]  # the block's tokens

    def __len__(self) -> int:
        return len(self.prefix) + len(self.body)

    @property
    def tokens(self) -> array[int]:
        """Prefix + block, an ordinary prompt; built for whoever asks."""
        return self.prefix + self.body

    @property
    def prefix_len(self) -> int:
        """Home offset."""
        return len(self.prefix)

    @property
    def delta(self) -> int:
        """New position - home position, the same for every token of the block."""
        return self.span.start - self.prefix_len


class Front:
    """What stands in front of the blocks of one request: one array for all that have the same.

    base: the compile prefix; companions: the row behind it, see company.py.
    max_len: of a home; one that the row would make longer is right behind `base`.
    """

    def __init__(
        self, base: array[int], companions: Sequence[array[int]] = (), max_len: int | None = None
    ) -> None:
        self._companions = companions
        self._max_len = max_len
        self._prefixes = [base]
        for companion in companions:
            self._prefixes.append(self._prefixes[-1] + companion)

    @property
    def row(self) -> array[int]:
        """The compile prefix and all companions; every home's prefix is a beginning of it."""
        return self._prefixes[-1]

    def of(self, body: array[int]) -> array[int]:
        """The prefix of the home of the block `body`."""
        own = (i for i, companion in enumerate(self._companions) if begin_alike(companion, body))
        prefix = self._prefixes[next(own, -1)]
        is_too_long = self._max_len is not None and len(prefix) + len(body) > self._max_len
        return self._prefixes[0] if is_too_long else prefix


def compile_prefix(
    tokens: array[int], first_start: int, *, config: BlocksConfig, bos: int | None
) -> array[int]:
    """Tokens that a home sequence starts with.

    auto: the text in front of the first block (the system prompt, exact wherever it is
    reused). Where a block stands at position 0 the prompt has none, and a home behind
    that block would serve no other order; the BOS token then stands in as a sink.
    """
    kind = config.compile_prefix
    if kind == "auto":
        kind = "leading" if first_start > 0 else "bos"
    if kind == "leading":
        return tokens[:first_start]
    if kind == "bos" and bos is not None:
        return array("q", (bos,))
    return array("q")


def homes(
    tokens: array[int],
    spans: Sequence[Interval],
    *,
    front: Front,
    min_block_tokens: int,
    all_blocks: bool = False,
) -> list[Home]:
    """Homes of the blocks that may be reused.

    Left out: blocks shorter than `min_block_tokens`, and what begins as the homes do in this very prompt (a block that
    continues the compile prefix, companions at their place), because there its KV is an exact prefix. With
    `all_blocks` (a prompt that is not going to run) the latter are kept.
    """
    num_exact = 0 if all_blocks else num_shared(tokens, front.row)
    found = []
    for i, span in enumerate(spans):
        if len(span) < min_block_tokens or span.end <= num_exact:
            continue
        body = tokens[span.start : span.end]
        prefix = front.of(body)
        is_home = span.start == 0 or span.start == len(prefix) <= num_exact
        if all_blocks or not is_home:
            found.append(Home(i, span, prefix, body))
    return found


def num_shared(a: array[int], b: array[int]) -> int:
    """How many tokens two sequences have in common at their beginning."""
    length = min(len(a), len(b))
    if not length:
        return 0
    differ = np.flatnonzero(np.frombuffer(a, np.int64, length) != np.frombuffer(b, np.int64, length))
    return int(differ[0]) if len(differ) else length


def begin_alike(a: array[int], b: array[int]) -> bool:
    length = min(len(a), len(b))
    return a[:length] == b[:length]


class _Located(Protocol):
    """A home, or what is going to be one: its length is that of the sequence in which its block's KV is computed."""

    @property
    def span(self) -> Interval: ...

    def __len__(self) -> int: ...


L = TypeVar("L", bound=_Located)


def bounded(homes: Sequence[L], *, prompt_len: int) -> list[L]:
    """Those of `homes` with the longest blocks, as many as one request may have, in their order.

    No plan has more rows than MAX_RUNS and each block that is reused ends one, so further homes are of no use;
    and what they hold together is at most MAX_HOME_VOLUME prompts.
    """
    longest = sorted(range(len(homes)), key=lambda i: (-len(homes[i].span), i))
    room = MAX_HOME_VOLUME * prompt_len
    kept = []
    for i in longest[:MAX_RUNS]:
        room -= len(homes[i])
        if room < 0:
            break
        kept.append(i)
    return [homes[i] for i in sorted(kept)]
