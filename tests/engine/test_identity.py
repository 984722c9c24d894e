"""The identity of cached KV: what a query may see, and which history a cached token belongs to.

Each law of the KV-cache identity chapter that has a meaning in a server: on the attention kernels with numbers
that anyone can check, on a two-layer decoder in float64, and on the real engine with a tiny Llama.
"""

from __future__ import annotations

import concurrent.futures
import itertools
import random

import pytest
import torch
from looks import counts
from prompts import Library, ask, distance, know, random_ids, usage
from servers import lease
from tiny_models import CONTEXT, NUM_LAYERS, SUPPORTED, VOCAB
from tolerances import CHAPTER, FULL_PREFILL_LOGPROB, KERNEL_OUT

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.cpu_attention import Workspace, plan_attention, run_attention

# Dims: T tokens, H heads, D head dim, R rows

CHUNKS = (4, 1, 7, 12)
WINDOW, LENGTH = 8, 13
IDS = range(10, VOCAB)


def cpu_path(q_THD, k_SHD, v_SHD, slots, rows):
    """The CPU kernels; rows: [(first query, end)] of one request whose keys stand in `slots`."""
    out = torch.empty_like(q_THD)
    prefixes, extends = [a for a, _ in rows], [b - a for a, b in rows]
    plan = plan_attention(slots[None], [0] * len(rows), prefixes, extends)
    run_attention(plan, q_THD, k_SHD, v_SHD, out, scale=1.0, workspace=Workspace())
    return out


def reference_path(q_THD, k_SHD, v_SHD, slots, rows):
    key_lens, query_lens = [b for _, b in rows], [b - a for a, b in rows]
    return reference.extend_attention(
        q_THD,
        k_SHD,
        v_SHD,
        torch.cat([slots[:n] for n in key_lens]),
        torch.tensor([0, *key_lens]).cumsum(0),
        torch.tensor([0, *query_lens]).cumsum(0),
        scale=1.0,
    )[0]


