"""Faults of document blocks: marks, homes, policies, plans of prefill, the guard, the index of unmarked prompts."""

from __future__ import annotations

from faults import Fault

BLOCKS = "sglang_blockreuse/blocks"
POLICY, PLAN, GUARD, SPLIT, REQUEST, AUTO, MARKING, ROPE = (
    f"tests/unit/test_{name}.py"
    for name in ("policy", "plan", "guard", "split", "request", "auto", "marking", "rope")
)


def _fault(name: str, file: str, old: str, new: str, tests: str) -> Fault:
    return Fault(name, f"{BLOCKS}/{file}.py", old, new, tests)


BLOCK_FAULTS = [
    _fault(
        "the tail of a segment gets no window",
        "policy",
        "windows = [(layout.tau, layout.tau)] * len(layout.segments)",
        "windows = [(layout.tau, 0)] * len(layout.segments)",
        f"{POLICY} -k windows_of_tau",
    ),
    _fault(
        "a tail window begins one token early",
        "policy",
        "chosen.append(Interval(segment.end - last, segment.end))",
        "chosen.append(Interval(segment.end - last - 1, segment.end))",
        f"{POLICY} -k windows_of_tau",
    ),
    _fault(
        "what short segments leave is dealt to nobody",
        "policy",
        "num_open = len(capacities) - rank",
        "num_open = len(capacities)",
        f"{PLAN} -k dealing",
    ),
    _fault(
        "the question's interest in no block counts",
        "policy",
        "np.where(inside_N, attention_3N, 0.0)",
        "np.where(inside_N | True, attention_3N, 0.0)",
        GUARD,
    ),
    _fault(
        "one view of the question outweighs the others",
        "policy",
        "(scores_3N / np.maximum(totals_31, np.float32(1e-20))).sum(axis=0)",
        "scores_3N.sum(axis=0)",
        f"{POLICY} -k counts_alike",
    ),
    _fault(
        "the least interesting positions are repaired",
        "policy",
        "np.argsort(-means",
        "np.argsort(means",
        f"{POLICY} -k question_looks",
    ),
    _fault(
        "pieces grow past the budget",
        "policy",
        "np.minimum(ends[order], starts[order] + left)",
        "np.minimum(ends[order], starts[order] + left + 9)",
        f"{POLICY} -k spends_its_budget",
    ),
    _fault(
        "large budgets make a run for every token",
        "policy",
        "piece_len = max(1, -(-num // MAX_SCORED_RUNS))",
        "piece_len = 1",
        f"{POLICY} -k longer_pieces",
    ),
    _fault(
        "the guard passes what is twice the bound",
        "guard",
        "if value <= bound:",
        "if value <= 2 * bound:",
        GUARD,
    ),
    _fault(
        "the guard never computes all",
        "guard",
        'return "raised" if value <= FULL_BEYOND * bound else "full"',
        'return "raised"',
        GUARD,
    ),
    _fault(
        "a raised share is more than everything",
        "guard",
        "min(1.0, budget) if options.budget <= 1 else budget",
        "budget",
        GUARD,
    ),
    _fault(
        "the guard counts what stays local as repaired",
        "guard",
        "return 1.0 - repaired / total if total > 0 else 0.0",
        "return repaired / total if total > 0 else 0.0",
        GUARD,
    ),
    _fault(
        "the last position is copied",
        "plan",
        "repaired = merge([*repaired, Interval(end - 1, end)])",
        "repaired = merge(repaired)",
        f"{PLAN} -k tile",
    ),
    _fault(
        "local paths are repaired again",
        "plan",
        "segments=tuple(s.interval for s in segments if not s.is_path),",
        "segments=tuple(s.interval for s in segments),",
        f"{PLAN} -k taken_over",
    ),
    _fault(
        "what is left of holes begins at a hole",
        "intervals",
        "        position = hole.end",
        "        position = hole.start",
        f"{PLAN} -k subtract",
    ),
    _fault(
        "touching intervals stay apart",
        "intervals",
        "if merged and interval.start <= merged[-1].end:",
        "if merged and interval.start < merged[-1].end:",
        f"{PLAN} -k merge",
    ),
    _fault(
        "the longest copies are computed to save rows",
        "plan",
        "key=lambda i: (len(copies[i].interval), i))[:num])",
        "key=lambda i: (-len(copies[i].interval), i))[:num])",
        f"{PLAN} -k row_limit",
    ),
    _fault(
        "a copied token counts as repaired",
        "plan",
        "num_repaired=num_local - num_reused,",
        "num_repaired=num_local,",
        f"{PLAN} -k budget_bounds",
    ),
    _fault(
        "blocks move the wrong way",
        "split",
        "return self.span.start - self.prefix_len",
        "return self.prefix_len - self.span.start",
        f"{SPLIT} -k compile_prefix_and_the_block",
    ),
    _fault(
        "a block at position 0 compiles in a void",
        "split",
        'kind = "leading" if first_start > 0 else "bos"',
        'kind = "leading"',
        f"{SPLIT} -k the_compile_prefix",
    ),
    _fault(
        "short blocks get homes",
        "split",
        "if len(span) >= min_block_tokens and",
        "if len(span) >= min_block_tokens - 9 and",
        f"{SPLIT} -k short_blocks",
    ),
    _fault(
        "the block behind the true prefix is compiled",
        "split",
        "return span.start == 0 or (span.start == len(prefix) and tokens[: span.start] == prefix)",
        "return False",
        f"{SPLIT} -k true_prefix",
    ),
    _fault(
        "spans may overlap",
        "request",
        "map(le, (0, *ends), (*starts, prompt_len))",
        "map(le, (0, *(e - 9 for e in ends)), (*starts, prompt_len))",
        f"{REQUEST} -k malformed",
    ),
    _fault(
        "spans may end behind the prompt",
        "request",
        "(*starts, prompt_len))",
        "(*starts, 1 << 40))",
        f"{REQUEST} -k malformed",
    ),
    _fault(
        "true is a number of tokens",
        "request",
        "return isinstance(value, int) and not isinstance(value, bool)",
        "return isinstance(value, int)",
        REQUEST,
    ),
    _fault(
        "a client may name a namespace of local KV",
        "request",
        "if extra_key is not None and extra_key.startswith(PATH_PREFIX):",
        "if extra_key == PATH_PREFIX:",
        f"{REQUEST} -k namespaces",
    ),
    _fault(
        "a mistyped key is ignored",
        "request",
        "unknown = sorted(given.keys() - set(KEYS))",
        "unknown = sorted(given.keys() - set(KEYS))[:0]",
        f"{REQUEST} -k mistyped",
    ),
    _fault(
        "a token beyond the vocabulary reaches the scheduler",
        "request",
        "if not 0 <= t < vocab_size), None",
        "if not 0 <= t), None",
        f"{REQUEST} -k dies_of",
    ),
    _fault(
        "the index finds across namespaces",
        "auto",
        "home = self._spaces.get(space)\n        ids_T",
        "home = next(iter(self._spaces.values()), None)\n        ids_T",
        f"{AUTO} -k another_namespace",
    ),
    _fault(
        "short stretches are hits",
        "windows",
        "if best < min_hit:",
        "if best < min_hit - 1:",
        f"{AUTO} -k short_stretches",
    ),
    _fault(
        "the index has no bound",
        "auto",
        "while self.num_tokens > self.max_tokens:",
        "while self.num_tokens > 2 * self.max_tokens:",
        f"{AUTO} -k memory_bound",
    ),
    _fault(
        "the most recently used donor leaves first",
        "auto",
        "self.forget(next(iter(self._recent)))",
        "self.forget(next(reversed(self._recent)))",
        f"{AUTO} -k least_recently",
    ),
    _fault(
        "token id 0 counts for nothing",
        "windows",
        "hashes[at + 1] = (_times(hashes[at], point) + (ids_T[at] & PRIME) + 1) % PRIME",
        "hashes[at + 1] = (_times(hashes[at], point) + (ids_T[at] & PRIME)) % PRIME",
        AUTO,
    ),
    _fault(
        "marks of a template that escaped them are trusted",
        "mark",
        "if any(nonce in piece.text for piece in pieces):",
        "if not pieces:",
        MARKING,
    ),
    _fault(
        "what the tokeniser puts in front is lost",
        "mark",
        "ids, spans = head, []",
        "ids, spans = [], []",
        MARKING,
    ),
    _fault(
        "a rotary table that was changed is trusted",
        "rope",
        "if off is None or not off <= 2 * torch.finfo(rope.dtype).eps:",
        "if off is None:",
        f"{ROPE} -k changed_after",
    ),
]
