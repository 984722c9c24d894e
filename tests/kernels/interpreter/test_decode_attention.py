"""decode_attention in the interpreter against the float64 reference, on poisoned pools."""

from __future__ import annotations

import pytest
import torch
from cases import make_rows, queries, wide
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.decode_attention import decode_attention

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
RAGGED = [67, 0, 1, 130]
BIAS = {"alpha": 0.7, "beta": -0.9}


def run_both(rows, q, check_close, *, num_splits=1, tagged=True, kv_indices=None, **options):
    indices = rows.kv_indices if kv_indices is None else kv_indices
    options = {"scale": q.shape[-1] ** -0.5, "tags_S": rows.tags_S if tagged else None, **BIAS, **options}
    call = (indices, rows.kv_indptr_R1)
    out, lse = decode_attention(
        q, rows.k_pool, rows.v_pool, *call, num_splits=num_splits, **rows.paged(), **options
    )
    expected = reference.decode_attention(
        wide(q), wide(rows.k_pool), wide(rows.v_pool), *call, **rows.paged(), **options
    )
    check_close("decode_attention", q.dtype, out, expected[0])
    check_close("lse", q.dtype, lse, expected[1])
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_head_size_and_dtype(head_dim, dtype, check_close):
    rows = make_rows(RAGGED, num_heads=2, head_dim=head_dim, dtype=dtype)
    run_both(rows, queries(4, 6, head_dim, dtype), check_close)


@pytest.mark.parametrize("group", [1, 3, 4, 8, 17])
def test_query_head_h_reads_kv_head_h_over_group(group, check_close):
    rows = make_rows(RAGGED, num_heads=3)
    run_both(rows, queries(4, 3 * group, 64, torch.float32), check_close)


