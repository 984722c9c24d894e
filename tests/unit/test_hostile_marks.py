"""What a client can make the scheduler's thread do: each stage on the worst that can be sent to it.

A decode step of everybody waits while one prompt is read, looked up and planned. `bounded.allowed_ms` is what it may
take; the work that stood here before took between 15 and 400 ms for each 10K tokens on these inputs.
"""

from __future__ import annotations

import contextlib
import itertools
from array import array
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bounded import allowed_ms, thread_ms
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_blockreuse.blocks.auto import AutoIndex
from sglang_blockreuse.blocks.compile import Compiler
from sglang_blockreuse.blocks.discover import Discovery
from sglang_blockreuse.blocks.guard import repaired_in
from sglang_blockreuse.blocks.mark import Fence, cut_at_fences, cut_at_separator, encode
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.paths import path_namespace
from sglang_blockreuse.blocks.plan import MAX_RUNS, build_plan
from sglang_blockreuse.blocks.policy import POLICIES, Evidence, Layout
from sglang_blockreuse.blocks.request import RequestError, check_prompt, parse_options
from sglang_blockreuse.blocks.rows import fold_batch, repair_mask
from sglang_blockreuse.blocks.split import MAX_HOME_VOLUME, Front, bounded, homes
from sglang_blockreuse.blocks.worth import worth_compiling
from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.types import BlockOptions, BlockPlan, Interval, LocalSegment

LONG = 131_072  # tokens of the longest prompt
HERE = Namespace(None, None)
CONFIG = BlocksConfig()
SHORTEST = CONFIG.min_block_tokens
RNG = np.random.default_rng(0)


def assert_bounded(work, num_tokens: int) -> None:
    taken = thread_ms(work)
    assert taken <= allowed_ms(num_tokens), (
        f"{taken:.1f} ms for {num_tokens} tokens, {1e4 * taken / num_tokens:.1f} ms for 10K of them"
    )


def ids_of(values) -> array:
    return array("q", np.asarray(values, dtype=np.int64).tobytes())


def comb(num_tokens: int, length: int, *, gap: int = 0, first: int = 0) -> tuple[Interval, ...]:
    """As many spans of a length as fit."""
    return tuple(Interval(s, s + length) for s in range(first, num_tokens - length, length + gap))


# -- marks -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "params",
    [
        pytest.param({"blockreuse_spans": list(range(LONG))}, id="a span for every other token"),
        pytest.param({"blockreuse_spans": [x for i in range(LONG) for x in (i, i + 1)]}, id="each token"),
        pytest.param({"blockreuse_spans": [*range(LONG), 5, 6]}, id="the last one is wrong"),
        pytest.param({"blockreuse_spans": [*range(LONG - 1), "x"]}, id="the last one is no number"),
        pytest.param({"blockreuse_spans": list(range(LONG)), "blockreuse_tau": 2**31 - 1}, id="tau"),
    ],
)
def test_marks_are_read_in_bounded_time(params):
    def read():
        with contextlib.suppress(RequestError):
            parse_options(params, prompt_len=LONG, config=CONFIG)

    assert_bounded(read, LONG)


@pytest.mark.parametrize("was_cut", [False, True])
@pytest.mark.parametrize(
    "spans",
    [
        pytest.param(list(range(3_000_000)), id="three million numbers"),
        pytest.param({str(i): i for i in range(300_000)}, id="an object"),
        pytest.param("0" * 30_000_000, id="a text"),
        pytest.param([[0] * 1000] * 100_000, id="lists"),
    ],
)
def test_a_short_prompt_pays_for_its_tokens_and_not_for_what_it_sends(spans, was_cut):
    """Messages are short, too."""
    messages = []

    def read():
        try:
            parse_options({"blockreuse_spans": spans}, prompt_len=100, config=CONFIG, was_cut=was_cut)
        except RequestError as error:
            messages.append(str(error))

    assert_bounded(read, 100)
    assert all(len(message) < 500 for message in messages)


def test_token_ids_are_checked_in_bounded_time():
    ids = ids_of(np.full(LONG, 5))
    assert_bounded(lambda: check_prompt(ids, vocab_size=50_000, logprob_start_len=-1), LONG)
    with pytest.raises(RequestError, match="input_ids holds 50000"):
        check_prompt(ids[:9] + array("q", [50_000]), vocab_size=50_000, logprob_start_len=-1)
    with pytest.raises(RequestError, match="input_ids holds -1"):
        check_prompt(array("q", [-1, 3]), vocab_size=50_000, logprob_start_len=-1)


# -- text, in the tokenizer's process ------------------------------------------------------------


