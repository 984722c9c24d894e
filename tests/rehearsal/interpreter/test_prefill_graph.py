"""A folded prefill that the host replays: its own runner makes the batch, and the batch knows that it is folded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from rehearsed import ONE_FOLD
from world import MAX_REQUESTS, World

from sglang_blockreuse import hooks
from sglang_blockreuse.blocks.rows import attach, fold_of, unfold
from sglang_blockreuse.types import Fold

BUCKET = 32
TOKENS = (17, 1)  # computed of each request of the fold


@pytest.fixture
def world(host):
    return World(host, ONE_FOLD)


def folded_batch(world):
    """What `fold_batch` makes of two requests, as far as the host's runner reads it."""
    batch = world.batch()
    batch.kv_loc_plan = world.translator.own_plan(batch)
    batch.kv_loc_plan.bind(batch, world.translator)
    batch.return_logprob = False
    requests = {"batch_size": 2, "seq_lens": torch.tensor([90, 33])}
    fold = Fold(
        num_rows=4,
        tokens=TOKENS,
        tokens_B=torch.tensor(TOKENS),
        logprob_starts=TOKENS,
        per_request=requests,
        last_rows=(2, 3),
    )
    attach(batch, fold)
    return batch, fold


def graph_runner(world, backend, *, max_rows):
    """The host's runner as it stands after its start, without what it captured."""
    from sglang.srt.model_executor.cuda_graph_buffer_registry import build_prefill_registry
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import (
        _PREFILL_STATIC_FIELDS,
        PrefillCudaGraphRunner,
    )
    from sglang.srt.model_executor.runner_backend.breakable_cuda_graph_backend import (
        BreakableCudaGraphBackend,
    )

    world.runner.attn_backend = backend
    world.runner.pp_group = SimpleNamespace(is_last_rank=True)
    rows = SimpleNamespace(max_rows=64, get_logits_buffer=lambda vocab, rows: torch.empty(rows, vocab))
    world.runner.graph_shared_output = rows
    world.runner.attn_tp_sequence_sharded = lambda num_tokens: False
    world.runner.prepare_dummy_forward_batch = lambda batch: batch
    runner = object.__new__(PrefillCudaGraphRunner)
    vars(runner).update(
        model_runner=world.runner,
        capture_num_tokens=[BUCKET],
        max_context_size=None,
        capture_return_pooled_hidden_states=False,
        static_draft_hidden_states=None,
        has_mha_companion_layers=False,
        use_captured_attn_metadata=False,
        enable_cp_bcg_capture=False,
        _is_full_backend=False,
        _capture_chunked_prefix=False,
        backend=object.__new__(BreakableCudaGraphBackend),
        buffer_registry=build_prefill_registry(
            device=torch.device("cpu"),
            max_bs=max_rows,
            max_num_token=BUCKET,
            cache_loc_dtype=torch.int64,
            share_pool=False,
        ),
        _prefill_static_buffers={
            name: torch.zeros(max_rows, dtype=torch.int64) for name in _PREFILL_STATIC_FIELDS
        },
    )
    return runner


def test_the_host_drops_the_fold_and_the_hook_puts_it_back(base, world):
    """Without it the language model's head would run once for each row, and sampling would see rows."""
    from sglang.srt.layers.logits_processor import LogitsMetadata

    batch, fold = folded_batch(world)
    runner = graph_runner(world, base(world.runner), max_rows=8)
    result = runner.load_batch(batch)
    static_batch, _ = result
    assert fold_of(static_batch) is None, "the host carries it now: drop the hook"
    assert static_batch.next_token_logits_buffer.shape[0] == fold.num_rows
    hooks.after_load_batch(result, runner, batch)
    assert fold_of(static_batch) is fold
    assert static_batch.next_token_logits_buffer is None
    original = LogitsMetadata.from_forward_batch.__func__
    assert original(LogitsMetadata, static_batch).extend_seq_lens.tolist() == [4, 3, 10, 1], (
        "negative control"
    )
    logits = hooks.logits_metadata(original, LogitsMetadata, static_batch)
    assert logits.extend_seq_lens.tolist() == list(TOKENS)
    unfold(batch, fold)
    assert batch.batch_size == 2
    assert fold_of(static_batch) is fold, "the batch that is replayed goes with the step"


def test_a_batch_that_was_not_folded_is_left_alone(base, world):
    batch, _ = folded_batch(world)
    batch.model_specific_states = None
    runner = graph_runner(world, base(world.runner), max_rows=8)
    result = runner.load_batch(batch)
    hooks.after_load_batch(result, runner, batch)
    assert fold_of(result[0]) is None
    assert result[0].next_token_logits_buffer is not None


def test_every_row_stands_in_the_static_buffers(base, world):
    batch, _ = folded_batch(world)
    runner = graph_runner(world, base(world.runner), max_rows=8)
    runner.load_batch(batch)
    for name in ("seq_lens", "extend_seq_lens", "extend_prefix_lens", "req_pool_indices"):
        assert torch.equal(runner._prefill_static_buffers[name][:4], getattr(batch, name).long())


def test_more_rows_than_the_buffers_hold_run_without_a_graph(base, world):
    backend = base(world.runner)
    batch, _ = folded_batch(world)
    assert not backend.can_run_prefill_cuda_graph(batch), "graphs of other kinds take no rows at all"
    backend.max_captured_rows = batch.batch_size
    assert backend.can_run_prefill_cuda_graph(batch)
    backend.max_captured_rows -= 1
    assert not backend.can_run_prefill_cuda_graph(batch)
    with pytest.raises(RuntimeError):
        graph_runner(world, backend, max_rows=MAX_REQUESTS).load_batch(batch)


def test_a_probed_forward_runs_without_a_graph(base, world):
    backend = base(world.runner)
    batch, _ = folded_batch(world)
    backend.max_captured_rows, backend.probe = 8, object()
    assert not backend.can_run_prefill_cuda_graph(batch)
