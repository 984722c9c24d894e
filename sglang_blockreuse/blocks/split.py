"""Where blocks stand in a prompt and which home each of them has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import BlocksConfig
from ..types import Interval
from .plan import MAX_RUNS

# A request's homes together hold at most so many times the tokens of its prompt, the compile prefix counted in each:
# every lookup walks the whole home, in the scheduler's thread.
MAX_HOME_VOLUME = 64


@dataclass(frozen=True, slots=True)
class Home:
    """The sequence in which a block's reusable KV is computed: compile prefix + block."""

    block: int  # index among the request's spans
    span: Interval  # where the block stands in this request
    prefix: array[
        int
    ]  # compile prefix; one array for all homes of a request, because it may be most of the prompt
    body: array[int]  # the block's tokens

    def __len__(self) -> int:
        return len(self.prefix) + len(self.body)

    @property
    def tokens(self) -> array[int]:
        """Compile prefix + block, an ordinary prompt; built for whoever asks."""
        return self.prefix + self.body

    @property
    def prefix_len(self) -> int:
        """Home offset: length of the compile prefix."""
        return len(self.prefix)

    @property
    def delta(self) -> int:
        """New position - home position, the same for every token of the block."""
        return self.span.start - self.prefix_len


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
    prefix: Sequence[int],
    min_block_tokens: int,
    all_blocks: bool = False,
) -> list[Home]:
    """Homes of the blocks that may be reused.

    Left out: blocks shorter than `min_block_tokens`, and a block that continues the
    compile prefix in this very prompt, because there its KV is an exact prefix. With `all_blocks` (a prompt
    that is not going to run) the latter are kept.
    """
    head = array("q", prefix)
    return [
        Home(i, span, head, tokens[span.start : span.end])
        for i, span in enumerate(spans)
        if len(span) >= min_block_tokens and (all_blocks or not _is_exact(tokens, span, head))
    ]


def bounded(homes: Sequence[Home], *, prompt_len: int) -> list[Home]:
    """The longest of `homes`, as many as one request may have, in their order.

    No plan has more rows than MAX_RUNS and each block that is reused ends one, so further homes are of no use;
    and what they hold together is at most MAX_HOME_VOLUME prompts.
    """
    longest = sorted(range(len(homes)), key=lambda i: (-len(homes[i].body), i))
    room = MAX_HOME_VOLUME * prompt_len
    kept = []
    for i in longest[:MAX_RUNS]:
        room -= len(homes[i])
        if room < 0:
            break
        kept.append(i)
    return [homes[i] for i in sorted(kept)]


def _is_exact(tokens: array[int], span: Interval, prefix: array[int]) -> bool:
    return span.start == 0 or (span.start == len(prefix) and tokens[: span.start] == prefix)
