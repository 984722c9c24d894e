"""rotate_copy in the interpreter: bits move untouched, keys turn by delta, nothing else changes."""

from __future__ import annotations

import pytest
import torch
from cases import poisoned_pool
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.rotate_copy import PoolTable, cached_cos_sin, rotate_copy

HALF_TYPES = [torch.float16, torch.bfloat16]
ALL_TYPES = [torch.float32, *HALF_TYPES, torch.float8_e4m3fn, torch.float8_e5m2]


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


def layers(num_layers, num_slots, num_heads, head_dim, dtype, page_size=1, hnd=False, seed=0):
    generator = torch.Generator().manual_seed(seed)
    pools = []
    for _ in range(num_layers):
        pool = poisoned_pool(num_slots, num_heads, head_dim, dtype, page_size, hnd)
        pool.copy_(torch.randn(pool.shape, generator=generator).to(dtype))
        pools.append(pool)
    return pools


def angles(half, deltas):
    return reference.delta_cos_sin(10000.0 ** (-torch.arange(half) / max(half, 1)), torch.tensor(deltas))


def slots(num_slots, num_tokens, seed=0):
    order = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))
    return order[:num_tokens], order[num_tokens : 2 * num_tokens]


def run_both(k, v, src, dst, cos, sin, check_close, **options):
    dtype = k[0].dtype
    k_before, v_before = [x.clone() for x in k], [x.clone() for x in v]
    k_expected = [x.to(torch.float64) for x in k]
    reference.rotate_copy(k_expected, [x.double() for x in v], src, dst, cos, sin, **options)
    rotate_copy(k, v, src, dst, cos, sin, check_slots=True, **options)
    for layer, (got, expected, before) in enumerate(zip(k, k_expected, k_before, strict=True)):
        moved = reference.gather_slots(got, dst)
        # the reference rounds once at the end, as the kernel must
        check_close("rotate_copy", dtype, moved, reference.gather_slots(expected, dst))
        num_slots = before.shape[0] * (before.shape[1] if before.dim() == 4 else 1)
        keep = torch.tensor(sorted(set(range(num_slots)) - set(dst.tolist())))
        assert torch.equal(
            bits(reference.gather_slots(got, keep)), bits(reference.gather_slots(before, keep))
        )
        assert torch.equal(
            bits(reference.gather_slots(v[layer], dst)), bits(reference.gather_slots(v_before[layer], src))
        )
        assert torch.equal(
            bits(reference.gather_slots(v[layer], keep)), bits(reference.gather_slots(v_before[layer], keep))
        )


@pytest.mark.parametrize("dtype", ALL_TYPES, ids=str)
@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize(
    ("page_size", "hnd"), [(1, False), (4, False), (4, True)], ids=["slots", "nhd4", "hnd4"]
)
def test_rotates_keys_and_moves_values(dtype, is_neox, page_size, hnd, check_close):
    k, v = layers(2, 64, 3, 64, dtype, page_size, hnd), layers(2, 64, 3, 48, dtype, page_size, hnd, seed=1)
    src, dst = slots(64, 13)
    run_both(k, v, src, dst, *angles(32, [7 * t - 30 for t in range(13)]), check_close, is_neox=is_neox)


