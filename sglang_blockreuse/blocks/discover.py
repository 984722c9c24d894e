"""Homes that were never compiled: exact prompts of earlier requests that hold a block's tokens.

Serves `blocks.auto` (no marks at all) and `compile: harvest` (marked blocks). A home found this way is the donor
up to the end of the hit, its "compile prefix" whatever stood in front of the block there. Consequences that the
caller accepts with either setting: the KV of a block depends on who asked first and in which company, two equal
requests may be answered differently, and quality varies with the donor. What compiling costs is saved.

Only exact KV is a donor: KV that was moved is never moved again.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

from ..types import Interval
from .auto import AutoIndex, DonorHit
from .match import Namespace, Tree
from .split import Home

# A request whose hits cover less than this share of what they could cover is served exactly: everything behind
# the first moved token would be approximate for little, and exact prompts are the only donors of later ones.
MIN_SHARE = 0.5


class Discovery:
    """Asks the index for tokens and the tree for whether their KV is still there."""

    def __init__(self, tree: Tree, *, min_block_tokens: int) -> None:
        self.index = AutoIndex(min_hit=min_block_tokens)
        self._tree = tree

    def unmarked(self, tokens: array[int], namespace: Namespace) -> tuple[list[Home], str | None]:
        """Homes of the blocks found in an unmarked prompt, and why there are none: a `skipped_reason`."""
        # the last token is computed in any case
        rest = Interval(self._exact_prefix(tokens, namespace), len(tokens) - 1)
        homes = self._cached(self.index.find(tokens, namespace, start=rest.start, end=rest.end), namespace)
        return self._worth_it(homes, len(rest), "auto_no_hits", "auto_few_hits")

    def marked(
        self, tokens: array[int], spans: Sequence[Interval], namespace: Namespace
    ) -> tuple[list[Home], str | None]:
        """The same for marked blocks, each searched on its own; a block may be found in several stretches."""
        start = self._exact_prefix(tokens, namespace)
        homes: list[Home] = []
        wanted = 0
        for block, span in enumerate(spans):
            part = span.clip(start, len(tokens) - 1)
            wanted += len(part)
            hits = self.index.find(tokens, namespace, start=part.start, end=part.end) if len(part) else []
            homes += [replace(home, block=block) for home in self._cached(hits, namespace)]
        return self._worth_it(homes, wanted, "harvest_no_hits", "harvest_few_hits")

    def published(self, tokens: Sequence[int], namespace: Namespace) -> None:
        """The tree holds exact KV of these tokens now."""
        self.index.register(tokens, namespace)

    def _exact_prefix(self, tokens: array[int], namespace: Namespace) -> int:
        length, _ = self._tree.lookup(tokens, namespace)
        return length

    def _cached(self, hits: Sequence[DonorHit], namespace: Namespace) -> list[Home]:
        """Hits cut to what the tree holds; donors that it no longer holds are forgotten."""
        homes: list[Home] = []
        for hit in hits:
            tokens = hit.tokens
            length, _ = self._tree.lookup(tokens, namespace)
            held = length - hit.offset
            if held < self.index.min_hit:
                self.index.forget(hit.donor)
                continue
            span = Interval(hit.span.start, hit.span.start + held)
            homes.append(Home(len(homes), span, tokens[: hit.offset], tokens[hit.offset : length]))
        return homes

    def _worth_it(
        self, homes: list[Home], num_wanted: int, none: str, few: str
    ) -> tuple[list[Home], str | None]:
        if not homes:
            return [], none
        if sum(len(home.span) for home in homes) < MIN_SHARE * num_wanted:
            return [], few
        return homes, None
