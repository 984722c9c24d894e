"""The hooks: each one a few lines that hand over to the extension or pass through.

None of them may raise for a reason of ours: an exception in a scheduler-side hook ends the server.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from .blocks.probe import Probe, probing
from .blocks.rows import attach, fold_of, unfold
from .blocks.step import PrefillSteps
from .radix_cache import BlockReuseCache
from .scheduler import accept_request, adder_class, ask_again, is_home, streamer_class
from .types import Fold


def prefill_adder_class(result: Any, scheduler: Any) -> Any:
    for home in ask_again(scheduler):
        scheduler._add_request_to_queue(home)
    return adder_class(result)


def send_abort_output(original: Callable[..., None], scheduler: Any, abort_req: Any, req: Any) -> None:
    if not is_home(req):  # homes answer nobody
        original(scheduler, abort_req, req)


def output_streamer_class(result: Any, scheduler: Any) -> Any:
    return streamer_class(result)


def add_request_to_queue(
    original: Callable[..., None], scheduler: Any, req: Any, is_retracted: bool = False
) -> None:
    # a retracted request keeps its marks; a request that already failed has none worth reading
    if not is_retracted and getattr(req, "blockreuse", None) is None and req.to_finish is None:
        for home in accept_request(scheduler, req):
            original(scheduler, home)
    original(scheduler, req, is_retracted)


def internal_state(result: Any, scheduler: Any, recv_req: Any) -> Any:
    cache: BlockReuseCache = scheduler.tree_cache
    result.internal_state["blockreuse"] = {
        "pool": cache.accounting(),
        "kv": cache.kv_memory(),
        "counts": cache.blocks.metrics.snapshot(),
        "index": cache.blocks.arrivals.index_size(),
    }
    return result


def init_forward_batch(
    original: Callable[..., Any], cls: type, batch: Any, model_runner: Any, **kwargs: Any
) -> Any:
    if not isinstance(batch.tree_cache, BlockReuseCache):
        return original(cls, batch, model_runner, **kwargs)  # a batch of the host's own, for warm-up
    steps: PrefillSteps = batch.tree_cache.steps
    if not batch.forward_mode.is_extend_without_speculative():
        if steps.tags is not None and batch.out_cache_loc is not None:
            steps.tags.written(batch.out_cache_loc)
        return original(cls, batch, model_runner, **kwargs)
    if batch.tree_cache.row_modes is not None:
        batch.tree_cache.row_modes.admit(batch.reqs)

    def run(folded: Any, fold: Fold, probe: Probe | None) -> None:
        forward_batch = original(cls, folded, model_runner, **kwargs)
        attach(forward_batch, fold)
        if probe is None:
            keep_captured(model_runner.forward(forward_batch))
            return
        with probing(model_runner.attn_backend, probe):
            model_runner.forward(forward_batch)

    to_run, fold = steps.prepare(batch, model_runner.req_to_token_pool.req_to_token, run)
    forward_batch = original(cls, to_run, model_runner, **kwargs)
    if fold is None:
        return forward_batch
    attach(forward_batch, fold)
    batch.blockreuse_fold = fold
    if batch.sampling_info is not None:
        # the folded batch carried no grammars, because it has several rows per request
        batch.sampling_info.grammars = [r.grammar for r in batch.reqs] if batch.has_grammar else None
    return forward_batch


def logits_metadata(original: Callable[..., Any], cls: type, forward_batch: Any) -> Any:
    fold = fold_of(forward_batch)
    if fold is None or fold.unread:
        return original(cls, forward_batch)
    per_request = dataclasses.replace(
        forward_batch,
        extend_seq_lens=fold.tokens_B.to(forward_batch.extend_seq_lens.dtype),
        extend_seq_lens_cpu=list(fold.tokens),
        extend_logprob_start_lens_cpu=list(fold.logprob_starts),
    )
    return original(cls, per_request)


def after_load_batch(result: Any, runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """Give the batch that a captured prefill replays what the host leaves behind when it copies it field by field."""
    fold = fold_of(forward_batch)
    if fold is not None:
        static_batch, _ = result
        attach(static_batch, fold)
        # it has a place for each row, and logits are computed for each request
        static_batch.next_token_logits_buffer = None


def after_model_forward(
    result: Any, model_runner: Any, forward_batch: Any, *args: Any, **kwargs: Any
) -> None:
    fold = fold_of(forward_batch)
    if fold is not None:
        unfold(forward_batch, fold)


def after_run_batch(result: Any, scheduler: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Let the result count what was computed of each request, not what the host asked for.

    The host slices hidden states and log-probabilities by these numbers, request after request.
    """
    fold: Fold | None = vars(batch).pop("blockreuse_fold", None)
    if fold is None:
        return
    if result.extend_input_len_per_req is not None:
        result.extend_input_len_per_req = list(fold.tokens)
    if result.extend_logprob_start_len_per_req is not None:
        result.extend_logprob_start_len_per_req = list(fold.logprob_starts)


def begin_weight_update(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import BeginWeightUpdateReqOutput

    return _unless_stored(original, updater, recv_req, BeginWeightUpdateReqOutput)


def update_weights_from_disk(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    return _unless_stored(original, updater, recv_req, UpdateWeightFromDiskReqOutput)


def update_weights_from_ipc(original: Callable[..., Any], updater: Any, recv_req: Any) -> Any:
    from sglang.srt.managers.io_struct import UpdateWeightsFromIPCReqOutput

    return _unless_stored(original, updater, recv_req, UpdateWeightsFromIPCReqOutput)


def _unless_stored(
    original: Callable[..., Any], updater: Any, recv_req: Any, refusal: Callable[..., Any]
) -> Any:
    """Storage is not flushed with the cache: it would answer with KV of the old weights under the name of the new."""
    cache = updater.scheduler.tree_cache
    if not (isinstance(cache, BlockReuseCache) and cache.enable_storage):
        return original(updater, recv_req)
    return refusal(
        success=False,
        message="blockreuse: weights cannot be updated while storage is attached, which keeps KV of the old ones. "
        "Detach it (DELETE /hicache/storage-backend), update, and attach it again (PUT): it is then read and written "
        "under another name.",
    )


def keep_captured(output: Any) -> None:
    """Store by slot what the host captured of a forward; under overlap it does so with a result, which nobody reads."""
    for captured in (output.routed_experts_output, output.indexer_topk_output):
        if captured is not None:
            captured.map_device_tensors(lambda tensor: tensor.cpu())
            captured.finalize()
