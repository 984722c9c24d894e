"""Triton twin of `reference_select.rerank`: this layer's queries choose inside an earlier layer's pool.

Dims as in reference_select.py. A rerank is a scan whose positions come from the pool, so it runs the scan's kernels
with an index list and reads M keys instead of the history.
"""

from __future__ import annotations

from torch import Tensor

from .reference_select import Heads, Keys, row_lens
from .scan import pooled_scores
from .top_k import top_k


def rerank(
    q_RQD: Tensor,
    keys: Keys,
    pool_RXM: Tensor,
    pool_lens_R: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    k: int,
    scale: float,
    heads: Heads = "layer",
    num_sinks: int = 0,
    window: int = 0,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The best `k` positions of the pool: int32 [R, X, k] and counts int32 [R].

    Contract of `reference_select.rerank`: `pool_RXM` ascends, pool_lens_R[r] of its columns are valid.
    """
    scores = pooled_scores(
        q_RQD,
        keys,
        kv_indices,
        kv_indptr_R1,
        scale=scale,
        heads=heads,
        tags_S=tags_S,
        alpha=alpha,
        beta=beta,
        page_size=page_size,
        pool_RXM=pool_RXM,
        pool_lens_R=pool_lens_R,
    )
    return top_k(
        scores,
        pool_lens_R,
        k,
        positions_RXW=pool_RXM.expand(scores.shape),
        num_sinks=num_sinks,
        window=window,
        row_lens_R=row_lens(kv_indptr_R1, kv_lens_R),
    )