@pytest.mark.parametrize("path", [reference_path, cpu_path], ids=["reference", "cpu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
class TestOffsetMask:
    """Two old tokens, two new ones, equal scores, values 1, 2, 3, 4 (worked example 1 of the chapter)."""

    def outputs(self, path, dtype, rows):
        heads, dim = 2, 16
        num_queries = sum(b - a for a, b in rows)
        slots = torch.tensor([5, 2, 7, 3], dtype=torch.int32)
        k_SHD, v_SHD = torch.zeros(9, heads, dim, dtype=dtype), torch.full((9, heads, dim), torch.nan)
        for slot, value in zip(slots.tolist(), (1.0, 2.0, 3.0, 4.0), strict=True):
            v_SHD[slot] = value
        out = path(
            torch.zeros(num_queries, heads, dim, dtype=dtype), k_SHD, v_SHD.to(dtype), slots.long(), rows
        )
        assert torch.equal(out, out[:, :1, :1].expand_as(out)), "every channel holds the same value"
        return out[:, 0, 0].float()

    @pytest.mark.parametrize("rows", [[(2, 4)], [(2, 3), (3, 4)]], ids=["one row", "two virtual rows"])
    def test_a_new_query_sees_the_old_keys_and_those_before_it(self, path, dtype, rows):
        absolute, relative = KERNEL_OUT["cpu_attention", dtype]
        got = self.outputs(path, dtype, rows)
        torch.testing.assert_close(got, torch.tensor([2.0, 2.5]), atol=absolute, rtol=relative)

    def test_a_triangle_that_begins_at_zero_is_seen_to_differ(self, path, dtype):
        """Negative control: the local mask of the chapter, 1.0 and 1.5."""
        got = self.outputs(path, dtype, [(0, 2)])
        assert got.tolist() == [1.0, 1.5]

    def test_a_hole_between_rows_is_read_from_the_pool(self, path, dtype):
        """Queries 0 and 3 are computed, 1 and 2 stand in the pool, as behind a copied block."""
        absolute, relative = KERNEL_OUT["cpu_attention", dtype]
        got = self.outputs(path, dtype, [(0, 1), (3, 4)])
        torch.testing.assert_close(got, torch.tensor([1.0, 2.5]), atol=absolute, rtol=relative)


class Decoder:
    """Two causal layers with learned absolute positions in float64, on the reference's paged attention."""

    VOCAB, WIDTH, HEADS, MAX_LEN, LAYERS = 64, 32, 4, 32, 2

    def __init__(self, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def matrix(rows, columns):
            return torch.randn(rows, columns, generator=generator, dtype=torch.float64) * columns**-0.5

        self.embedding, self.position = matrix(self.VOCAB, self.WIDTH), matrix(self.MAX_LEN, self.WIDTH)
        self.layers = [{name: matrix(self.WIDTH, self.WIDTH) for name in "qkvof"} for _ in range(self.LAYERS)]
        self.head = matrix(self.VOCAB, self.WIDTH)

    def new_cache(self):
        """One K and one V pool per layer, poisoned: a slot that nobody wrote must not be read."""
        shape = (self.MAX_LEN, self.HEADS, self.WIDTH // self.HEADS)
        return [
            (torch.full(shape, torch.nan).double(), torch.full(shape, torch.nan).double())
            for _ in self.layers
        ]

    def forward(self, tokens, cache, rows, slots=None):
        """Logits of the positions in `rows`; their K/V are written to the cache before any row attends."""
        slots = torch.arange(self.MAX_LEN) if slots is None else slots
        positions = torch.cat([torch.arange(a, b) for a, b in rows])
        x = self.embedding[torch.tensor(tokens)[positions]] + self.position[positions]
        for layer, (k_pool, v_pool) in zip(self.layers, cache, strict=True):
            normed = torch.nn.functional.layer_norm(x, (self.WIDTH,))
            q, k, v = ((normed @ layer[name]).unflatten(-1, (self.HEADS, -1)) for name in "qkv")
            k_pool[slots[positions]], v_pool[slots[positions]] = k, v
            x = x + reference_path(q, k_pool, v_pool, slots, rows).flatten(1) @ layer["o"]
            x = x + torch.tanh(torch.nn.functional.layer_norm(x, (self.WIDTH,)) @ layer["f"])
        return x @ self.head.T


class TestChunksInFloat64:
    tokens = torch.randint(0, Decoder.VOCAB, (24,), generator=torch.Generator().manual_seed(3)).tolist()
    bounds = tuple(itertools.pairwise(itertools.accumulate(CHUNKS, initial=0)))

    def full(self):
        model = Decoder()
        return model.forward(self.tokens, model.new_cache(), [(0, len(self.tokens))])

    def test_chunks_equal_the_slices_of_a_full_pass(self):
        model = Decoder()
        cache, full = model.new_cache(), self.full()
        for start, stop in self.bounds:
            got = model.forward(self.tokens, cache, [(start, stop)])
            torch.testing.assert_close(got, full[start:stop], atol=CHAPTER[0], rtol=CHAPTER[1])

    @pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 1, 0, 2]], ids=["in order", "shuffled"])
    def test_the_same_chunks_as_rows_of_one_pass_equal_it_too(self, order):
        model, full = Decoder(), self.full()
        rows = [self.bounds[i] for i in order]
        got = model.forward(self.tokens, model.new_cache(), rows)
        expected = torch.cat([full[a:b] for a, b in rows])
        torch.testing.assert_close(got, expected, atol=CHAPTER[0], rtol=CHAPTER[1])

    def test_slots_in_any_order_change_nothing(self):
        model = Decoder()
        slots = torch.randperm(Decoder.MAX_LEN, generator=torch.Generator().manual_seed(5))
        got = model.forward(self.tokens, model.new_cache(), [(0, 24)], slots)
        torch.testing.assert_close(got, self.full(), atol=CHAPTER[0], rtol=CHAPTER[1])

    def test_the_cache_of_another_prefix_is_seen_to_differ(self):
        """Negative control: same shapes, another history."""
        model = Decoder()
        cache, full = model.new_cache(), self.full()
        model.forward([t + 1 if t + 1 < Decoder.VOCAB else 0 for t in self.tokens], cache, [(0, 4)])
        got = model.forward(self.tokens, cache, [(4, 24)])
        assert (got - full[4:]).abs().max() > 1e6 * CHAPTER[0]

    def test_a_window_that_moves_must_be_rebuilt(self):
        """Dropping the leftmost keys of a full window keeps old positions and old history: worked example 2."""
        model, window = Decoder(), self.tokens[1 : 1 + WINDOW]
        rebuilt = model.forward(window, model.new_cache(), [(0, WINDOW)])[-1]
        cache = model.new_cache()
        model.forward(self.tokens, cache, [(0, WINDOW)])
        kept = torch.arange(1, Decoder.MAX_LEN)  # slot 0 is dropped, the others move up
        dropped = model.forward(window, cache, [(WINDOW - 1, WINDOW)], kept)[-1]
        assert (dropped - rebuilt).abs().max() > 1e6 * CHAPTER[0]


# -- on the real engine ------------------------------------------------------------------------

LIBRARY = Library(seed=11, doc_lens=(90, 90, 90, 90), ids=IDS)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A tiny Llama whose answers depend on keys of no context: what is moved rightly is exact."""
    folder = tmp_path_factory.mktemp("identity")
    model = SUPPORTED["llama llama3"].write(folder, only_layer=NUM_LAYERS - 1)
    with lease("--skip-tokenizer-init", "--max-running-requests", "3", model=model) as running:
        yield running


def input_logprobs(answer) -> list[dict[int, float]]:
    """Per prompt position from `logprob_start_len + 1` on: token -> log-probability of the top tokens."""
    steps = answer["meta_info"]["input_top_logprobs"]
    return [{token: value for value, token, *_ in step} for step in steps if step]


def largest_difference(got: list[dict[int, float]], expected: list[dict[int, float]]) -> float:
    assert len(got) == len(expected)
    return max(abs(a[t] - b[t]) for a, b in zip(got, expected, strict=True) for t in a.keys() & b.keys())


@pytest.mark.engine
class TestChunksOnTheEngine:
    prompt = random_ids(24, random.Random(3), IDS)

    def test_chunks_behind_a_cached_prefix_equal_the_slices_of_a_full_prefill(self, server):
        full = input_logprobs(ask(server, self.prompt, logprob_start_len=0))
        server.flush_cache()
        for start, stop in itertools.pairwise(itertools.accumulate(CHUNKS, initial=0)):
            answer = ask(server, self.prompt[:stop], new_tokens=1, logprob_start_len=start)
            assert answer["meta_info"]["cached_tokens"] == start
            # entry i of the full pass speaks of position i + 1
            assert (
                largest_difference(input_logprobs(answer), full[start : stop - 1] or [])
                <= FULL_PREFILL_LOGPROB
                if stop - 1 > start
                else input_logprobs(answer) == []
            )

    def test_a_window_cut_on_the_left_is_another_prefix(self, server):
        """Five rebuilds for 13 tokens in a window of 8, each from position 0; each answers as the window alone does."""
        rebuilds, tokens = 0, random_ids(LENGTH, random.Random(8), IDS)
        assert len(set(tokens)) == LENGTH
        answers = []
        for end in range(1, LENGTH + 1):
            window = tokens[max(0, end - WINDOW) : end]
            answers.append(ask(server, window, new_tokens=1))
            cached = answers[-1]["meta_info"]["cached_tokens"]
            assert cached == (end - 1 if end <= WINDOW else 0)
            rebuilds += end > 1 and cached == 0
        assert rebuilds == LENGTH - WINDOW
        for end in range(1, LENGTH + 1):
            server.flush_cache()
            alone = ask(server, tokens[max(0, end - WINDOW) : end], new_tokens=1)
            assert distance(answers[end - 1], alone) <= FULL_PREFILL_LOGPROB
        whole = ask(server, tokens, new_tokens=1)
        assert distance(answers[-1], whole) > 100 * FULL_PREFILL_LOGPROB, "what left the window would be seen"

    def test_a_prompt_past_the_context_is_refused_and_the_server_goes_on(self, server):
        too_long = random_ids(CONTEXT + 1, random.Random(9), IDS)
        server.flush_cache()
        expected = ask(server, self.prompt)
        server.flush_cache()
        with pytest.raises(Exception, match=rf"HTTP 400.*{CONTEXT}"):
            ask(server, too_long)
        spans = [10, 100, 100, 300]
        with pytest.raises(Exception, match=rf"HTTP 400.*{CONTEXT}"):
            ask(server, too_long, blockreuse_spans=spans)
        assert distance(ask(server, self.prompt), expected) == 0.0
        fits = ask(server, too_long[: CONTEXT - 8], new_tokens=1, blockreuse_spans=spans)
        assert fits["meta_info"]["prompt_tokens"] == CONTEXT - 8

    def test_a_document_cut_on_the_left_is_another_block(self, server):
        ids, spans = LIBRARY.prompt((0, 1))
        ask(server, ids, new_tokens=1, blockreuse_spans=spans)
        cut = ids[: spans[2]] + ids[spans[2] + 1 :]
        before = counts(server)["homes_total"]
        answer = ask(server, cut, blockreuse_spans=[*spans[:3], spans[3] - 1], blockreuse_tau=0)
        assert counts(server)["homes_total"] == before + 1
        server.flush_cache()
        assert distance(answer, ask(server, cut, blockreuse_mode="off")) <= FULL_PREFILL_LOGPROB

    @pytest.mark.parametrize("rows", [None, [0, 9, 9, 17, 17, 24]], ids=["whole", "virtual rows"])
    def test_a_future_token_changes_no_earlier_output(self, server, rows):
        params = {} if rows is None else {"testing_rows": rows}
        changed = [*self.prompt[:-1], self.prompt[-1] + 1]
        one, other = [], []
        for found, prompt in ((one, self.prompt), (other, changed)):
            server.flush_cache()
            answer = ask(server, prompt, logprob_start_len=0, **params)
            found += input_logprobs(answer)
        assert one[:-1] == other[:-1], "the same in every bit"
        server.flush_cache()
        early = ask(server, [self.prompt[0] + 1, *self.prompt[1:]], logprob_start_len=0, **params)
        assert largest_difference(input_logprobs(early), one) > 100 * FULL_PREFILL_LOGPROB, "a past one does"


@pytest.mark.engine
class TestHistoriesOnTheEngine:
    def test_the_homes_of_other_blocks_are_seen_to_differ(self, server):
        """Negative control: blocks of one shape whose slots were swapped, as no shape can tell."""
        ids, spans = LIBRARY.prompt((3, 1, 2))
        full = ask(server, ids, blockreuse_mode="off")
        server.flush_cache()
        know(server, LIBRARY)
        right = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0, testing_max_prefix=40)
        assert usage(right)["reused_tokens"] >= 2 * 90
        assert distance(right, full) <= FULL_PREFILL_LOGPROB
        server.flush_cache()
        know(server, LIBRARY)
        swapped = ask(
            server,
            ids,
            blockreuse_spans=spans,
            blockreuse_tau=0,
            testing_max_prefix=40,
            testing_swap_homes=True,
        )
        assert usage(swapped)["reused_tokens"] == usage(right)["reused_tokens"]
        assert distance(swapped, full) > 100 * FULL_PREFILL_LOGPROB

    def test_rows_move_with_all_their_state(self, server):
        """Six requests in three places, of different lengths: rows end, move up and are taken again."""
        orders = [(1, 0), (2, 0, 1), (3, 2), (0, 2, 3), (1, 3, 2), (2, 3)]
        cases = [(*LIBRARY.prompt(order), 3 + 4 * (i % 4)) for i, order in enumerate(orders)]

        def run(case):
            ids, spans, length = case
            return ask(server, ids, new_tokens=length, blockreuse_spans=spans, blockreuse_tau=0)

        full = []
        for ids, _, length in cases:
            server.flush_cache()
            full.append(ask(server, ids, new_tokens=length, blockreuse_mode="off"))
        server.flush_cache()
        know(server, LIBRARY)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(run, cases))
        for one, other in zip(full, together, strict=True):
            assert usage(other)["reused_tokens"] + usage(other)["prefix_tokens"] > 90
            assert other["output_ids"] == one["output_ids"]
            assert distance(other, one) <= FULL_PREFILL_LOGPROB
        assert sum(usage(answer)["reused_tokens"] > 0 for answer in together) >= len(cases) - 1
