"""FlashAttention's and FlashInfer's entry points in PyTorch, for rehearsals without a device.

They take the keywords that the host passes, read the layouts as the kernels do, and fail on what they do not know.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import pytest
import torch
from torch import Tensor


def attend(q_TQD: Tensor, k_JHD: Tensor, v_JHD: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """out [T, Q, D] and log-sum-exp [T, Q], in float64; queries stand at the last positions."""
    group = q_TQD.shape[1] // k_JHD.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k_JHD, v_JHD))
    logits = torch.einsum("tqd,jqd->qtj", q_TQD.double(), k) * scale
    if causal:
        first = len(k) - len(q_TQD)
        hidden = torch.arange(len(k))[None] > torch.arange(first, len(k))[:, None]
        logits = logits.masked_fill(hidden, -torch.inf)
    lse = logits.logsumexp(-1)
    return torch.einsum("qtj,jqd->tqd", (logits - lse[..., None]).exp(), v).to(q_TQD.dtype), lse.T


# -- FlashAttention 3 ----------------------------------------------------------------------------------------

FA3_IGNORED = {
    "num_splits",
    "ver",
    "max_seqlen_q",
    "cu_seqlens_k_new",
    "scheduler_metadata",
    "return_softmax_lse",
}


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    softmax_scale: float,
    causal: bool,
    **options: Any,
) -> Tensor:
    unknown = {name for name, value in options.items() if value is not None} - FA3_IGNORED
    assert unknown <= {"softcap", "window_size"}, unknown
    assert options.get("softcap") in (None, 0.0)
    assert options.get("window_size") in (None, (-1, -1))
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    assert page_table.shape[0] == len(cache_seqlens) == len(cu_seqlens_q) - 1
    k, v = k_cache.flatten(0, 1), v_cache.flatten(0, 1)
    out = torch.empty_like(q)
    for r, num_keys in enumerate(cache_seqlens.tolist()):
        begin, end = cu_seqlens_q[r : r + 2].tolist()
        assert 0 < end - begin <= options["max_seqlen_q"]
        slots = page_table[r, :num_keys].long()
        out[begin:end], _ = attend(q[begin:end], k[slots], v[slots], softmax_scale, causal)
    return out


def install_fa3(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for the compiled package, which loads on a CUDA device only."""
    package, module = types.ModuleType("sgl_kernel"), types.ModuleType("sgl_kernel.flash_attn")
    for made in (package, module):
        made.__spec__ = importlib.machinery.ModuleSpec(made.__name__, None)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    package.__path__ = []
    package.merge_state_v2 = None
    module.flash_attn_varlen_func = None
    module.flash_attn_with_kvcache = flash_attn_with_kvcache
    module.get_scheduler_metadata = lambda *args, **kwargs: None

    import sglang.srt.layers.attention.flashattention_backend as host

    monkeypatch.setattr(host, "flash_attn_with_kvcache", flash_attn_with_kvcache)


# -- FlashInfer ----------------------------------------------------------------------------------------------