def test_text_is_cut_in_less_time_than_it_takes_to_tokenise_it():
    """A tokeniser takes 15 us for a piece of one token; to cut 64K pieces is linear in them."""
    fence, num = Fence(), 1 << 16
    allowed = 15e-3 * num
    assert thread_ms(lambda: cut_at_separator("x<sep>" * num, "<sep>")) < allowed
    assert thread_ms(lambda: cut_at_separator("<sep>" * num, "<sep>")) < allowed
    assert thread_ms(lambda: cut_at_fences(fence.around("x") * num, fence)) < allowed
    assert thread_ms(lambda: cut_at_fences(fence.opening * num, fence)) < allowed


def test_each_piece_is_tokenised_once():
    """But for the first that is not empty, which shows what the tokeniser puts around a prompt."""
    calls = []

    def plain(text):
        calls.append(text)
        return [ord(c) for c in text]

    pieces = cut_at_separator("<sep>".join("abcdefgh" * 200), "<sep>")
    marked = encode(pieces, with_specials=lambda text: [0, *(ord(c) for c in text), 1], plain=plain)
    assert len(marked.ids) == len(pieces) + 2
    assert len(calls) == len(pieces) + 1


# -- plans ---------------------------------------------------------------------------------------

LAYOUTS = [
    pytest.param((Interval(0, LONG),), id="one block"),
    pytest.param(comb(LONG, SHORTEST), id="the shortest blocks"),
    pytest.param(comb(LONG, 1, gap=SHORTEST - 1), id="single tokens"),
]


