"""int4 keys, scores and top-k in the interpreter against the reference, on poisoned pools."""

from __future__ import annotations

import pytest
import torch
from cases import make_rows, queries, wide
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels import reference_select as reference
from sglang_blockreuse.kernels.int4_keys import refresh_int4
from sglang_blockreuse.kernels.ops import Rows
from sglang_blockreuse.kernels.scan import pooled_scores
from sglang_blockreuse.kernels.top_k import top_k

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
HEADS = ["layer", "kv_head"]
RAGGED = [67, 0, 1, 130]
BIAS = {"alpha": 0.7, "beta": -0.9}


def int4_copy(rows):
    """The int4 copy of a pool [S, H, D] whose unused slots hold NaN ranges and the highest code."""
    keys = reference.Int4Keys.empty(rows.k_pool.shape[0], *rows.k_pool.shape[1:], "cpu")
    keys.codes.fill_(255)
    keys.ranges.fill_(torch.nan)
    used = torch.cat([rows.kv_indices[a : a + n] for a, n in zip(rows.kv_indptr_R1, rows.lens, strict=False)])
    reference.write_int4(keys, used, rows.k_pool[used.long()])
    return keys


def check_scores(rows, keys, q, check_close, *, num_splits=1, lens=None, **options):
    options = {"scale": q.shape[-1] ** -0.5, "tags_S": rows.tags_S, **BIAS, **rows.paged(), **options}
    call = (rows.kv_indices, rows.kv_indptr_R1)
    got = pooled_scores(q, keys, *call, num_splits=num_splits, **options)
    exact = wide(keys) if isinstance(keys, torch.Tensor) else keys
    expected = reference.pooled_scores(wide(q), exact, *call, **options)
    for r, length in enumerate(rows.lens if lens is None else lens):
        check_close("scores", q.dtype, got[r, :, :length], expected[r, :, :length])
    return got


@pytest.mark.parametrize("kind", ["exact", "int4"])
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 256])
def test_scores_of_every_head_size_and_dtype(head_dim, dtype, heads, kind, check_close):
    rows = make_rows(RAGGED, num_heads=2, head_dim=head_dim, dtype=dtype)
    keys = int4_copy(rows) if kind == "int4" else rows.k_pool
    check_scores(rows, keys, queries(4, 6, head_dim, dtype), check_close, heads=heads)


@pytest.mark.parametrize("kind", ["exact", "int4"])
@pytest.mark.parametrize("head_dim", [96, 128])
def test_scores_of_the_other_head_sizes(head_dim, kind, check_close):
    rows = make_rows([70, 3], num_heads=1, head_dim=head_dim, dtype=torch.bfloat16)
    keys = int4_copy(rows) if kind == "int4" else rows.k_pool
    check_scores(rows, keys, queries(2, 4, head_dim, torch.bfloat16), check_close)


@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize("heads", HEADS)
def test_scores_are_summed_over_the_heads_of_a_list(heads, group, check_close):
    rows = make_rows([70, 9], num_heads=3)
    scores = check_scores(
        rows, rows.k_pool, queries(2, 3 * group, 64, torch.float32), check_close, heads=heads
    )
    # every query head gives mass 1 to the row
    mass = torch.full(scores.shape[:2], 3.0 * group / scores.shape[1])
    check_close(
        "scores", torch.float32, torch.stack([scores[0, :, :70].sum(-1), scores[1, :, :9].sum(-1)]), mass
    )


@pytest.mark.parametrize("num_splits", [2, 8])
def test_splits_lose_no_key(num_splits, check_close):
    rows = make_rows([1, 64, 65, 129, 200], num_heads=1)
    check_scores(rows, rows.k_pool, queries(5, 2, 64, torch.float32), check_close, num_splits=num_splits)


@pytest.mark.parametrize(("page_size", "hnd"), [(4, False), (16, True)], ids=["nhd4", "hnd16"])
def test_pages_of_any_size_and_layout(page_size, hnd, check_close):
    rows = make_rows([67, 0, page_size + 1], page_size=page_size, hnd=hnd)
    check_scores(rows, rows.k_pool, queries(3, 4, 64, torch.float32), check_close, num_splits=2)


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", ["exact", "int4"])
def test_only_the_pool_is_scored(kind, heads, check_close):
    rows = make_rows([90, 20, 5], num_heads=2)
    keys = int4_copy(rows) if kind == "int4" else rows.k_pool
    num_lists = 1 if heads == "layer" else 2
    pool = torch.stack(
        [torch.randperm(n)[:16].sort().values if n > 16 else torch.arange(16) for n in rows.lens]
    )
    pool_RXM = torch.stack([pool + x * (pool < 4) for x in range(num_lists)], 1).int()
    lens = [16, 16, 5]
    options = {"heads": heads, "pool_RXM": pool_RXM, "pool_lens_R": torch.tensor(lens).int()}
    check_scores(rows, keys, queries(3, 4, 64, torch.float32), check_close, lens=lens, **options)


