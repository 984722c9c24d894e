"""Which plans sparse decode on the CPU computes; the reasons why it refuses another one."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..kernels.cpu_numba import STORAGE
from .plan import BoundPlan

MAPPED = ("label_channels", "learned")  # scorers that read what a map makes of the keys


def unsupported_plan(plan: BoundPlan, k_pool_SHD: Tensor) -> Iterator[str]:
    """What in a plan, or in the pool it would read, sparse decode on the CPU would compute wrongly."""
    if k_pool_SHD.dtype not in STORAGE:
        yield f"the pool holds {k_pool_SHD.dtype}, not {' or '.join(map(str, STORAGE))}"
    if not k_pool_SHD.is_contiguous():
        yield f"the pool's slots are not contiguous (strides {k_pool_SHD.stride()})"
    yield from unsupported_scorer(plan, *k_pool_SHD.shape[1:])
    sharing = [layer.layer for layer in plan.layers if layer.kv_from is not None]
    if sharing:
        yield f"kv_from on layers {sharing} is not served"
        if plan.prefill == "sparse":
            yield "prefill: sparse is not served together with kv_from"


def unsupported_scorer(plan: BoundPlan, num_kv_heads: int, head_dim: int) -> Iterator[str]:
    """What in a plan's scorer is not computed on the CPU."""
    scorer = plan.scorer
    if scorer.kind not in ("exact_qk", "int4_keys", *MAPPED):
        yield f"scorer.kind is {scorer.kind}; served are exact_qk, int4_keys, label_channels and learned"
    if "routed" in (scorer.scan_heads, scorer.rerank_heads):
        yield "routed heads are not served; scan_heads and rerank_heads can be all or fused"
    if scorer.kind == "int4_keys" and head_dim % 2:
        yield f"an int4 key copy packs two channels in a byte and the head dim is {head_dim}"
    if scorer.kind in MAPPED and plan.weights_file is None:
        yield f"scorer {scorer.kind} needs scorer.weights, a file that `calibrate --distil` writes"
    sharing = [layer.layer for layer in plan.layers if layer.key_from is not None]
    if sharing and scorer.kind in MAPPED:
        yield f"key_from on layers {sharing}: a map of scorer {scorer.kind} is made for a layer's own keys"
    if scorer.kind == "learned" and (scorer.heads, scorer.scan_heads) != ("layer", "all"):
        yield "scorer learned has one key for all heads, so heads is layer and scan_heads is all"
