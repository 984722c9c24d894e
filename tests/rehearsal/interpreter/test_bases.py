"""The host's Triton, FlashInfer and FlashAttention 3 backends as this package extends them, against the law.

Folds are drawn, pools are poisoned: a key that a row must not read is NaN.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_twins import install_fa3, install_flashinfer
from tolerances import KERNEL_OUT
from world import NUM_KV_HEADS, NUM_Q_HEADS, Drawn, World, folds

from sglang_blockreuse.layers.backend import _cuda_class
from sglang_blockreuse.types import Interval

BASES = ("triton", "flashinfer", "fa3")
BIASES = [(-0.7, -1.3), (-0.7, 0.0), (0.0, -2.0), (-torch.inf, 0.0)]
ONE_FOLD = Drawn(((90, (Interval(10, 14), Interval(40, 43), Interval(80, 90))), (33, (Interval(32, 33),))), 7)
ANY_FOLD = settings(
    max_examples=5,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)


@pytest.fixture(params=BASES)
def base(request, monkeypatch):
    """The class of a base, with kernels that no CPU has in PyTorch."""
    if request.param == "flashinfer":
        install_flashinfer(monkeypatch)
    if request.param == "fa3":
        install_fa3(monkeypatch)
    return _cuda_class(request.param)


def run_layer(world, backend, batch, index):
    """Queries, and what the backend makes of them; new K and V are drawn."""
    num_tokens = len(batch.out_cache_loc)
    q = world.normal(num_tokens, NUM_Q_HEADS)
    k, v = world.normal(num_tokens, NUM_KV_HEADS), world.normal(num_tokens, NUM_KV_HEADS)
    out = backend.forward(q.flatten(1), k, v, world.layers[index], batch)
    return q, out.view(q.shape)


def assert_close(got, want):
    absolute, relative = KERNEL_OUT["extend_attention", got.dtype]
    error = (got.double() - want).abs()
    assert error.isfinite().all()
    assert (error <= absolute + relative * want.abs()).all(), error.max()


@ANY_FOLD
@given(drawn=folds())
def test_a_folded_batch_equals_the_law(base, host, drawn):
    world = World(host, drawn)
    backend, batch = base(world.runner), world.batch()
    backend.init_forward_metadata(batch)
    for index in range(2):
        q, out = run_layer(world, backend, batch, index)
        assert_close(out, world.law(batch, index, q))


@ANY_FOLD
@given(drawn=folds())
def test_a_decode_step_equals_the_law(base, host, drawn):
    world = World(host, drawn)
    world.compute_all()
    backend, batch = base(world.runner), world.decode_batch()
    backend.init_forward_metadata(batch)
    q, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q))


@ANY_FOLD
@given(drawn=folds(max_requests=2), bias=st.sampled_from(BIASES))
def test_alpha_and_beta_act_by_slot_tag(base, host, bias, drawn):
    """In the step that repairs and in the decode step after it, on one backend."""
    alpha, beta = bias
    world = World(host, drawn)
    backend, batch = base(world.runner), world.batch()
    backend.correct(world.runner, alpha=alpha, beta=beta)
    tags = world.tags(backend)
    backend.init_forward_metadata(batch)
    q, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q, tags=tags, alpha=alpha, beta=beta))
    world.compute_all()
    batch = world.decode_batch()
    backend.init_forward_metadata(batch)
    q, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q, tags=tags, alpha=alpha, beta=beta))


def test_a_tag_that_is_not_heeded_is_seen(base, host):
    """Negative control of the law: the same fold without its tags is far off."""
    world = World(host, ONE_FOLD)
    backend, batch = base(world.runner), world.batch()
    backend.correct(world.runner, alpha=-2.0, beta=0.0)
    world.tags(backend)
    backend.init_forward_metadata(batch)
    q, out = run_layer(world, backend, batch, 0)
    with pytest.raises(AssertionError):
        assert_close(out, world.law(batch, 0, q))
