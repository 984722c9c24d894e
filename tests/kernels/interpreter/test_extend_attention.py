"""extend_attention in the interpreter against the float64 reference, on poisoned pools."""

from __future__ import annotations

import pytest
import torch
from cases import make_rows, queries, wide
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.extend_attention import extend_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
BIAS = {"alpha": 0.7, "beta": -0.9}
# a run inside a block, an empty row, a one-token run, a fresh prompt, a run longer than a tile
KEY_LENS, QUERY_LENS = [90, 20, 33, 21, 150], [10, 0, 1, 21, 70]


def bounds(lens):
    return torch.tensor([0, *lens]).cumsum(0).int()


def run_both(rows, query_lens, group, check_close, *, dtype=torch.float32, tagged=True, seed=1, **options):
    num_heads, head_dim = rows.k_pool.shape[-2:]
    q = queries(sum(query_lens), num_heads * group, head_dim, dtype, seed)
    options = {"scale": head_dim**-0.5, "tags_S": rows.tags_S if tagged else None, **BIAS, **options}
    call = (rows.kv_indices, rows.kv_indptr_R1, bounds(query_lens))
    out, lse = extend_attention(q, rows.k_pool, rows.v_pool, *call, **rows.paged(), **options)
    expected = reference.extend_attention(
        wide(q), wide(rows.k_pool), wide(rows.v_pool), *call, **rows.paged(), **options
    )
    check_close("extend_attention", dtype, out, expected[0])
    check_close("lse", dtype, lse, expected[1])
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_dtype(head_dim, dtype, check_close):
    rows = make_rows(KEY_LENS, num_heads=1, head_dim=head_dim, dtype=dtype)
    run_both(rows, QUERY_LENS, 3, check_close, dtype=dtype)


@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_query_head_h_reads_kv_head_h_over_group(group, check_close):
    rows = make_rows(KEY_LENS, num_heads=2)
    run_both(rows, QUERY_LENS, group, check_close)


@pytest.mark.parametrize("length", [1, 2, 31, 63, 64, 65, 129])
def test_a_query_sees_its_own_position_and_nothing_later(length, check_close):
    rows = make_rows([length], num_heads=1)
    out, _ = run_both(rows, [length], 1, check_close)
    if length > 1:
        # another value at the last key: only the last query may change
        slot = rows.kv_indices[length - 1].long()
        rows.v_pool[slot] *= -1
        again, _ = run_both(rows, [length], 1, check_close)
        assert torch.equal(again[:-1], out[:-1])
        assert not torch.equal(again[-1], out[-1])


@pytest.mark.parametrize(
    ("page_size", "hnd"), [(4, False), (16, True), (64, False)], ids=["nhd4", "hnd16", "nhd64"]
)
def test_pages_of_any_size_and_layout(page_size, hnd, check_close):
    rows = make_rows(KEY_LENS, page_size=page_size, hnd=hnd)
    run_both(rows, QUERY_LENS, 2, check_close)


def test_a_list_of_fixed_width_is_read_up_to_its_length(check_close):
    run_both(make_rows([9, 0, 40], width=48), [4, 0, 40], 2, check_close)


def test_runs_of_one_request_equal_one_pass(check_close):
    """Runs [20, 30) and [60, 70) of 70 tokens: each row's queries agree with those of the full row."""
    rows = make_rows([70], num_heads=1)
    q = queries(70, 2, 64, torch.float32)
    options = {"scale": 0.125, "tags_S": rows.tags_S, **BIAS}
    pools = (rows.k_pool, rows.v_pool)
    full, _ = extend_attention(q, *pools, rows.kv_indices, rows.kv_indptr_R1, bounds([70]), **options)
    picked = torch.cat((q[20:30], q[60:70]))
    indices = torch.cat((rows.kv_indices[:30], rows.kv_indices[:70]))
    out, _ = extend_attention(picked, *pools, indices, bounds([30, 70]), bounds([10, 10]), **options)
    check_close("extend_attention", torch.float32, out, torch.cat((full[20:30], full[60:70])))


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_each_bias_reaches_its_own_tag_bit(name, check_close):
    rows = make_rows([90], num_heads=1)
    off = {"alpha": 0.0, "beta": 0.0}
    plain, _ = run_both(rows, [20], 2, check_close, **off)
    biased, _ = run_both(rows, [20], 2, check_close, **{**off, name: 2.0})
    assert not torch.allclose(plain, biased, atol=1e-3), f"{name} changed nothing"


def test_a_bias_of_minus_infinity_hides_the_class(check_close):
    rows = make_rows([70], num_heads=1)
    rows.tags_S[rows.kv_indices[:64].long()] = 2
    rows.tags_S[rows.kv_indices[64:70].long()] = 0
    # whole leading blocks of keys are hidden before the first visible one
    run_both(rows, [6], 2, check_close, beta=-torch.inf)


def test_tags_are_not_read_where_there_are_none(check_close):
    run_both(make_rows(KEY_LENS), QUERY_LENS, 1, check_close, tagged=False)


def test_a_value_head_may_be_smaller_than_the_key_head(check_close):
    run_both(make_rows([50], head_dim=96, value_dim=40), [20], 2, check_close)


def test_float8_keys_are_widened_before_the_dot(check_close):
    run_both(make_rows([50], dtype=torch.float8_e4m3fn), [20], 2, check_close, dtype=torch.bfloat16)


def test_slots_beyond_two_to_the_31_elements_are_reached(check_close):
    num_slots = 2**31 // 16 + 64
    # the memory is reserved, not touched: only the slots in use become resident
    k, v = (torch.empty((num_slots, 1, 16), dtype=torch.float16) for _ in range(2))
    slots = torch.tensor([num_slots - 1, 5, num_slots - 40])
    k[slots], v[slots] = torch.randn(3, 1, 16).half(), torch.randn(3, 1, 16).half()
    q = torch.randn(2, 2, 16).half()
    out, _ = extend_attention(q, k, v, slots, bounds([3]), bounds([2]), scale=0.25)
    small = reference.extend_attention(
        q.double(),
        k[slots].double(),
        v[slots].double(),
        torch.arange(3),
        bounds([3]),
        bounds([2]),
        scale=0.25,
    )
    check_close("extend_attention", torch.float16, out, small[0])


@examples(15)
@given(
    rows_of=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 50)), min_size=1, max_size=3),
    num_heads=st.integers(1, 2),
    group=st.integers(1, 5),
    head_dim=st.integers(3, 70),
    page_size=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_the_reference(check_close, rows_of, num_heads, group, head_dim, page_size, seed):
    key_lens = [prefix + fresh for prefix, fresh in rows_of]
    rows = make_rows(key_lens, num_heads=num_heads, head_dim=head_dim, page_size=page_size, seed=seed)
    run_both(rows, [fresh for _, fresh in rows_of], group, check_close, seed=seed)
