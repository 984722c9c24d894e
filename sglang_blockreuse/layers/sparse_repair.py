"""Repair under a plan with `prefill: sparse`: recomputed tokens of reused blocks attend to what they select.

Dims as in sparse_decode.py. A repair token does what a decode row of its position does: a full layer scores the keys
up to itself, reindex and reuse layers take from their anchor in the same forward, and every consumer checks what it
takes. KV of all tokens of the step is written before a layer attends, so runs see each other. The other tokens of the
step run dense in the same layer. Sparse repair saves the reads of long histories; a scan costs arithmetic, which
dense attention of many queries at once does faster.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ..kernels.cpu_attention import run_attention
from ..kernels.cpu_numba import as_array
from .plan import BoundLayer, BoundPlan
from .repair_step import ExtendBatch, Piece, RepairStep, Tokens
from .share_state import ShareState
from .sparse_decode import SparseDecoder, share_threads
from .step_clock import StepClock


class SparseRepair:
    """Runs prefill steps with repair tokens under the plan of `decoder`, whose index keys and buffers it shares.

    One forward at a time: `begin`, then `run` for every layer in order.
    """

    def __init__(self, decoder: SparseDecoder) -> None:
        self._decoder = decoder
        self._roles = copy.copy(decoder)
        self._roles.plan = _without_refresh(decoder.plan)
        self._roles.extended = None
        self._roles.clock = StepClock()  # the decoder's own counts decode steps

    def begin(self, batch: ExtendBatch) -> RepairStep | None:
        """Start a prefill step; None where every token runs dense."""
        roles = self._roles
        roles.metrics = self._decoder.metrics
        tokens = Tokens.of(batch)
        short_T = self._short(tokens.lens_T)
        sparse_T = batch.repair_T & ~short_T
        for kind, num_rows in (("sparse", sparse_T.sum()), ("short", (batch.repair_T & short_T).sum())):
            if num_rows:
                roles.metrics.add("repair_rows_total", int(num_rows), kind=kind)
        if not sparse_T.any():
            return None
        share_threads()
        geometry = roles.geometry
        step = RepairStep(
            batch,
            tokens,
            sparse_T,
            roles.selection,
            num_q_heads=geometry.num_kv_heads * geometry.group,
            make_state=self._make_state,
        )
        roles.scores.begin(min(step.piece_size, int(sparse_T.sum())), step.width)
        if roles.keys is not None:
            roles.keys.begin(step.histories())
        return step

    def _make_state(self, num_rows: int) -> ShareState:
        roles = self._roles
        num_lists, num_lent = roles.plan.scorer.list_counts(roles.geometry.num_kv_heads)
        return ShareState(
            roles.plan, num_rows, num_lists, num_lent=num_lent, strict=self._decoder.state.strict
        )

    def _short(self, lens_T: Any) -> Any:
        """bool [T]: tokens with so few keys that they run dense."""
        selection = self._decoder.selection
        return (lens_T < selection.min_seq_len) | (lens_T <= selection.final_k)

    def run(
        self,
        step: RepairStep,
        layer_id: int,
        q_TQD: Tensor,
        k_SHD: Tensor,
        v_SHD: Tensor,
        out_TQD: Tensor,
        *,
        scale: float,
    ) -> None:
        """Attention of one layer for all tokens of the step into `out_TQD`; tokens behind the batch's become 0."""
        roles = self._roles
        layer = roles.plan.layers[layer_id]
        if layer.role == "dense" or layer.attend == "all":
            plan = step.dense_plan(every_row=True)
            run_attention(plan, q_TQD, k_SHD, v_SHD, out_TQD, scale=scale, workspace=roles.workspace)
        else:
            roles.run_dense_rows(step, q_TQD, k_SHD, v_SHD, out_TQD, scale)
        if layer.role == "dense":
            return
        roles.refresh_keys(layer, k_SHD)
        for piece in step.pieces:
            q = (q_TQD[piece.tokens_R].float() * scale).numpy()
            self._run_piece(layer, piece, q, k_SHD, v_SHD, out_TQD)

    def _run_piece(
        self, layer: BoundLayer, piece: Piece, q: Any, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor
    ) -> None:
        roles = self._roles
        roles.state, roles.windows_B = piece.state, piece.window_R
        chosen = list(roles.select(layer, piece, q, k_SHD))
        if layer.attend == "all":
            return
        out_RQD = torch.empty(q.shape, dtype=torch.float32)
        roles.attend(layer, chosen, q, as_array(k_SHD), as_array(v_SHD), out_RQD.numpy())
        out_TQD[piece.tokens_R] = out_RQD.to(out_TQD.dtype)


def _without_refresh(plan: BoundPlan) -> BoundPlan:
    """A repair token is one step long, so there is no pool of an earlier one to extend."""
    assert plan.selection is not None
    return replace(plan, selection=replace(plan.selection, refresh_every=1))
