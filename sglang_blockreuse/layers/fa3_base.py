"""The base `fa3`: SGLang's FlashAttention 3 backend, its own default on sm90."""

from __future__ import annotations

from sglang.srt.layers.attention.flashattention_backend import FlashAttentionBackend

from .cuda_rows import CudaRows


class BlockReuseFa3Backend(CudaRows, FlashAttentionBackend):
    """It writes K/V first, and takes page tables of any number of rows."""
