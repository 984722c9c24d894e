"""Decode steps under a layer plan on a device: which rows are sparse is data, so one captured step serves every batch.

Dims as in sparse_decode.py; here R is the whole batch, padding included.

    outside the captured step   `prepare`: what the scheduler decided about request slots goes to the device
    inside                      `begin`: lengths and row ids of the batch; then `run` for every layer that is sparse
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu_rows import KeyBias
from ..kernels.decode_attention import MIN_SPLIT_LEN
from ..kernels.ops import Chosen, Ops, Rows, Table
from ..kernels.ops_triton import TritonOps
from ..kernels.triton_common import num_splits_for
from .decode_counts import RowSums
from .row_modes import RowModes
from .sparse_decode import SparseDecoder


class DeviceModes:
    """`RowModes` as tensors by request slot, brought up to date before a step."""

    def __init__(self, modes: RowModes, device: torch.device | str) -> None:
        self._modes = modes
        self._sent: tuple[Any, Any] | None = None
        row_ids, dense = modes.every()
        self.row_ids_B = torch.zeros(len(row_ids), dtype=torch.int64, device=device)
        self.dense_B = torch.ones(len(dense), dtype=torch.uint8, device=device)

    def refresh(self) -> None:
        """Send what has changed since the last call. Does not wait: each upload has pinned memory of its own."""
        row_ids, dense = self._modes.every()
        if self._sent is not None and all(map(np.array_equal, self._sent, (row_ids, dense))):
            return
        for held, values in ((self.row_ids_B, row_ids), (self.dense_B, dense)):
            sent = torch.from_numpy(values)
            held.copy_(sent.pin_memory() if held.is_cuda else sent, non_blocking=True)
        self._sent = row_ids, dense


class DeviceStep:
    """One decode step of a batch on a device; rows stay where they are."""

    def __init__(self, rows: Rows, history_R: Tensor, ops: Ops, unused: Table) -> None:
        self.rows, self.history_R = rows, history_R
        _ = rows.first_R  # once per step, for all layers
        self._ops, self._unused = ops, unused

    def attend_all(self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float) -> None:
        rows = Rows(*self.rows._replace(lens_R=torch.zeros_like(self.rows.lens_R)))
        q = self._ops.queries(q_TQD, scale)
        self._ops.attend(q, k_SHD, v_SHD, rows, Chosen(self._unused), out_TQD)

    def attend_dense(
        self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float
    ) -> None:
        """`Ops.attend` does it beside the rows that select."""

    def queries(self, q_TQD: Tensor) -> Tensor:
        return q_TQD

    def output(self, out_TQD: Tensor) -> Tensor:
        return out_TQD

    def put(self, out_RQD: Tensor, out_TQD: Tensor) -> None:
        """It is there already."""


class CudaDecode:
    """The decoder of a plan behind one of the CUDA bases."""

    def __init__(
        self, decoder: SparseDecoder, modes: RowModes, slot_table: Tensor, bias: KeyBias | None
    ) -> None:
        self.decoder = decoder
        self._modes = DeviceModes(modes, slot_table.device)
        self._slot_table, self._bias = slot_table, bias
        selection = decoder.selection
        self._shortest = max(selection.min_seq_len, selection.final_k + 1)  # keys of a row that selects
        self._sums = RowSums(selection, slot_table.device)
        decoder.count_on_device(self._sums.sums_5)
        self._step: DeviceStep | None = None

    def prepare(self) -> None:
        """Before a step, outside of what is captured."""
        self._modes.refresh()
        self.decoder.poll()

    def begin(self, forward_batch: Any) -> None:
        """Start a step of the host's batch; recorded where it is captured."""
        requests_R, lens_R = forward_batch.req_pool_indices.long(), forward_batch.seq_lens.int()
        dense_R = self._modes.dense_B[requests_R] != 0
        short_R = lens_R < self._shortest
        selecting_R = torch.where(short_R | dense_R, 0, lens_R)
        self._sums.add(requests_R, short_R, selecting_R)
        rows = Rows(requests_R.int(), selecting_R, self._slot_table, self._bias, lens_R)
        history_R = torch.zeros_like(selecting_R, dtype=torch.uint8)
        self._step = DeviceStep(rows, history_R, self.decoder.ops, self.decoder.state.own)
        self.decoder.start(self._step, self._modes.row_ids_B[requests_R], self._slot_table.shape[1])

    def run(self, layer_id: int, q_RQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, scale: float) -> Tensor:
        """Attention of a layer that is not dense; out [R, Q, D]."""
        assert self._step is not None
        out = torch.empty_like(q_RQD)
        self.decoder.run(self._step, layer_id, q_RQD, k_SHD, v_SHD, out, scale=scale)
        return out

    def selects(self, layer_id: int) -> bool:
        """Whether a layer is the decoder's to attend for, and not the host's."""
        return self.decoder.plan.layers[layer_id].role != "dense"

    def reserve(self, num_rows: int) -> None:
        """Room for captured steps of so many rows."""
        ops = self.decoder.ops
        if isinstance(ops, TritonOps):
            ops.reserve(num_rows)

    def warm_up(self, num_q_heads: int, dtype: torch.dtype, max_rows: int) -> None:
        """Launch what serving launches, on rows of no length, so that nothing compiles later."""
        decoder, device, max_len = self.decoder, self._slot_table.device, self._slot_table.shape[1]
        # one size of batch for each number of splits, for which kernels are compiled anew
        sizes = {
            num_splits_for(n * decoder.num_heads, max_len, MIN_SPLIT_LEN, device): n
            for n in range(max_rows, 0, -1)
        }
        for num_rows in sizes.values():
            none_R = torch.zeros(num_rows, dtype=torch.int32, device=device)
            rows = Rows(none_R, none_R, self._slot_table, self._bias, none_R)
            step = DeviceStep(rows, none_R.to(torch.uint8), decoder.ops, decoder.state.own)
            decoder.start(step, none_R.long(), max_len)
            for layer, k_pool in zip(decoder.plan.layers, decoder.k_pools, strict=True):
                q = torch.zeros((num_rows, num_q_heads, k_pool.shape[-1]), dtype=dtype, device=device)
                if layer.role != "dense":
                    decoder.run(step, layer.layer, q, k_pool, k_pool, torch.empty_like(q), scale=1.0)
