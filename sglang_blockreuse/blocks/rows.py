"""Folds a prefill batch into virtual rows: one row per run, several rows per request.

A run [a, b) becomes a row with queries a..b-1 and keys 0..b-1, which the host treats like
any other extend row: prefix a, extend b - a. Each layer writes the K/V of all rows before
it attends, so the rows of one request see each other's repaired tokens.

    request   |<- prefix ->|== run 0 ==|.. copy ..|= run 1 =|.. copy ..|== run 2 ==|
    rows      (prefix, run 0), (prefix .. run 1), (prefix .. run 2)
    tokens    run 0 | run 1 | run 2                   flattened, positions kept
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from ..types import Fold, Interval
from .fields import FORWARD_BATCH, SCHEDULE_BATCH, named
from .intervals import lie_in, positions_of
from .upload import upload

FOLD_KEY = "blockreuse_fold"
MUST_BE_EMPTY = named(SCHEDULE_BATCH, "refused")
GIVEN_BACK = named(FORWARD_BATCH, "given")


def fold_batch(
    batch: Any,
    runs_per_request: Sequence[Sequence[Interval]],
    *,
    repair_T: torch.Tensor | None = None,
    unread: bool = False,
) -> tuple[Any, Fold]:
    """A shallow copy of the host's ScheduleBatch with one row per run, and how to undo it.

    runs_per_request: for each request, the runs that tile what it computes of its chunk.
    repair_T: see `Fold`.
    unread: nobody reads what this forward answers, so requests may be left out of it.
    The given batch is not modified. Raises ValueError where the host filled a field of a feature that such a server
    does not start with: nothing says how its rows would count.
    """
    if unknown := [name for name in MUST_BE_EMPTY if getattr(batch, name, None) is not None]:
        raise ValueError(f"a batch with {', '.join(unknown)} cannot be folded")
    runs = [run for runs in runs_per_request for run in runs]
    request_R = np.repeat(np.arange(len(batch.reqs)), [len(runs) for runs in runs_per_request])
    extends = np.array(batch.extend_lens, dtype=np.int64)
    # where position 0 of each request would stand among the batch's tokens
    origins = np.cumsum(extends) - extends - np.array(batch.prefix_lens, dtype=np.int64)
    starts_R, ends_R = _bounds(runs)
    kept_T = positions_of(runs) + np.repeat(origins[request_R], ends_R - starts_R)
    tokens_B = np.bincount(request_R, ends_R - starts_R, minlength=len(batch.reqs)).astype(np.int64)
    row_request, keep, ends, tokens_there = upload(
        [request_R, kept_T, ends_R, tokens_B], batch.seq_lens.device
    )
    tokens = tuple(tokens_B.tolist())

    folded = copy.copy(batch)
    owners = request_R.tolist()
    folded.reqs = [batch.reqs[i] for i in owners]
    folded.input_ids = batch.input_ids[keep if batch.input_ids.device == keep.device else kept_T]
    folded.out_cache_loc = batch.out_cache_loc[keep]
    folded.req_pool_indices = batch.req_pool_indices[row_request]
    folded.req_pool_indices_cpu = batch.req_pool_indices_cpu[torch.from_numpy(request_R)]
    folded.prefix_lens = starts_R.tolist()
    folded.extend_lens = (ends_R - starts_R).tolist()
    folded.extend_num_tokens = len(kept_T)
    folded.seq_lens = ends.to(batch.seq_lens.dtype)
    folded.seq_lens_cpu = torch.from_numpy(ends_R)
    folded.seq_lens_sum = int(ends_R.sum())
    folded.orig_seq_lens = batch.orig_seq_lens[row_request]
    if batch.multimodal_inputs is not None:
        folded.multimodal_inputs = [batch.multimodal_inputs[i] for i in owners]
    if batch.replace_positions is not None:
        folded.replace_embeds, folded.replace_positions = _moved_overrides(batch, keep, int(extends.sum()))
    # consulted per request when the host gathers grammars and log-probabilities
    folded.has_grammar = False
    folded.extend_logprob_start_lens = [0] * len(runs)
    if unread:
        folded.return_logprob, folded.extend_input_logprob_token_ids = False, None
    return folded, Fold(
        num_rows=len(runs),
        tokens=tokens,
        tokens_B=tokens_there,
        logprob_starts=tuple(
            # everything from the first wanted log-probability on is computed, so it counts from the end
            max(0, computed - (extend - start))
            for computed, extend, start in zip(
                tokens, batch.extend_lens, batch.extend_logprob_start_lens, strict=True
            )
        ),
        per_request={
            "batch_size": len(batch.reqs),
            "seq_lens": batch.seq_lens,
            "seq_lens_cpu": batch.seq_lens_cpu,
            "req_pool_indices": batch.req_pool_indices,
            "req_pool_indices_cpu": batch.req_pool_indices_cpu,
            "orig_seq_lens": batch.orig_seq_lens,
        },
        last_rows=tuple(_last_rows(runs_per_request)),
        repair_T=repair_T,
        unread=unread,
    )


def _bounds(runs: Sequence[Interval]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where each run starts and ends."""
    starts, ends = np.array([(run.start, run.end) for run in runs], dtype=np.int64).reshape(-1, 2).T.copy()
    return starts, ends


def _last_rows(runs_per_request: Sequence[Sequence[Interval]]) -> list[int]:
    """Index of the row that ends each request; of any row for a request that has none."""
    last, found = -1, []
    for runs in runs_per_request:
        last += len(runs)
        found.append(max(last, 0))
    return found


def _moved_overrides(
    batch: Any, keep: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The host's embeddings for single tokens of the batch, where those stand among the kept ones."""
    place = torch.full((num_tokens,), -1, dtype=torch.long, device=keep.device)
    place[keep] = torch.arange(keep.numel(), device=keep.device)
    moved = place[batch.replace_positions]
    kept = moved >= 0
    return (batch.replace_embeds[kept], moved[kept]) if bool(kept.any()) else (None, None)


def repair_mask(
    runs_per_request: Sequence[Sequence[Interval]], repairs_per_request: Sequence[Sequence[Interval]]
) -> torch.Tensor | None:
    """bool [computed tokens], true at the positions of `repairs_per_request`; None where there are none."""
    if not any(repairs_per_request):
        return None
    pairs = zip(runs_per_request, repairs_per_request, strict=True)
    return torch.from_numpy(np.concatenate([lie_in(positions_of(runs), repairs) for runs, repairs in pairs]))


def attach(forward_batch: Any, fold: Fold) -> None:
    """Let the fold ride on the host's ForwardBatch; ad-hoc attributes would be lost when it is copied."""
    forward_batch.model_specific_states = {**(forward_batch.model_specific_states or {}), FOLD_KEY: fold}


def fold_of(forward_batch: Any) -> Fold | None:
    states = getattr(forward_batch, "model_specific_states", None)
    return states.get(FOLD_KEY) if states else None


def unfold(forward_batch: Any, fold: Fold) -> None:
    """Give the host one entry per request again, for sampling.

    What was made of rows is the same for every row of a request, or right in its last one.
    """
    for name in GIVEN_BACK:
        value = getattr(forward_batch, name)
        if name in fold.per_request:
            setattr(forward_batch, name, fold.per_request[name])
        elif value is not None:
            setattr(forward_batch, name, [value[row] for row in fold.last_rows])
    forward_batch.model_specific_states.pop(FOLD_KEY)
