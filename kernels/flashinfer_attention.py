"""The biased attention on FlashInfer's own kernels: one plan per tag class, merged by log-sum-exp.

Dims as in reference.py, and: C tag classes, M entries of a mask

alpha and beta are constant in a tag class, so softmax(scale q.k + bias) over a row is the merge of the plain
attention over each class, with the class's log-sum-exp shifted by its bias. Each class has a page list of its own
and no key is read twice. A class whose keys all stand before a row's queries needs no mask, one that holds the
row's own positions is plain causal, and only what is left takes FlashInfer's custom mask.

Facts of FlashInfer 0.7 that this file rests on: log-sum-exps are base 2; a query without keys has out 0 and
log-sum-exp -inf; a custom mask is flat, row after row, [queries x keys] of the row; causal masks align at the end;
of a row without pages its host code takes last_page_len as the length for planning and last_page_len - 1 for the
mask, so an empty row needs 0 in a plan without a mask and 1 in a plan with one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .reference import NUM_TAG_CLASSES, check_rows, class_bias, math_dtype, merge_states

LOG2E = 1.4426950408889634


@dataclass(frozen=True)
class Geometry:
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    scale: float
    q_dtype: torch.dtype
    kv_dtype: torch.dtype


@dataclass(frozen=True)
class ClassPlan:
    """The arguments of one FlashInfer plan: the attention of every query over the keys of one tag class."""

    tag: int
    bias: float  # added to every logit of the class
    qo_indptr_R1: Tensor  # int32
    kv_indptr_R1: Tensor  # int32
    kv_indices: Tensor  # int32 slots: a class list has pages of one slot
    last_page_len_R: Tensor  # int32: 1; a row without keys has 0, and 1 under a custom mask
    causal: bool
    custom_mask: Tensor | None  # bool, flat: what each query sees of the class


class Executor(Protocol):
    """What FlashInfer's paged prefill wrapper does: `plan` once per batch, `run` once per layer."""

    def plan(self, part: ClassPlan, geometry: Geometry) -> None: ...

    def run(self, q_TQD: Tensor, k_SHD: Tensor, v_SHE: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, Q, E] and the log-sum-exp in base 2, float32 [T, Q]."""


def plan_classes(
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    qo_indptr_R1: Tensor,
    tags_S: Tensor,
    *,
    alpha: float,
    beta: float,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
) -> list[ClassPlan]:
    """Splits virtual rows (see `reference.extend_attention`) by tag; a decode row has one query. Synchronises, a few
    times for each class and never for a row.

    With both biases 0 there is one class. Classes of equal bias stay apart: a class is its tag.
    """
    if alpha == 0.0 and beta == 0.0:
        tags_S = torch.zeros_like(tags_S)
    rows = _Rows.of(kv_indices, kv_indptr_R1, qo_indptr_R1, page_size, kv_lens_R)
    tag_I = tags_S[rows.slots_I] & (NUM_TAG_CLASSES - 1)
    return [
        part
        for tag in range(NUM_TAG_CLASSES)
        if (part := _class(tag, tag_I == tag, rows, alpha, beta)) is not None
    ]


class _Rows(NamedTuple):
    """Every key of a batch in the order of the rows, and where each row's queries stand."""

    slots_I: Tensor
    row_I: Tensor
    positions_I: Tensor  # index of the key in its row
    num_queries_R: Tensor
    first_query_R: Tensor
    qo_indptr_R1: Tensor

    @classmethod
    def of(
        cls,
        kv_indices: Tensor,
        kv_indptr_R1: Tensor,
        qo_indptr_R1: Tensor,
        page_size: int,
        kv_lens_R: Tensor | None,
    ) -> _Rows:
        """Raises ValueError if a row has more keys than entries."""
        check_rows(kv_indptr_R1, page_size=page_size, kv_lens_R=kv_lens_R)
        lens_R = kv_indptr_R1.diff().long() if kv_lens_R is None else kv_lens_R.long()
        row_I = torch.repeat_interleave(torch.arange(len(lens_R), device=lens_R.device), lens_R)
        positions_I = torch.arange(len(row_I), device=lens_R.device) - (lens_R.cumsum(0) - lens_R)[row_I]
        entries_I = kv_indices[kv_indptr_R1.long()[row_I] + positions_I // page_size].long()
        num_queries_R = qo_indptr_R1.diff().long()
        return cls(
            entries_I * page_size + positions_I % page_size,
            row_I,
            positions_I,
            num_queries_R,
            lens_R - num_queries_R,
            qo_indptr_R1.int(),
        )


def _class(tag: int, kept_I: Tensor, rows: _Rows, alpha: float, beta: float) -> ClassPlan | None:
    """The plan of one tag, or None where no key has it."""
    at = kept_I.nonzero()[:, 0]
    if at.numel() == 0:
        return None
    row_I, positions_I = rows.row_I[at], rows.positions_I[at]
    lens_R = torch.zeros_like(rows.num_queries_R).index_add_(0, row_I, torch.ones_like(row_I))
    own_I = positions_I >= rows.first_query_R[row_I]
    num_own_R = torch.zeros_like(lens_R).index_add_(0, row_I, own_I.long())
    # regions of a row:  [ before the queries | own positions ]: a class may hold none, all, or some of its own
    causal = bool((num_own_R == rows.num_queries_R).all())
    masked = not causal and bool(num_own_R.any())
    indptr_R1 = torch.nn.functional.pad(lens_R.cumsum(0), (1, 0))
    return ClassPlan(
        tag=tag,
        bias=class_bias(tag, alpha, beta),
        qo_indptr_R1=rows.qo_indptr_R1,
        kv_indptr_R1=indptr_R1.int(),
        kv_indices=rows.slots_I[at].int(),
        last_page_len_R=torch.ones_like(lens_R).int() if masked else lens_R.clamp(max=1).int(),
        causal=causal,
        custom_mask=_visible(positions_I, lens_R, indptr_R1, rows) if masked else None,
    )


def _visible(positions_I: Tensor, lens_R: Tensor, indptr_R1: Tensor, rows: _Rows) -> Tensor:
    """Flat bool mask, row after row [queries x keys]: a query sees the keys of the class up to its own position."""
    sizes_R = rows.num_queries_R * lens_R
    row_M = torch.repeat_interleave(torch.arange(len(lens_R), device=lens_R.device), sizes_R)
    at_M = torch.arange(len(row_M), device=lens_R.device) - (sizes_R.cumsum(0) - sizes_R)[row_M]
    query_M, key_M = at_M // lens_R[row_M], at_M % lens_R[row_M]
    return positions_I[indptr_R1[row_M] + key_M] <= rows.first_query_R[row_M] + query_M


class ClassAttention:
    """Biased attention over one batch: `plan` once, then `run` in every layer on that layer's pools."""

    def __init__(self, make_executor: Callable[[], Executor]) -> None:
        self._make_executor = make_executor
        self._executors: list[Executor] = []  # one per class, kept from batch to batch
        self._biases: list[float] = []
        self._geometry: Geometry | None = None

    def plan(self, parts: Sequence[ClassPlan], geometry: Geometry) -> None:
        """Plans every class; all layers of the batch share the plan. Host work, outside captured graphs."""
        while len(self._executors) < len(parts):
            self._executors.append(self._make_executor())
        for executor, part in zip(self._executors, parts, strict=False):
            executor.plan(part, geometry)
        self._biases, self._geometry = [part.bias for part in parts], geometry

    def run(self, q_TQD: Tensor, k_SHD: Tensor, v_SHE: Tensor) -> tuple[Tensor, Tensor]:
        """out [T, Q, E] in q's dtype and natural lse float32 [T, Q], as `reference.extend_attention`.

        Pools are [S, H, D] or [N, P, H, D] with slots in order. Raises RuntimeError before the first plan.
        """
        if self._geometry is None:
            raise RuntimeError("run before plan: plan the batch once, then run every layer")
        if not self._biases:
            out = q_TQD.new_zeros((*q_TQD.shape[:2], self._geometry.value_dim))
            return out, q_TQD.new_full(q_TQD.shape[:2], -torch.inf, dtype=math_dtype(q_TQD))
        states = [executor.run(q_TQD, k_SHD, v_SHE) for executor in self._executors[: len(self._biases)]]
        lses = [lse / LOG2E + bias for (_, lse), bias in zip(states, self._biases, strict=True)]
        if len(states) == 1:
            return states[0][0], lses[0]
        if q_TQD.is_cuda:
            return _merge_on_device([out for out, _ in states], lses)
        return merge_states([out for out, _ in states], lses)


def _merge_on_device(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    import flashinfer

    out, lse = flashinfer.merge_states(torch.stack(tuple(outs), 1), torch.stack(tuple(lses), 1) * LOG2E)
    return out, lse / LOG2E


class FlashInferExecutor:
    """`flashinfer.BatchPrefillWithPagedKVCacheWrapper`; the float workspace may serve several executors in turn."""

    def __init__(self, workspace: Tensor) -> None:
        import flashinfer

        self._wrapper: Any = flashinfer.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")

    def plan(self, part: ClassPlan, geometry: Geometry) -> None:
        self._wrapper.plan(**plan_arguments(part, geometry))

    def run(self, q_TQD: Tensor, k_SHD: Tensor, v_SHE: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self._wrapper.run(q_TQD, (as_slots(k_SHD), as_slots(v_SHE)), return_lse=True)
        return out, lse


def plan_arguments(part: ClassPlan, geometry: Geometry) -> dict[str, Any]:
    """The keywords of FlashInfer's `plan`."""
    return {
        "qo_indptr": part.qo_indptr_R1,
        "paged_kv_indptr": part.kv_indptr_R1,
        "paged_kv_indices": part.kv_indices,
        "paged_kv_last_page_len": part.last_page_len_R,
        "num_qo_heads": geometry.num_q_heads,
        "num_kv_heads": geometry.num_kv_heads,
        "head_dim_qk": geometry.head_dim,
        "head_dim_vo": geometry.value_dim,
        "page_size": 1,
        "custom_mask": part.custom_mask,
        "causal": part.causal,
        "sm_scale": geometry.scale,
        "q_data_type": geometry.q_dtype,
        "kv_data_type": geometry.kv_dtype,
    }


def as_slots(pool: Tensor) -> Tensor:
    """A pool as pages of one slot, [S, 1, H, D], the shape FlashInfer takes. Raises RuntimeError where a copy
    would be needed: heads stored before slots have no such view."""
    return (pool if pool.dim() == 3 else pool.view(-1, *pool.shape[2:])).unsqueeze(1)


def top_k(scores_RW: Tensor, k: int) -> Tensor:
    """FlashInfer's top-k under the tie rule: positions int64 [R, k], unordered, lower positions before equal.

    Every row must have at least k valid columns; `top_k.top_k` serves ragged rows, sinks and windows.
    """
    import flashinfer

    # 1: prefer smaller indices at the boundary
    _, positions = flashinfer.top_k(scores_RW, k, tie_break=1)
    return positions
