"""Where blocks stand in a prompt and which home each of them has."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from ..config import BlocksConfig
from ..types import Interval


@dataclass(frozen=True, slots=True)
class Home:
    """The sequence in which a block's reusable KV is computed: compile prefix + block."""

    block: int  # index among the request's spans
    span: Interval  # where the block stands in this request
    tokens: array[int]  # compile prefix + block, an ordinary prompt
    prefix_len: int  # home offset: length of the compile prefix

    @property
    def delta(self) -> int:
        """New position - home position, the same for every token of the block."""
        return self.span.start - self.prefix_len


def compile_prefix(
    tokens: Sequence[int], first_start: int, *, config: BlocksConfig, bos: int | None
) -> tuple[int, ...]:
    """Tokens that a home sequence starts with.

    auto: the text in front of the first block (the system prompt, exact wherever it is
    reused). Where a block stands at position 0 the prompt has none, and a home behind
    that block would serve no other order; the BOS token then stands in as a sink.
    """
    kind = config.compile_prefix
    if kind == "auto":
        kind = "leading" if first_start > 0 else "bos"
    if kind == "leading":
        return tuple(tokens[:first_start])
    if kind == "bos" and bos is not None:
        return (bos,)
    return ()


def homes(
    tokens: array[int],
    spans: Sequence[Interval],
    *,
    prefix: tuple[int, ...],
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
        Home(i, span, head + tokens[span.start : span.end], len(prefix))
        for i, span in enumerate(spans)
        if len(span) >= min_block_tokens and (all_blocks or not _is_exact(tokens, span, prefix))
    ]


def _is_exact(tokens: array[int], span: Interval, prefix: tuple[int, ...]) -> bool:
    return span.start == 0 or (span.start == len(prefix) and tuple(tokens[: span.start]) == prefix)