class PagedPrefill:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`: the host's `begin_forward`/`forward` and ours, `plan`/`run`."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str = "auto") -> None:
        assert layout == "NHD"
        self.is_cuda_graph_enabled, self._custom_mask_buf = False, None

    def begin_forward(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        **options: Any,
    ) -> None:
        assert page_size == 1
        assert len(paged_kv_last_page_len) == len(qo_indptr) - 1 == len(paged_kv_indptr) - 1
        # of a row without keys the host code reads the last page's length as its own: 0, and 1 under a mask
        lens = paged_kv_indptr.diff().clamp(max=1)
        assert torch.equal(paged_kv_last_page_len, lens if custom_mask is None else torch.ones_like(lens))
        self.bounds, self.entries = qo_indptr.tolist(), paged_kv_indptr.tolist()
        self.slots = paged_kv_indices[: self.entries[-1]].long()
        self.mask, self.causal, self.scale = custom_mask, causal, sm_scale

    def plan(self, *, head_dim_qk: int, head_dim_vo: int, **options: Any) -> None:
        assert head_dim_qk == head_dim_vo
        self.begin_forward(head_dim=head_dim_qk, **options)

    def forward(
        self, q: Tensor, kv: tuple[Tensor, Tensor], *, causal: bool, sm_scale: float, **options: Any
    ) -> Tensor:
        assert not options["logits_soft_cap"]
        assert options["window_left"] == -1
        assert options["k_scale"] in (None, 1.0)
        self.causal, self.scale = causal, sm_scale
        return self.run(q, (kv[0].unsqueeze(1), kv[1].unsqueeze(1)), return_lse=True)[0]

    def run(self, q: Tensor, kv: tuple[Tensor, Tensor], *, return_lse: bool) -> tuple[Tensor, Tensor]:
        """Pools of pages of one slot, [S, 1, H, D]; log-sum-exp in base 2."""
        out, lse = torch.zeros_like(q), torch.full(q.shape[:2], -torch.inf)
        at = 0
        for r in range(len(self.bounds) - 1):
            rows = slice(self.bounds[r], self.bounds[r + 1])
            slots = self.slots[self.entries[r] : self.entries[r + 1]]
            num_queries, num_keys = rows.stop - rows.start, len(slots)
            k, v = kv[0][slots, 0], kv[1][slots, 0]
            if self.mask is None:
                if num_keys:
                    out[rows], lse[rows] = attend(q[rows], k, v, self.scale, self.causal)
                continue
            seen = self.mask[at : at + num_queries * num_keys].view(num_queries, num_keys)
            at += num_queries * num_keys
            for i in range(num_queries):
                if seen[i].any():
                    row = slice(rows.start + i, rows.start + i + 1)
                    out[row], lse[row] = attend(q[row], k[seen[i]], v[seen[i]], self.scale, False)
        assert self.mask is None or at == len(self.mask)
        return out, lse / torch.log(torch.tensor(2.0))


class PagedDecode(PagedPrefill):
    """`flashinfer.BatchDecodeWithPagedKVCacheWrapper`: every row has one query."""

    def __init__(self, workspace: Tensor, layout: str, *, backend: str, use_tensor_cores: bool) -> None:
        super().__init__(workspace, layout, backend=backend)

    def begin_forward(self, kv_indptr: Tensor, *args: Any, **options: Any) -> None:
        super().begin_forward(torch.arange(len(kv_indptr), dtype=torch.int32), kv_indptr, *args, **options)

    def forward(self, q: Tensor, kv: tuple[Tensor, Tensor], *, sm_scale: float, **options: Any) -> Tensor:
        return super().forward(q, kv, causal=False, sm_scale=sm_scale, window_left=-1, **options)


class Ragged:
    """The path that writes K/V after it attends: planned by nobody."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def forward(self, *args: Any, **options: Any) -> Tensor:
        raise AssertionError("the ragged path attends before it writes")

    forward_return_lse = begin_forward = forward


def install_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    import flashinfer
    import sglang.srt.layers.attention.flashinfer_backend as host

    for module in (host, flashinfer):
        monkeypatch.setattr(module, "BatchPrefillWithPagedKVCacheWrapper", PagedPrefill, raising=False)
    monkeypatch.setattr(host, "BatchDecodeWithPagedKVCacheWrapper", PagedDecode, raising=False)
    monkeypatch.setattr(host, "BatchPrefillWithRaggedKVCacheWrapper", Ragged, raising=False)
    monkeypatch.setattr(host, "should_use_tensor_core", lambda **kwargs: True)
    monkeypatch.setattr(host, "torch", _OnCpu())


class _OnCpu:
    """torch for a module of the host that says "cuda" where it means the pool's device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def empty(self, *shape: Any, device: str, **options: Any) -> Tensor:
        return torch.empty(*shape, **options)
