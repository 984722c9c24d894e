"""Which plans are served on which device; the reasons why another one is refused.

What only the CPU serves is told before weights are loaded, by name and with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from ..kernels.cpu_numba import STORAGE
from .plan import BoundPlan

MAPPED = ("label_channels", "learned")  # scorers that read what a map makes of the keys
SERVED = ("exact_qk", "int4_keys", *MAPPED, "page_minmax")


def unsupported_plan(plan: BoundPlan, k_pool_SHD: Tensor, num_q_heads: int | None = None) -> Iterator[str]:
    """What in a plan, or in the pool it would read, sparse decode on the CPU would compute wrongly."""
    if k_pool_SHD.dtype not in STORAGE:
        yield f"the pool holds {k_pool_SHD.dtype}, not {' or '.join(map(str, STORAGE))}"
    if not k_pool_SHD.is_contiguous():
        yield f"the pool's slots are not contiguous (strides {k_pool_SHD.stride()})"
    num_kv_heads, head_dim = k_pool_SHD.shape[1:]
    yield from unsupported_scorer(plan, num_kv_heads, head_dim)
    if num_q_heads is not None:
        yield from unsupported_routing(plan, num_kv_heads, num_q_heads)
    yield from unsupported_sharing(plan)
    if plan.prefill == "sparse":
        yield from unsupported_repair(plan)


CUDA_SCORERS = ("exact_qk", "int4_keys", *MAPPED)


def unsupported_on_cuda(plan: BoundPlan, num_ranks: int) -> Iterator[str]:
    """What in a plan is served on the CPU only, though its device could be one of CUDA."""
    scorer = plan.scorer
    if scorer.kind not in CUDA_SCORERS:
        yield f"scorer.kind is {scorer.kind}; served on CUDA are {', '.join(CUDA_SCORERS)}" + (
            ": pages are handed out to rows on the host while a step begins, and a captured step has no host"
            if scorer.kind == "page_minmax"
            else ""
        )
    if scorer.kind in MAPPED:
        yield from _unmapped(plan)
        if num_ranks > 1:
            yield f"scorer.kind {scorer.kind}: its file of weights is for all heads, and a rank has some of them"
    if "routed" in (scorer.scan_heads, scorer.rerank_heads):
        yield "routed heads are chosen by a sample that is sorted on the host, which a captured step does not have"
    shared = plan.shared_layers
    if shared:
        yield (
            f"kv_from on layers {list(shared)}: SGLang asks only an out-of-tree platform for another pool class, and "
            "CUDA is a platform of its own"
        )
    if plan.prefill == "sparse":
        yield (
            "prefill: sparse saves reads of long histories, and on CUDA the dense attention of a prefill is bound by "
            "arithmetic, of which it needs more; set prefill: dense"
        )
    if num_ranks > 1 and "layer" in (scorer.heads, scorer.lends):
        yield (
            f"scorer.heads {scorer.heads} with {num_ranks} tensor-parallel ranks: one list for all heads is summed "
            "over ranks inside a captured step, and nothing promises that every rank sums to the same bits; set "
            "heads and lend_heads to kv_head"
        )


def unsupported_sharing(plan: BoundPlan) -> Iterator[str]:
    """What in a plan's sharing of main KV is not computed, whatever its layers' roles."""
    windows = [layer.layer for layer in plan.layers if layer.own_window]
    if windows:
        yield (
            f"own_window on layers {windows} is not served: a prefix hit and a copied block bring the shared KV and "
            "not the layer's own, so its window would depend on how the prompt was computed; leave own_window out"
        )


def unsupported_repair(plan: BoundPlan) -> Iterator[str]:
    """What in a plan sparse repair does not compute."""
    if plan.scorer.kind == "page_minmax":
        yield "prefill: sparse is not served with scorer page_minmax: pages belong to rows, and repair tokens share one"
    if any(layer.kv_from is not None for layer in plan.layers):
        yield "prefill: sparse is not served together with kv_from"


def unsupported_scorer(plan: BoundPlan, num_kv_heads: int, head_dim: int) -> Iterator[str]:
    """What in a plan's scorer is not computed on the CPU."""
    scorer = plan.scorer
    if scorer.kind not in SERVED:
        yield f"scorer.kind is {scorer.kind}; served are {', '.join(SERVED)}"
    if scorer.kind == "int4_keys" and head_dim % 2:
        yield f"an int4 key copy packs two channels in a byte and the head dim is {head_dim}"
    if scorer.kind in MAPPED:
        yield from _unmapped(plan)


def _unmapped(plan: BoundPlan) -> Iterator[str]:
    """What a scorer that reads a map of the keys does not go with."""
    scorer = plan.scorer
    if plan.weights_file is None:
        yield f"scorer {scorer.kind} needs scorer.weights, a file that `calibrate --distil` writes"
    sharing = [layer.layer for layer in plan.layers if layer.key_from is not None]
    if sharing:
        yield f"key_from on layers {sharing}: a map of scorer {scorer.kind} is made for a layer's own keys"
    scored = [layer.layer for layer in plan.layers if layer.scores and layer.kv_from is not None]
    if scored:
        yield f"kv_from on layers {scored}: a map of scorer {scorer.kind} is made for a layer's own keys"
    heads = (scorer.heads, scorer.scan_heads, scorer.rerank_heads or "all")
    if scorer.kind == "learned" and heads != ("layer", "all", "all"):
        yield "scorer learned has one key for all heads, so heads is layer, scan_heads and rerank_heads are all"


def unsupported_routing(plan: BoundPlan, num_kv_heads: int, num_q_heads: int) -> Iterator[str]:
    """A number of routed heads that lists of this model do not have."""
    num, per_list = plan.scorer.num_routed_heads, num_q_heads
    if plan.scorer.heads == "kv_head":
        per_list //= num_kv_heads
    if num is not None and num > per_list:
        yield f"scorer.num_routed_heads is {num}, but a list of this model is scored by {per_list} query heads"
