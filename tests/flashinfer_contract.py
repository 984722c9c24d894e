"""FlashInfer's paged prefill in PyTorch: the same plan keywords, the same layouts, float64 inside.

Lengths and mask offsets come from FlashInfer's own host functions, so a plan that they misread is misread here.
"""

from __future__ import annotations

from typing import Any

import torch
from flashinfer.page import get_seq_lens
from flashinfer.prefill import _compute_page_mask_indptr
from torch import Tensor

from sglang_blockreuse.kernels.flashinfer_attention import ClassPlan, Geometry, as_slots, plan_arguments


class TorchExecutor:
    """An `Executor` that follows the documented contract of BatchPrefillWithPagedKVCacheWrapper."""

    def __init__(self) -> None:
        self.num_plans = 0
        self._plan: dict[str, Any] = {}

    def plan(self, part: ClassPlan, geometry: Geometry) -> None:
        self._plan = plan_arguments(part, geometry)
        self.num_plans += 1

    def run(self, q_TQD: Tensor, k_SHD: Tensor, v_SHE: Tensor) -> tuple[Tensor, Tensor]:
        plan = self._plan
        k, v = as_slots(k_SHD).double(), as_slots(v_SHE).double()  # [S, 1, H, D]
        group = plan["num_qo_heads"] // plan["num_kv_heads"]
        out = torch.zeros((*q_TQD.shape[:2], plan["head_dim_vo"]), dtype=torch.float64)
        lse = torch.full(q_TQD.shape[:2], -torch.inf, dtype=torch.float64)
        bounds, entries = plan["qo_indptr"].tolist(), plan["paged_kv_indptr"].tolist()
        layout = (plan["paged_kv_indptr"], plan["paged_kv_last_page_len"], plan["page_size"])
        lens = get_seq_lens(*layout).tolist()
        for r in range(len(bounds) - 1):
            num_queries, num_keys = bounds[r + 1] - bounds[r], entries[r + 1] - entries[r]
            if plan["custom_mask"] is None:
                assert lens[r] == num_keys, f"row {r}: planned for {lens[r]} keys, has {num_keys}"
            if num_queries == 0 or num_keys == 0:
                continue
            pages = plan["paged_kv_indices"][entries[r] : entries[r + 1]].long()
            k_JHD = k[pages].flatten(0, 1).repeat_interleave(group, 1)
            v_JHE = v[pages].flatten(0, 1).repeat_interleave(group, 1)
            logits = (
                torch.einsum("tqd,jqd->qtj", q_TQD[bounds[r] : bounds[r + 1]].double(), k_JHD)
                * plan["sm_scale"]
            )
            logits = logits.masked_fill(~self._mask(r, num_queries, num_keys, layout), -torch.inf)
            lse_QT = logits.logsumexp(-1)
            weights = (logits - lse_QT.nan_to_num(neginf=0.0)[..., None]).exp()
            out[bounds[r] : bounds[r + 1]] = torch.einsum("qtj,jqe->tqe", weights, v_JHE)
            lse[bounds[r] : bounds[r + 1]] = lse_QT.T
        return out.to(q_TQD.dtype), lse / torch.log(torch.tensor(2.0, dtype=torch.float64))

    def _mask(self, row: int, num_queries: int, num_keys: int, layout: tuple[Tensor, Tensor, int]) -> Tensor:
        plan = self._plan
        if plan["custom_mask"] is not None:
            begin, end = _compute_page_mask_indptr(plan["qo_indptr"], *layout)[row : row + 2].tolist()
            return plan["custom_mask"][begin:end].view(num_queries, num_keys)
        visible = torch.ones((num_queries, num_keys), dtype=torch.bool)
        return visible.tril(num_keys - num_queries) if plan["causal"] else visible