@pytest.mark.parametrize("num_splits", [1, 2, 8])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 127, 128, 129, 200])
def test_splits_lose_no_key(length, num_splits, check_close):
    rows = make_rows([length, length // 2], num_heads=1)
    run_both(rows, queries(2, 2, 64, torch.float32), check_close, num_splits=num_splits)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_splits_merge_in_every_dtype(dtype, check_close):
    rows = make_rows([150, 0, 3], num_heads=1, dtype=dtype)
    run_both(rows, queries(3, 4, 64, dtype), check_close, num_splits=4)


@pytest.mark.parametrize(
    ("page_size", "hnd"), [(4, False), (16, True), (64, False)], ids=["nhd4", "hnd16", "nhd64"]
)
def test_pages_of_any_size_and_layout(page_size, hnd, check_close):
    rows = make_rows([67, 0, 1, page_size, page_size + 1], page_size=page_size, hnd=hnd)
    run_both(rows, queries(5, 6, 64, torch.float32), check_close, num_splits=2)


def test_a_list_of_fixed_width_is_read_up_to_its_length(check_close):
    rows = make_rows([5, 0, 64, 17], width=64)
    run_both(rows, queries(4, 4, 64, torch.float32), check_close, num_splits=2)


def test_a_list_per_kv_head(check_close):
    rows = make_rows([70, 9], num_heads=3)
    shuffled = [torch.cat((rows.kv_indices[:70].roll(h), rows.kv_indices[70:79].flip(0))) for h in range(3)]
    lists_HI = torch.stack(shuffled)
    # half of each list: every head keeps keys of its own
    half = rows.__class__(**{**vars(rows), "kv_lens_R": torch.tensor([35, 4]).int()})
    out, _ = run_both(half, queries(2, 6, 64, torch.float32), check_close, kv_indices=lists_HI)
    one_list, _ = decode_attention(
        queries(2, 6, 64, torch.float32),
        rows.k_pool,
        rows.v_pool,
        lists_HI[0],
        rows.kv_indptr_R1,
        scale=0.125,
        **half.paged(),
    )
    assert not torch.allclose(out, one_list, atol=1e-3), "the heads read the same list"


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_each_bias_reaches_its_own_tag_bit(name, check_close):
    rows = make_rows([90], num_heads=1)
    q = queries(1, 2, 64, torch.float32)
    off = {"alpha": 0.0, "beta": 0.0}
    plain, _ = run_both(rows, q, check_close, **off)
    biased, _ = run_both(rows, q, check_close, **{**off, name: 2.0})
    assert not torch.allclose(plain, biased, atol=1e-3), f"{name} changed nothing"


def test_a_bias_of_minus_infinity_hides_the_class(check_close):
    rows = make_rows([40, 3], num_heads=1)
    rows.tags_S[rows.kv_indices[40:43].long()] = 1
    out, lse = run_both(rows, queries(2, 2, 64, torch.float32), check_close, alpha=-torch.inf)
    assert out[1].abs().max() == 0
    assert lse[1].isneginf().all()


def test_tags_are_not_read_where_there_are_none(check_close):
    run_both(make_rows([33]), queries(1, 4, 64, torch.float32), check_close, tagged=False)


def test_a_value_head_may_be_smaller_than_the_key_head(check_close):
    rows = make_rows([33, 70], head_dim=96, value_dim=40)
    run_both(rows, queries(2, 4, 96, torch.float32), check_close, num_splits=2)


def test_float8_keys_are_widened_before_the_dot(check_close):
    rows = make_rows([33, 70], dtype=torch.float8_e4m3fn)
    run_both(rows, queries(2, 4, 64, torch.bfloat16), check_close)


def test_huge_logits_do_not_overflow(check_close):
    rows = make_rows([70], num_heads=1)
    out, _ = decode_attention(
        queries(1, 1, 64, torch.float32),
        rows.k_pool,
        rows.v_pool,
        rows.kv_indices,
        rows.kv_indptr_R1,
        scale=1e4,
    )
    assert out.isfinite().all()


def test_slots_beyond_two_to_the_31_elements_are_reached(check_close):
    num_slots = 2**31 // 16 + 64
    # the memory is reserved, not touched: only the slots in use become resident
    k, v = (torch.empty((num_slots, 1, 16), dtype=torch.float16) for _ in range(2))
    slots = torch.tensor([num_slots - 1, 5, num_slots - 40])
    k[slots], v[slots] = torch.randn(3, 1, 16).half(), torch.randn(3, 1, 16).half()
    q, bounds = torch.randn(1, 2, 16).half(), torch.tensor([0, 3])
    out, _ = decode_attention(q, k, v, slots, bounds, scale=0.25)
    small = reference.decode_attention(
        q.double(), k[slots].double(), v[slots].double(), torch.arange(3), bounds, scale=0.25
    )
    check_close("decode_attention", torch.float16, out, small[0])


@pytest.mark.parametrize("case", ["head dim", "heads", "pool page"])
def test_operands_that_disagree_are_refused(case):
    q, k = torch.zeros(1, 4, 64), torch.zeros(8, 2, 64)
    wrong = {
        "head dim": (q[..., :32], k, 1),
        "heads": (q[:, :3], k, 1),
        "pool page": (q, k.view(2, 4, 2, 64), 2),
    }[case]
    with pytest.raises(ValueError, match=r"does not fit|page_size"):
        decode_attention(
            *wrong[:2], wrong[1], torch.arange(2), torch.tensor([0, 2]), scale=1.0, page_size=wrong[2]
        )


@examples(15)
@given(
    lens=st.lists(st.integers(0, 150), min_size=1, max_size=3),
    num_heads=st.integers(1, 3),
    group=st.integers(1, 5),
    head_dim=st.integers(3, 70),
    page_size=st.sampled_from([1, 2, 8]),
    num_splits=st.sampled_from([1, 2, 4]),
    seed=st.integers(0, 99),
)
def test_any_batch_equals_the_reference(
    check_close, lens, num_heads, group, head_dim, page_size, num_splits, seed
):
    rows = make_rows(lens, num_heads=num_heads, head_dim=head_dim, page_size=page_size, seed=seed)
    q = queries(len(lens), num_heads * group, head_dim, torch.float32, seed)
    run_both(rows, q, check_close, num_splits=num_splits)
