"""The host's Triton, FlashInfer and FlashAttention 3 backends as this package extends them, against the law.

Folds are drawn, pools are poisoned: a key that a row must not read is NaN.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rehearsed import ONE_FOLD, run_layer
from tolerances import KERNEL_OUT
from world import World, folds

BIASES = [(-0.7, -1.3), (-0.7, 0.0), (0.0, -2.0), (-torch.inf, 0.0)]
ANY_FOLD = settings(
    max_examples=5,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


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
        q, _, out = run_layer(world, backend, batch, index)
        assert_close(out, world.law(batch, index, q))


@ANY_FOLD
@given(drawn=folds())
def test_a_decode_step_equals_the_law(base, host, drawn):
    world = World(host, drawn)
    world.compute_all()
    backend, batch = base(world.runner), world.decode_batch()
    backend.init_forward_metadata(batch)
    q, _, out = run_layer(world, backend, batch, 0)
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
    q, _, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q, tags=tags, alpha=alpha, beta=beta))
    world.compute_all()
    batch = world.decode_batch()
    backend.init_forward_metadata(batch)
    q, _, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q, tags=tags, alpha=alpha, beta=beta))


def test_a_tag_that_is_not_heeded_is_seen(base, host):
    """Negative control of the law: the same fold without its tags is far off."""
    world = World(host, ONE_FOLD)
    backend, batch = base(world.runner), world.batch()
    backend.correct(world.runner, alpha=-2.0, beta=0.0)
    world.tags(backend)
    backend.init_forward_metadata(batch)
    q, _, out = run_layer(world, backend, batch, 0)
    with pytest.raises(AssertionError):
        assert_close(out, world.law(batch, 0, q))


def test_a_corrected_step_keeps_the_page_table_to_its_end(base, host):
    """The host may hand request slots on as soon as a backend says that it has read the table."""
    from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    world = World(host, ONE_FOLD)
    backend = base(world.runner)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.IN_REPLAY
    backend.correct(world.runner, alpha=-1.0, beta=0.0)
    assert backend.shared_read_ends(ForwardMode.DECODE) is SharedReadEnds.POST_REPLAY


def test_a_captured_step_finds_its_rows_anew_in_every_replay(base, host):
    """What a graph records is run again on the static inputs: other requests, other lengths, no Python in between."""
    world = World(host, ONE_FOLD)
    world.compute_all()
    backend, batch = base(world.runner), world.decode_batch()
    backend.correct(world.runner, alpha=-1.0, beta=-0.5)
    tags = world.tags(backend)
    backend.init_forward_metadata_in_graph(batch)  # as at capture: no eager entry point is called
    q, _, _ = run_layer(world, backend, batch, 0)
    batch.req_pool_indices.copy_(batch.req_pool_indices.flip(0))
    batch.seq_lens.copy_(batch.seq_lens.flip(0))
    batch.out_cache_loc.copy_(batch.out_cache_loc.flip(0))
    backend.init_forward_metadata_in_graph(batch)
    q, _, out = run_layer(world, backend, batch, 0)
    assert_close(out, world.law(batch, 0, q, tags=tags, alpha=-1.0, beta=-0.5))
