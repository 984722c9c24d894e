"""Repair under a plan with `prefill: sparse`: recomputed tokens of reused blocks attend to what they select.

Dims as in sparse_decode.py. A repair token does what a decode row of its position does: a full layer scores the keys
up to itself, reindex and reuse layers take from their anchor in the same forward, and every consumer checks what it
takes. KV of all tokens of the step is written before a layer attends, so runs see each other. The other tokens of the
step run dense in the same layer. Sparse repair saves the reads of long histories; a scan costs arithmetic, which
dense attention of many queries at once does faster.
"""

from __future__ import annotations

from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor

from ..kernels.ops import Queries
from .plan import BoundLayer
from .repair_step import ExtendBatch, Piece, RepairStep, Tokens
from .roles import Selecting
from .share_state import ShareState
from .sparse_decode import SparseDecoder, share_threads


class SparseRepair:
    """Runs prefill steps with repair tokens by the roles of `decoder`, whose index keys and buffers it shares.

    One forward at a time: `begin`, then `run` for every layer in order.
    """

    def __init__(self, decoder: SparseDecoder) -> None:
        self._decoder, self._roles = decoder, decoder.roles
        # a repair token is one step long, so there is no pool of an earlier one to extend
        self._plan = replace(decoder.plan, selection=replace(decoder.selection, refresh_every=1))

    def begin(self, batch: ExtendBatch) -> RepairStep | None:
        """Start a prefill step; None where every token runs dense."""
        decoder, metrics = self._decoder, self._decoder.metrics
        tokens = Tokens.of(batch)
        short_T = self.short(tokens.lens_T)
        sparse_T = batch.repair_T & ~short_T
        for kind, num_rows in (("sparse", sparse_T.sum()), ("short", (batch.repair_T & short_T).sum())):
            if num_rows:
                metrics.add("repair_rows_total", int(num_rows), kind=kind)
        if not sparse_T.any():
            return None
        share_threads()
        step = RepairStep(
            batch,
            tokens,
            sparse_T,
            decoder.selection,
            num_q_heads=decoder.num_q_heads,
            make_state=self._make_state,
            workspace=decoder.workspace,
        )
        decoder.scores.begin(min(step.piece_size, int(sparse_T.sum())), step.width)
        if decoder.keys is not None:
            decoder.keys.begin(step.histories())
        return step

    def _make_state(self, num_rows: int) -> ShareState:
        state = self._decoder.make_state(self._plan, num_rows)
        state.stale = self._decoder.state.stale  # counted where the decoder's own is
        return state

    def short(self, lens_T: Any) -> Any:
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
        layer = self._plan.layers[layer_id]
        if layer.role == "dense" or layer.attend == "all":
            step.attend_all(q_TQD, k_SHD, v_SHD, out_TQD, scale)
        else:
            step.attend_dense(q_TQD, k_SHD, v_SHD, out_TQD, scale)
        if layer.role == "dense":
            return
        self._decoder.refresh_keys(layer, k_SHD)
        for piece in step.pieces:
            q = self._roles.ops.queries(q_TQD[piece.tokens_R], scale)
            self._run_piece(layer, piece, q, k_SHD, v_SHD, out_TQD)

    def _run_piece(
        self, layer: BoundLayer, piece: Piece, q: Queries, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor
    ) -> None:
        selecting = Selecting(piece.rows, piece.history_R, piece.state, piece.window_R)
        chosen = self._roles.select(layer, selecting, q, k_SHD)
        if layer.attend == "all":
            return
        out_RQD = torch.empty(q.values.shape, dtype=torch.float32)
        self._roles.ops.attend(q, k_SHD, v_SHD, piece.rows, chosen, out_RQD)
        out_TQD[piece.tokens_R] = out_RQD.to(out_TQD.dtype)