def test_keys_beyond_two_to_the_31_elements_are_scored(check_close):
    num_slots = 2**31 // 16 + 64
    # the memory is reserved, not touched: only the slots in use become resident
    k = torch.empty((num_slots, 1, 16), dtype=torch.float16)
    slots = torch.tensor([num_slots - 1, 5, num_slots - 40])
    k[slots] = torch.randn(3, 1, 16).half()
    q, bounds = torch.randn(1, 2, 16).half(), torch.tensor([0, 3])
    got = pooled_scores(q, k, slots, bounds, scale=0.25)
    expected = reference.pooled_scores(q.double(), k[slots].double(), torch.arange(3), bounds, scale=0.25)
    check_close("scores", torch.float16, got, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 96, 128, 256])
def test_int4_codes_and_ranges_are_exact(head_dim, dtype):
    k = queries(9, 3, head_dim, dtype) * 3
    k[4, 1] = 0.5  # a key without a range
    got, expected = (reference.Int4Keys.empty(20, 3, head_dim, "cpu") for _ in range(2))
    slots = torch.randperm(20)[:9]
    pool = torch.full((20, 3, head_dim), torch.nan, dtype=dtype)
    pool[slots] = k
    rows = Rows(torch.tensor([1], dtype=torch.int32), torch.tensor([9], dtype=torch.int32), table_of(slots))
    current, zero = torch.zeros(20, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
    refresh_int4(got, rows, pool, current, zero, zero, period=512, is_last=True, max_len=9)
    reference.write_int4(expected, slots, k)
    assert current.nonzero().flatten().tolist() == sorted(slots.tolist())
    assert torch.equal(got.codes, expected.codes)
    assert torch.equal(got.ranges, expected.ranges)


def table_of(slots):
    """A slot table whose second row has these slots."""
    return torch.stack((torch.zeros_like(slots), slots)).int()


def rounded_scores(num_rows, num_lists, width, lens, seed=0):
    """Scores with many ties, both zeros, and NaN beyond each row's length."""
    generator = torch.Generator().manual_seed(seed)
    scores = (torch.randn((num_rows, num_lists, width), generator=generator) * 2).round()
    scores[..., ::3] *= -1.0
    for r, length in enumerate(lens):
        scores[r, :, length:] = torch.nan
    return scores


@pytest.mark.parametrize("forced", [{}, {"num_sinks": 3, "window": 5}], ids=["free", "forced"])
@pytest.mark.parametrize("chunk_len", [None, 64], ids=["one-stage", "two-stage"])
@pytest.mark.parametrize("k", [1, 16, 40, 400])
def test_top_k_is_exact_with_ties(k, chunk_len, forced):
    for lens in ([300, 0, 1, 17], [64, 256, 300, 65]):
        scores, lens_R = rounded_scores(4, 2, 300, lens), torch.tensor(lens)
        got = top_k(scores, lens_R, k, chunk_len=chunk_len, **forced)
        expected = reference.top_k(scores, lens_R, k, **forced)
        assert torch.equal(got[0], expected[0])
        assert torch.equal(got[1], expected[1])


@pytest.mark.parametrize("chunk_len", [None, 32], ids=["one-stage", "two-stage"])
def test_top_k_of_candidates_keeps_their_positions(chunk_len):
    lens_R, row_lens_R = torch.tensor([90, 7, 0]), torch.tensor([1000, 40, 0])
    scores = rounded_scores(3, 1, 100, lens_R.tolist())
    positions = torch.stack([torch.randperm(1000)[:100].sort().values for _ in range(3)])[:, None].int()
    positions[1, 0, :7] = torch.tensor([0, 3, 20, 30, 36, 38, 39])
    options = {"positions_RXW": positions, "row_lens_R": row_lens_R, "num_sinks": 2, "window": 3}
    got = top_k(scores, lens_R, 5, chunk_len=chunk_len, **options)
    expected = reference.top_k(scores, lens_R, 5, **options)
    assert torch.equal(got[0], expected[0])
    assert torch.equal(got[1], expected[1])


@examples(15)
@given(
    lens=st.lists(st.integers(0, 120), min_size=1, max_size=3),
    k=st.integers(1, 130),
    num_sinks=st.integers(0, 6),
    window=st.integers(0, 20),
    chunk_len=st.sampled_from([None, 16, 64]),
    seed=st.integers(0, 99),
)
def test_any_top_k_equals_the_reference(lens, k, num_sinks, window, chunk_len, seed):
    scores, lens_R = rounded_scores(len(lens), 1, 120, lens, seed), torch.tensor(lens)
    got = top_k(scores, lens_R, k, num_sinks=num_sinks, window=window, chunk_len=chunk_len)
    expected = reference.top_k(scores, lens_R, k, num_sinks=num_sinks, window=window)
    assert torch.equal(got[0], expected[0])
