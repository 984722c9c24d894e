"""The compiled CPU copy equals the reference bit by bit and writes nothing else."""

from __future__ import annotations

import pytest
import torch
from drawn import examples
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.kernels import cpu_rotate_copy, reference


def pools(dtype, *, num_slots, num_heads, head_dim, layers=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_slots, num_heads, head_dim)
    return [torch.randn(shape, generator=generator).mul(5).to(dtype) for _ in range(layers)]


def bits(tensor):
    return tensor.view(torch.int16 if tensor.dtype == torch.bfloat16 else torch.int32)


@examples(40)
@given(
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
    is_neox=st.booleans(),
    head_dim=st.sampled_from([8, 64, 80]),
    rotary=st.sampled_from([1.0, 0.5]),
    num_heads=st.integers(1, 4),
    num_tokens=st.integers(0, 33),
    one_delta=st.booleans(),
    seed=st.integers(0, 9),
)
def test_bits_equal_the_reference(dtype, is_neox, head_dim, rotary, num_heads, num_tokens, one_delta, seed):
    generator = torch.Generator().manual_seed(seed)
    slots = torch.randperm(100, generator=generator)
    source, target = slots[:num_tokens], slots[50 : 50 + num_tokens]
    half = int(head_dim * rotary) // 2
    delta = torch.randint(-9, 9, (1 if one_delta else num_tokens,), generator=generator)
    cos, sin = reference.delta_cos_sin(torch.rand(half, generator=generator), delta)
    shape = {"num_slots": 100, "num_heads": num_heads, "head_dim": head_dim, "seed": seed}
    k, v = pools(dtype, **shape), pools(dtype, **(shape | {"seed": seed + 1}))
    for pool in (*k, *v):
        untouched = torch.ones(100, dtype=torch.bool)
        untouched[source] = False
        pool[untouched] = float("nan")  # must neither be read nor survive in a destination
    expected_k, expected_v = [p.clone() for p in k], [p.clone() for p in v]
    reference.rotate_copy(expected_k, expected_v, source, target, cos, sin, is_neox=is_neox)
    cpu_rotate_copy.rotate_copy(k, v, source, target, cos, sin, is_neox=is_neox)
    for actual, expected in zip((*k, *v), (*expected_k, *expected_v), strict=True):
        assert torch.equal(bits(actual), bits(expected))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rotating_by_zero_moves_the_bits_untouched(dtype):
    (k,), (v,) = (
        pools(dtype, num_slots=8, num_heads=2, head_dim=16, layers=1),
        pools(dtype, num_slots=8, num_heads=2, head_dim=16, layers=1, seed=1),
    )
    k[1, 0, 0], k[1, 0, 1] = float("nan"), -0.0
    cos, sin = torch.ones(1, 8), torch.zeros(1, 8)
    cpu_rotate_copy.rotate_copy([k], [v], torch.tensor([1]), torch.tensor([5]), cos, sin)
    assert torch.equal(bits(k[5]), bits(k[1]))
    assert torch.equal(bits(v[5]), bits(v[1]))


def test_the_sign_of_delta_matters():
    """Negative control: a rotation the wrong way is far from the right one."""
    (k,), (v,) = (
        pools(torch.float32, num_slots=4, num_heads=1, head_dim=16, layers=1, seed=s) for s in (0, 1)
    )
    cos, sin = reference.delta_cos_sin(torch.rand(8), torch.tensor([3]))
    cpu_rotate_copy.rotate_copy([k], [v], torch.tensor([0]), torch.tensor([1]), cos, sin)
    cpu_rotate_copy.rotate_copy([k], [v], torch.tensor([0]), torch.tensor([2]), cos, -sin)
    assert (k[1] - k[2]).abs().max() > 0.1


@examples(30)
@given(num_tokens=st.integers(0, 40), half=st.integers(1, 70), seed=st.integers(0, 99))
def test_angles_have_the_bits_of_the_reference(num_tokens, half, seed):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn((50, 2 * half), generator=generator)
    old, new = (torch.randint(0, 50, (num_tokens,), generator=generator) for _ in range(2))
    old[::3] = new[::3]
    found = cpu_rotate_copy.cached_cos_sin(table, old, new)
    for got, want in zip(found, reference.cached_cos_sin(table, old, new), strict=True):
        assert torch.equal(got, want)


def test_a_position_beyond_the_table_is_an_error_as_in_the_reference():
    with pytest.raises(IndexError):
        cpu_rotate_copy.cached_cos_sin(torch.ones(4, 8), torch.tensor([0]), torch.tensor([4]))


@pytest.mark.parametrize(
    ("source", "target"), [([0, 1], [1, 2]), ([0, 1], [3, 3])], ids=["read and written", "written twice"]
)
def test_slots_that_meet_are_refused_in_the_words_of_the_reference(source, target):
    k, v = (pools(torch.float32, num_slots=4, num_heads=1, head_dim=16, layers=1, seed=s) for s in (0, 1))
    operands = (torch.tensor(source), torch.tensor(target), torch.ones(1, 8), torch.zeros(1, 8))
    with pytest.raises(ValueError, match="slot") as law:
        reference.rotate_copy(k, v, *operands)
    with pytest.raises(ValueError, match="slot") as mine:
        cpu_rotate_copy.rotate_copy(k, v, *operands)
    assert str(mine.value) == str(law.value)
