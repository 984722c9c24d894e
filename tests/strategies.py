"""Hypothesis strategies shared by the tests."""

from __future__ import annotations

from hypothesis import strategies as st

from sglang_blockreuse.types import BlockOptions, Interval, LocalSegment


@st.composite
def spans(draw: st.DrawFn, max_len: int = 200) -> tuple[tuple[Interval, ...], int]:
    """Ascending disjoint intervals and the length of the prompt that holds them."""
    cuts = sorted(draw(st.sets(st.integers(0, max_len), min_size=2, max_size=12)))
    cuts = cuts[: len(cuts) // 2 * 2]
    found = tuple(Interval(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=True))
    return found, cuts[-1] + draw(st.integers(0, 20))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[LocalSegment], int, int, BlockOptions]:
    """Reusable segments behind an exact prefix: (segments, start, end, options)."""
    found, prompt_len = draw(spans())
    end = prompt_len + draw(st.integers(0, 10))  # a retracted request prefills its output again
    end = max(end, 1)
    start = draw(st.integers(0, end - 1))
    segments = [
        LocalSegment(span.clip(start, end), delta=draw(st.integers(-50, 50)), block=i, block_start=span.start)
        for i, span in enumerate(found)
        if len(span.clip(start, end))
    ]
    options = BlockOptions(
        mode="reuse",
        spans=found,
        policy="seam",
        tau=draw(st.none() | st.integers(0, 40)),
        budget=draw(st.floats(0.0, 1.0)),
    )
    return segments, start, end, options
