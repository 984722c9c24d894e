"""The base `flashinfer`: SGLang's FlashInfer backend on its paged path."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.environ import envs
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend
from torch import Tensor

from ..kernels.flashinfer_attention import FlashInferExecutor
from .biased_rows import ClassRows, Shape
from .cuda_rows import ROWS_PER_REQUEST, CudaRows


class BlockReuseFlashInferBackend(CudaRows, FlashInferAttnBackend):
    """The paged path writes K/V first; the ragged one writes it after it attends."""

    def __init__(self, runner: Any) -> None:
        envs.SGLANG_FLASHINFER_USE_PAGED.set(True)
        num_rows = runner.req_to_token_pool.size * ROWS_PER_REQUEST
        super().__init__(
            runner,
            kv_indptr_buf=torch.zeros(num_rows + 1, dtype=torch.int32, device=runner.device),
            kv_last_page_len_buf=torch.ones(num_rows, dtype=torch.int32, device=runner.device),
            init_new_workspace=runner.init_new_workspace,
        )
        # the prefill planner holds this very list
        self.qo_indptr[0] = torch.zeros(num_rows + 1, dtype=torch.int32, device=runner.device)
        self._dtype = runner.dtype

    def _biased_rows(
        self, slot_table: Tensor, k_pool: Tensor, shape: Shape, *, alpha: float, beta: float
    ) -> ClassRows:
        """Rows on FlashInfer's own kernels; their plans take turns with the host's in its workspace."""
        return ClassRows(
            slot_table,
            k_pool,
            shape,
            alpha=alpha,
            beta=beta,
            make_executor=lambda: FlashInferExecutor(self.workspace_buffer),
            dtype=self._dtype,
        )
