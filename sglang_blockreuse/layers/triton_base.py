"""The base `triton`: SGLang's Triton backend with index buffers for virtual rows."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

from .cuda_rows import ROWS_PER_REQUEST, CudaRows


class BlockReuseTritonBackend(CudaRows, TritonAttnBackend):
    """It writes K/V first; the rows of a folded batch exceed one per request."""

    def __init__(self, runner: Any) -> None:
        num_rows = runner.req_to_token_pool.size * ROWS_PER_REQUEST + 1
        self.qo_indptr: torch.Tensor
        self.mask_indptr: torch.Tensor
        super().__init__(runner, kv_indptr_buf=torch.zeros(num_rows, dtype=torch.int32, device=runner.device))
        self.qo_indptr = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)
        self.mask_indptr = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)