@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(64, 16), (80, 32), (96, 96), (128, 64), (256, 256), (64, 0)]
)
def test_channels_past_the_rotary_dim_pass_through(head_dim, rotary_dim, check_close):
    k, v = layers(1, 32, 2, head_dim, torch.bfloat16), layers(1, 32, 2, head_dim, torch.bfloat16, seed=1)
    src, dst = slots(32, 7)
    before = k[0].clone()
    run_both(k, v, src, dst, *angles(rotary_dim // 2, [5] * 7), check_close)
    assert torch.equal(bits(k[0][dst][..., rotary_dim:]), bits(before[src][..., rotary_dim:]))


def test_rotating_by_zero_moves_the_bits_untouched(check_close):
    k, v = layers(1, 16, 1, 64, torch.bfloat16), layers(1, 16, 1, 64, torch.bfloat16)
    odd = torch.tensor(
        [0x7FC1, 0xFFC2 - 0x10000, -0x8000, 0x0001, 0x7F80], dtype=torch.int16
    )  # NaNs, -0, tiny, inf
    k[0].view(torch.int16)[3, 0, :5] = odd
    v[0].view(torch.int16)[3, 0, -5:] = odd
    rotate_copy(k, v, torch.tensor([3]), torch.tensor([9]), *angles(32, [0]))
    assert torch.equal(k[0].view(torch.int16)[9], k[0].view(torch.int16)[3])
    assert torch.equal(v[0].view(torch.int16)[9], v[0].view(torch.int16)[3])


def test_one_angle_serves_every_token(check_close):
    k, v = layers(2, 32, 2, 64, torch.float32), layers(2, 32, 2, 64, torch.float32)
    src, dst = slots(32, 9)
    run_both(k, v, src, dst, *angles(32, [-41]), check_close)


def test_rotating_there_and_back_returns_the_key(check_close):
    k, v = layers(1, 32, 2, 64, torch.float32), layers(1, 32, 2, 64, torch.float32)
    home = k[0][:4].clone()
    steps = [torch.arange(4), torch.arange(4) + 8, torch.arange(4) + 16]
    rotate_copy(k, v, steps[0], steps[1], *angles(32, [1234]))
    rotate_copy(k, v, steps[1], steps[2], *angles(32, [-1234]))
    check_close("rotate_copy", torch.float32, k[0][16:20], home)
    assert not torch.allclose(k[0][8:12], home, atol=1e-2), "the first rotation did nothing"


def test_every_layer_of_a_table_is_copied(check_close):
    k, v = layers(7, 32, 1, 64, torch.float16), layers(7, 32, 1, 64, torch.float16, seed=1)
    src, dst = slots(32, 5)
    expected = [reference.rotate_keys(x[src], *angles(32, [3])) for x in k]
    rotate_copy(PoolTable.of(k), PoolTable.of(v), src, dst, *angles(32, [3]))
    for got, want in zip(k, expected, strict=True):
        check_close("rotate_copy", torch.float16, got[dst], want)


def test_no_tokens_is_no_work():
    k, v = layers(1, 8, 1, 64, torch.float16), layers(1, 8, 1, 64, torch.float16)
    none = torch.empty(0, dtype=torch.int64)
    before = k[0].clone()
    rotate_copy(k, v, none, none, *angles(32, [3]))
    assert torch.equal(k[0], before)


def test_slots_beyond_two_to_the_31_elements_are_reached(check_close):
    head_dim = 64
    num_slots = 2**31 // head_dim + 128
    # the memory is reserved, not touched: only the slots in use become resident
    k, v = (torch.empty((num_slots, 1, head_dim), dtype=torch.float8_e5m2) for _ in range(2))
    src, dst = torch.tensor([num_slots - 1, 5]), torch.tensor([7, num_slots - 2])
    values = torch.randn((2, 1, head_dim)).to(torch.float8_e5m2)
    k.view(torch.uint8)[src] = values.view(torch.uint8)
    v.view(torch.uint8)[src] = values.view(torch.uint8)
    rotate_copy(k, v, src, dst, *angles(32, [0]))
    assert torch.equal(k.view(torch.uint8)[dst], values.view(torch.uint8))
    assert torch.equal(v.view(torch.uint8)[dst], values.view(torch.uint8))


def test_pools_that_differ_are_refused():
    with pytest.raises(ValueError, match="pool of layer 1"):
        PoolTable.of([torch.zeros(8, 1, 64), torch.zeros(8, 2, 64)])


@examples(12)
@given(
    num_tokens=st.integers(1, 12),
    num_heads=st.integers(1, 5),
    half=st.integers(1, 24),
    extra=st.integers(0, 9),
    is_neox=st.booleans(),
    data=st.data(),
)
def test_any_shape_equals_the_reference(check_close, num_tokens, num_heads, half, extra, is_neox, data):
    head_dim = 2 * half + extra
    k = layers(1, 32, num_heads, head_dim, torch.float32)
    v = layers(1, 32, num_heads, head_dim, torch.float32, seed=1)
    deltas = data.draw(st.lists(st.integers(-4000, 4000), min_size=num_tokens, max_size=num_tokens))
    src, dst = slots(32, num_tokens, seed=num_tokens)
    run_both(k, v, src, dst, *angles(half, deltas), check_close, is_neox=is_neox)


@examples(12)
@given(num_tokens=st.integers(0, 40), half=st.integers(1, 70), seed=st.integers(0, 99))
def test_angles_have_the_bits_of_the_reference(num_tokens, half, seed):
    """Also where a position does not change: then the rotation is none, to the bit."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn((50, 2 * half), generator=generator)
    old, new = (torch.randint(0, 50, (num_tokens,), generator=generator) for _ in range(2))
    old[::3] = new[::3]
    for got, want in zip(
        cached_cos_sin(table, old, new), reference.cached_cos_sin(table, old, new), strict=True
    ):
        assert torch.equal(got, want)
    cos, sin = cached_cos_sin(table, old, new)
    assert (cos[::3] == 1).all()
    assert (sin[::3] == 0).all()
