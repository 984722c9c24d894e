"""Nothing compiles inside serving: whatever lengths a server meets, every launch has the key that was warmed up.

Triton compiles a kernel anew for every kind of integer argument (1, multiples of 16, others) unless it is told not to.
Launches are caught, so no device is needed; the keys are Triton's own.
"""

from __future__ import annotations

import pytest
import torch
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import JITFunction, create_function_from_signature

from sglang_blockreuse.kernels.decode_attention import decode_attention
from sglang_blockreuse.kernels.extend_attention import extend_attention
from sglang_blockreuse.kernels.rotate_copy import PoolTable, cached_cos_sin, rotate_copy, warm_up

NUM_HEADS, GROUP, HEAD_DIM, NUM_SLOTS = 8, 4, 128, 700
LENGTHS = (1, 2, 16, 17, 300)
BACKEND = make_backend(GPUTarget("cuda", 90, 32))


@pytest.fixture
def keys(monkeypatch):
    """Collects (kernel, specialisation of its arguments) of every launch."""
    found = set()

    def catch(kernel, *args, grid, warmup, **constants):
        found.add((kernel.fn.__name__, str(key_of(kernel, kernel.params, args, constants))))

    monkeypatch.setattr(JITFunction, "run", catch)
    return found


def key_of(kernel, params, args, constants):
    binder = create_function_from_signature(kernel.signature, params, BACKEND)
    names = {param.name for param in params}
    return binder(*args, **{name: value for name, value in constants.items() if name in names})[1]


def pools(dtype=torch.bfloat16):
    return torch.zeros((NUM_SLOTS, NUM_HEADS, HEAD_DIM), dtype=dtype)


def copy(num_tokens, half=HEAD_DIM // 2):
    table = PoolTable.of([pools(), pools()])
    slots = torch.arange(num_tokens)
    targets = (slots + num_tokens).int()  # entries of the host's page table
    rotate_copy(table, table, slots, targets, torch.ones(num_tokens, half), torch.zeros(num_tokens, half))


def test_one_rotate_copy_serves_any_number_of_tokens(keys):
    table = PoolTable.of([pools(), pools()])
    angles = torch.ones(300, HEAD_DIM)
    warm_up(table, table, angles, is_neox=True)
    assert sorted(name for name, _ in keys) == ["_cos_sin_kernel", "_rotate_copy_kernel"]
    warmed = set(keys)
    for num_tokens in LENGTHS:
        copy(num_tokens)
        # parts of one upload begin anywhere in it
        old, new = torch.arange(2 * num_tokens + 1)[1:].split(num_tokens)
        cached_cos_sin(angles, old, new)
    assert keys == warmed


def test_a_kernel_that_specialises_on_its_length_is_seen(monkeypatch):
    """Negative control: the same kernel without its mark has three keys."""
    found = set()

    def catch(kernel, *args, grid, warmup, **constants):
        for param in kernel.params:
            monkeypatch.setitem(vars(param), "do_not_specialize", False)
        found.add(str(key_of(kernel, kernel.params, args, constants)))

    monkeypatch.setattr(JITFunction, "run", catch)
    for num_tokens in LENGTHS:
        copy(num_tokens)
    assert len(found) == 3


def queries(num_tokens):
    """A slice of a fused projection, as models hand it over."""
    fused = torch.zeros((num_tokens, (GROUP + 2) * NUM_HEADS * HEAD_DIM), dtype=torch.bfloat16)
    return fused[:, : GROUP * NUM_HEADS * HEAD_DIM].reshape(-1, GROUP * NUM_HEADS, HEAD_DIM)


@pytest.mark.parametrize("num_splits", [1, 8])
def test_one_decode_serves_any_number_of_rows(keys, num_splits):
    k, tags, table = pools(), torch.zeros(NUM_SLOTS, dtype=torch.uint8), torch.zeros(4096, dtype=torch.int32)
    for num_rows in LENGTHS:
        first, lens = torch.zeros(num_rows, dtype=torch.int64), torch.ones(num_rows, dtype=torch.int64)
        options = {"scale": 0.1, "tags_S": tags, "alpha": -1.0, "kv_lens_R": lens, "num_splits": num_splits}
        decode_attention(queries(num_rows), k, k, table, first, **options)
    assert len(keys) == (1 if num_splits == 1 else 2)  # the splits are merged by a second kernel


def test_one_extend_serves_any_number_of_rows_and_tokens(keys):
    k, tags, table = pools(), torch.zeros(NUM_SLOTS, dtype=torch.uint8), torch.zeros(4096, dtype=torch.int32)
    for num_rows in LENGTHS:
        for run_len in (1, 5, 16):
            first, lens = torch.zeros(num_rows, dtype=torch.int64), torch.full((num_rows,), 20)
            bounds = torch.arange(num_rows + 1) * run_len
            q = queries(num_rows * run_len)
            options = {"scale": 0.1, "tags_S": tags, "alpha": -1.0, "kv_lens_R": lens, "max_q_len": run_len}
            extend_attention(q, k, k, table, first, bounds, **options)
    assert len(keys) == 1