@pytest.mark.parametrize("budget", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("segments", LAYOUTS)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_chooses_in_bounded_time(policy, segments, budget):
    evidence = Evidence(RNG.random((3, LONG), dtype=np.float32), RNG.random(LONG, dtype=np.float32))
    layout = Layout(segments=segments, budget_tokens=int(budget * LONG), evidence=evidence)
    assert_bounded(lambda: POLICIES[policy].select(layout), LONG)


def plan_of(blocks, *, end: int, policy: str = "seam", tau: int | None = None, budget: float = 0.05):
    segments = [LocalSegment(s, delta=1, block=i, block_start=s.start) for i, s in enumerate(blocks)]
    options = BlockOptions(mode="reuse", spans=tuple(blocks), policy=policy, tau=tau, budget=budget)
    return build_plan(segments, start=0, end=end, options=options)


@pytest.mark.parametrize("tau", [None, 0, 1, 8, 2**31 - 1])
@pytest.mark.parametrize(
    "blocks",
    [
        pytest.param(comb(LONG, 64), id="2,047 blocks"),
        pytest.param(comb(LONG, SHORTEST), id="the shortest"),
        pytest.param(comb(LONG, SHORTEST, gap=1), id="the shortest with gaps"),
        pytest.param(comb(LONG, 1, gap=SHORTEST - 1), id="single tokens"),
    ],
)
def test_a_plan_is_built_in_bounded_time(blocks, tau):
    assert_bounded(lambda: plan_of(blocks, end=LONG, tau=tau), LONG)
    plan = plan_of(blocks, end=LONG, tau=tau)
    assert len(plan.runs) <= MAX_RUNS
    assert_bounded(lambda: repaired_in(plan), LONG)


@pytest.mark.parametrize("chunk", [64, 512, 8192])
@pytest.mark.parametrize("gap", [0, 1])
def test_all_chunks_of_a_plan_together_take_bounded_time(gap, chunk):
    """What admission, loading and folding ask of each chunk, asked for all of a prompt."""
    plan = plan_of(comb(LONG, SHORTEST, gap=gap), end=LONG, tau=0)

    def by_computed():
        low = 0
        while low < LONG:
            high = plan.chunk_end(low, chunk)
            look_at(plan, low, high)
            low = high

    def by_positions():
        for low in range(0, LONG, chunk):
            look_at(plan, low, min(low + chunk, LONG))

    # every chunk computes its last position, so a chunk costs something even where it copies all
    num_steps = LONG // chunk
    for walk in (by_computed, by_positions):
        taken = thread_ms(walk, repeat=2)
        assert taken <= allowed_ms(LONG) + 0.05 * num_steps, f"{taken:.1f} ms in {num_steps} chunks"


def look_at(plan: BlockPlan, low: int, high: int) -> None:
    plan.num_computed(low, high)
    plan.runs_within(low, high)
    list(plan.copies_within(low, high))
    list(plan.copies_within(low, high))
    list(plan.repairs_within(low, high))


def test_rows_are_folded_in_bounded_time():
    """Eight requests with as many rows as a request may have."""
    length = LONG // 8
    plan = plan_of(comb(length, SHORTEST, gap=8), end=length, tau=1)
    runs = [plan.runs_within(0, length)] * 8
    repairs = [list(plan.repairs_within(0, length))] * 8
    lens = torch.full((8,), length)
    batch = SimpleNamespace(
        prefix_lens=[0] * 8,
        extend_lens=[length] * 8,
        extend_logprob_start_lens=[length] * 8,
        reqs=[SimpleNamespace(rid=str(i)) for i in range(8)],
        input_ids=torch.zeros(LONG, dtype=torch.long),
        out_cache_loc=torch.zeros(LONG, dtype=torch.long),
        req_pool_indices=lens,
        req_pool_indices_cpu=lens,
        seq_lens=lens,
        seq_lens_cpu=lens,
        orig_seq_lens=lens,
        multimodal_inputs=None,
        replace_positions=None,
    )
    assert_bounded(lambda: fold_batch(batch, runs), LONG)
    assert_bounded(lambda: repair_mask(runs, repairs), LONG)


def test_the_name_of_a_local_path_costs_what_hashing_its_tokens_costs():
    ids = ids_of(RNG.integers(0, 50_000, LONG))
    assert_bounded(lambda: path_namespace(ids[:LONG], HERE, "policy"), LONG)


# -- homes ---------------------------------------------------------------------------------------


class EmptyTree:
    """A tree that holds nothing, and counts the tokens that it is asked for."""

    def __init__(self):
        self.num_asked = 0

    def lookup(self, tokens, namespace):
        self.num_asked += len(tokens)
        return 0, None


class FullTree(EmptyTree):
    """A tree that holds whatever it is asked for."""

    def lookup(self, tokens, namespace):
        self.num_asked += len(tokens)
        return len(tokens), None


@pytest.mark.parametrize("tree", [EmptyTree, FullTree])
@pytest.mark.parametrize("leading", [0, 1, LONG // 2])
def test_homes_of_a_prompt_are_made_and_looked_up_in_bounded_time(leading, tree):
    prompt = ids_of(RNG.integers(0, 50_000, LONG))
    spans = comb(LONG, SHORTEST, first=leading)
    options = BlockOptions(mode="reuse", spans=spans, policy="seam", tau=None, budget=0.05)
    asked = tree()

    def arrive():
        made = homes(prompt, spans, front=Front(prompt[:leading]), min_block_tokens=SHORTEST)
        kept = bounded(made, prompt_len=LONG)
        wanted, _ = worth_compiling(kept, options, start=0, limit=LONG, end=LONG)
        Compiler().jobs_for(asked, wanted, HERE)

    assert_bounded(arrive, LONG)
    assert asked.num_asked <= 3 * (MAX_HOME_VOLUME + 1) * LONG


# -- the index -----------------------------------------------------------------------------------

W = (SHORTEST + 1) // 2


def thue_morse(num: int) -> np.ndarray:
    return np.array([i.bit_count() % 2 for i in range(num)])


def unique(num: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50_000, num)


def windows_apart(prompt: np.ndarray) -> np.ndarray:
    """A donor in which each window of the prompt stands on its own, a place apart from its neighbours."""
    windows = np.lib.stride_tricks.sliding_window_view(prompt, W)
    return np.concatenate([windows, np.full_like(windows, 60_000)], axis=1).reshape(-1)


def hostile_indexes():
    period = np.resize([7, 8], LONG)
    yield "unique", [unique(LONG)], unique(LONG, 2)
    yield "the same", [unique(LONG)], np.concatenate([[1], unique(LONG)[:-1]])
    yield "one token", [np.zeros(LONG)] * 2, np.concatenate([np.ones(1), np.zeros(LONG - 1)])
    # every other position begins a known window that is followed by nothing known
    fruitless = [np.concatenate([np.resize([7, 8], W), unique(W, seed)]) for seed in range(4)]
    yield "a period that never becomes a hit", fruitless, period
    yield "a period that does", [period[1:]], np.concatenate([[1], period[:-1]])
    yield "Thue-Morse", [thue_morse(LONG)], 1 - thue_morse(LONG)
    holes = np.where(np.arange(LONG) % (SHORTEST + 8) == SHORTEST + 7, 1, unique(LONG))
    yield "a hole behind every shortest hit", [unique(LONG)], holes
    donors = [unique(4 * SHORTEST, seed) for seed in range(LONG // SHORTEST)]
    cut = np.concatenate([donor[-SHORTEST:] for donor in donors])
    yield "another donor for every hit", donors, cut
    yield "every window known, none of them going on", [windows_apart(unique(LONG // 8))], unique(LONG // 8)


HOSTILE = {name: (donors, prompt) for name, donors, prompt in hostile_indexes()}


def filled(donors) -> AutoIndex:
    index = AutoIndex(min_hit=SHORTEST, secret=3)
    for donor in donors:
        index.register(ids_of(donor), HERE)
    return index


@pytest.mark.parametrize("name", HOSTILE)
def test_a_prompt_is_searched_in_bounded_time(name):
    donors, prompt = HOSTILE[name]
    index, ids = filled(donors), ids_of(prompt)
    assert_bounded(lambda: index.find(ids, HERE), len(ids))
    assert_bounded(lambda: index.register(ids, HERE), len(ids))


@pytest.mark.parametrize("name", HOSTILE)
def test_homes_are_found_in_bounded_time(name):
    donors, prompt = HOSTILE[name]
    tree, ids = FullTree(), ids_of(prompt)
    tree.lookup = lambda tokens, namespace: (0 if len(tokens) == len(ids) else len(tokens), None)
    discovery = Discovery(tree, min_block_tokens=SHORTEST, secret=3)
    discovery.index = filled(donors)
    spans = comb(len(ids), SHORTEST, first=1)
    found = []
    assert_bounded(lambda: found.extend(discovery.unmarked(ids, HERE)[0]), len(ids))
    assert_bounded(lambda: found.extend(discovery.marked(ids, spans, HERE)[0]), len(ids))
    # three tries of each
    assert len(found) <= 6 * MAX_RUNS
    assert sum(len(home) for home in found) <= 6 * MAX_HOME_VOLUME * len(ids)


def test_one_prompt_that_continues_all_the_others_is_entered_in_bounded_time():
    """Its beginnings, the longest first, so that each is a donor of its own until the whole one comes."""
    whole = ids_of(unique(1448))  # as many beginnings as there is room for
    index = filled([whole[:num] for num in range(len(whole), SHORTEST, -1)])
    num_donors = len(index)
    assert num_donors > 1000
    taken = thread_ms(lambda: index.register(whole + array("q", [1]), HERE), repeat=1)
    assert len(index) == 1
    # the index is full of them, so each was paid for by a prompt of 724 tokens on average
    assert taken <= allowed_ms(len(whole)) + 0.02 * num_donors


def test_many_namespaces_take_no_longer():
    index = AutoIndex(min_hit=SHORTEST, secret=3)
    spaces = [Namespace(None, str(i)) for i in range(2000)]
    ids = ids_of(unique(64))
    for space in spaces:
        index.register(ids, space)
    assert_bounded(lambda: index.find(ids, spaces[0]), len(ids))
    assert_bounded(lambda: index.register(ids, Namespace(None, "another")), len(ids))


# -- all of it -------------------------------------------------------------------------------------


@st.composite
def marked_prompts(draw: st.DrawFn):
    """Spans of a prompt: runs of equal blocks with equal gaps, as a program would send them."""
    spans, at = [], draw(st.integers(0, 5000))
    for _ in range(draw(st.integers(1, 6))):
        length, gap = draw(st.integers(1, 200)), draw(st.integers(0, 40))
        for _ in range(draw(st.integers(1, 3000 // length))):
            spans.append(Interval(at, at + length))
            at += length + gap
    return spans, at + draw(st.integers(1, 100))


@settings(max_examples=60, deadline=None)
@given(
    marked_prompts(),
    st.sampled_from(["seam", "head", "random"]),
    st.none() | st.integers(0, 300),
    st.floats(0, 1),
    st.sampled_from([64, 512, 8192]),
)
def test_what_a_client_marks_is_planned_in_bounded_time(marked, policy, tau, budget, chunk):
    spans, prompt_len = marked
    prompt = ids_of(np.arange(prompt_len))
    flat = list(itertools.chain.from_iterable((s.start, s.end) for s in spans))
    params = {"blockreuse_spans": flat, "blockreuse_policy": policy, "blockreuse_budget": budget}
    if tau is not None:
        params["blockreuse_tau"] = tau

    def serve():
        options = parse_options(params, prompt_len=prompt_len, config=CONFIG)
        made = homes(prompt, options.spans, front=Front(prompt[: spans[0].start]), min_block_tokens=SHORTEST)
        kept = bounded(made, prompt_len=prompt_len)
        worth_compiling(kept, options, start=0, limit=prompt_len, end=prompt_len)
        segments = [LocalSegment(h.span, h.delta, h.block, h.span.start) for h in kept]
        plan = build_plan(segments, start=0, end=prompt_len, options=options)
        low = 0
        while low < prompt_len:
            high = plan.chunk_end(low, chunk)
            look_at(plan, low, high)
            low = high

    assert_bounded(serve, prompt_len)
