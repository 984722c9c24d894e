"""Where every token of a prompt came from, piece by piece, for a request that asks with `blockreuse_explain`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..types import BlockPlan, Interval
from .intervals import intersect_each, subtract, subtract_each

NO_BLOCK = -1


def explain(
    plan: BlockPlan | None, spans: Sequence[Interval], *, prefix_len: int, prompt_len: int
) -> list[list[Any]]:
    """[[start, end, kind, block], …]: pieces that tile the prompt, ascending, each inside one block or outside of all.

    kind: prefix, reused, repaired or fresh, as the usage counts them; block: index of the marked block, or NO_BLOCK.
    """
    kinds = {"prefix": [Interval(0, prefix_len)], "fresh": [Interval(prefix_len, prompt_len)]}
    if plan is not None:
        segments, copies = [s.interval for s in plan.segments], [c.interval for c in plan.copies]
        kinds["reused"] = copies
        kinds["repaired"] = [part for _, part in subtract_each(segments, copies)]
        kinds["fresh"] = subtract(Interval(plan.start, plan.end), segments)
    pieces = []
    for kind, whole in kinds.items():
        # the last position is computed for the answer, which may go on behind a prompt that was retracted
        parts = [part for one in whole if len(part := one.clip(0, prompt_len))]
        pieces += [(part, kind, block) for block, part in intersect_each(spans, parts)]
        pieces += [(part, kind, NO_BLOCK) for _, part in subtract_each(parts, spans)]
    return [
        [part.start, part.end, kind, block]
        for part, kind, block in sorted(pieces, key=lambda piece: piece[0].start)
    ]
