"""What reuse is worth: whether a plan pays, which homes it would read, and why a request reuses nothing."""

from __future__ import annotations

from collections.abc import Sequence

from ..types import BlockOptions, BlockPlan, Interval, LocalSegment
from .plan import build_plan
from .policy import POLICIES
from .split import Home

# What a further row costs in attention and bookkeeping, and what taking over any KV costs, in computed tokens.
ROW_COST_TOKENS = 1
MIN_REUSED_TOKENS = 16
# Every `skipped_reason` of an admission that was allowed to reuse.
ADMISSION_VERDICTS = (
    "not_cached",
    "exact_prefix",
    "all_repaired",
    "input_logprobs",
    "blocks_too_short",
    "pool_too_small",
    "compile_off",
    "compile_background",
    "compile_manual",
    "queue_full",
    "cost_gate",
    "home_too_long",
    "too_many_blocks",
    "home_lost",
    "no_room",
)


def pays(plan: BlockPlan) -> bool:
    """Whether reuse saves more than its rows and copies cost, by counts of tokens."""
    return plan.num_reused >= MIN_REUSED_TOKENS + ROW_COST_TOKENS * (len(plan.runs) - 1)


def refusal(plan: BlockPlan) -> str | None:
    """Why a plan is not worth its rows; None: it is."""
    if not plan.copies:
        return "all_repaired"
    return None if pays(plan) else "cost_gate"


def layout_policy(options: BlockOptions) -> str:
    """The policy that plans before anything is measured."""
    policy = POLICIES[options.policy]
    return options.policy if policy.needs == "layout" else policy.fallback or options.policy


def worth_compiling(
    homes: Sequence[Home], options: BlockOptions, *, start: int, limit: int, end: int
) -> tuple[list[Home], str | None]:
    """Those of `homes` whose KV the request would copy if it had all of them, and why there are none.

    start: length of the exact prefix; limit: positions from here on are computed in any case; end: of the prompt.
    """
    parts = [(home, home.span.clip(start, limit)) for home in homes]
    parts = [(home, part) for home, part in parts if len(part)]
    if not parts:
        return [], None
    segments = [LocalSegment(part, home.delta, home.block, home.span.start) for home, part in parts]
    plan = build_plan(segments, start=start, end=end, options=options, policy=layout_policy(options))
    reason = refusal(plan)
    if reason is not None:
        return [], reason
    if POLICIES[options.policy].needs != "layout":
        return [home for home, _ in parts], None  # what is measured may choose otherwise
    copied = {copy.segment for copy in plan.copies}
    return [home for i, (home, _) in enumerate(parts) if i in copied], None


def why_nothing(
    spans: Sequence[Interval],
    homes: Sequence[Home],
    *,
    prefix_len: int,
    prompt_len: int,
    limit: int,
    refused: str | None,
    not_compiled: str | None,
    min_block_tokens: int,
) -> str:
    """The `skipped_reason` of an admission that was allowed to reuse and did not.

    limit: positions from here on are computed in any case, because their log-probabilities are wanted.
    refused: why the plan of what was found was not adopted; not_compiled: why homes were left unseen.
    """
    # the last token of a prompt is never a prefix hit
    left = _behind(spans, prefix_len, prompt_len - 1)
    if not left:
        return "exact_prefix"
    if not _behind(spans, prefix_len, limit):
        return "input_logprobs"
    at_home = [home.span for home in homes]
    if _num_tokens(_behind(at_home, prefix_len, limit)) >= MIN_REUSED_TOKENS:
        return refused or not_compiled or "not_cached"
    if _num_tokens(_behind(at_home, prefix_len, prompt_len - 1)) >= MIN_REUSED_TOKENS:
        return "input_logprobs"
    if not_compiled in ("home_too_long", "too_many_blocks"):
        return not_compiled
    # a block that continues the exact prefix has no home: it would be a prefix hit, if it was cached
    is_new = any(len(part) >= max(MIN_REUSED_TOKENS, min_block_tokens) for part in left)
    return "not_cached" if is_new and not homes_reach(homes, prefix_len) else "blocks_too_short"


def homes_reach(homes: Sequence[Home], prefix_len: int) -> bool:
    """Whether a block with a home reaches behind the exact prefix."""
    return any(home.span.end > prefix_len for home in homes)


def _behind(spans: Sequence[Interval], low: int, high: int) -> list[Interval]:
    return [part for span in spans if len(part := span.clip(low, high))]


def _num_tokens(parts: Sequence[Interval]) -> int:
    return sum(len(part) for part in parts)
