"""Attention on the CPU over a token pool: planned once per forward, run in every layer.

Dims: T tokens of the forward, Q = H * G query heads, H KV heads, D head dim, S pool slots

A row is one run of a request: queries at positions prefix_len ... prefix_len + extend_len - 1 and the keys from
position 0 to each. K and V of all rows must stand in the pool before `run_attention`: rows of one request read
each other's. Only slots of the rows' own keys are read. The law is `reference.extend_attention`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu_decode import DecodePlan, plan_decode, run_decode
from .cpu_extend import RequestPlan, plan_request, run_request
from .cpu_rows import KeyBias, Row, Workspace, nested, rows_of

__all__ = ["AttentionPlan", "KeyBias", "Workspace", "plan_attention", "run_attention"]


@dataclass(frozen=True, kw_only=True)
class AttentionPlan:
    num_tokens: int
    decode: DecodePlan | None  # requests with one query in this forward
    requests: tuple[RequestPlan, ...]  # requests with several


def plan_attention(
    slot_table: Tensor,
    requests: Sequence[int],
    prefix_lens: Sequence[int],
    extend_lens: Sequence[int],
    *,
    bias: KeyBias | None = None,
) -> AttentionPlan:
    """Plan a forward whose row r has the keys slot_table[requests[r], : prefix_lens[r] + extend_lens[r]].

    `slot_table` is int [requests, positions]; it is read now and not kept. Rows may be empty. A bias with alpha
    and beta 0 costs nothing. Raises ValueError for lengths that disagree or exceed the table.
    """
    if bias is not None and bias.alpha == 0 and bias.beta == 0:
        bias = None
    num_tokens = sum(extend_lens)
    singles: list[Row] = []
    plans: list[RequestPlan] = []
    for group in nested(rows_of(requests, prefix_lens, extend_lens, slot_table.shape[1])):
        if len(group) == 1 and group[0].num_queries == 1:
            singles.append(group[0])
        else:
            plans.append(plan_request(slot_table, group, bias))
    decode = plan_decode(slot_table, singles, num_tokens, bias) if singles else None
    return AttentionPlan(num_tokens=num_tokens, decode=decode, requests=tuple(plans))


def run_attention(
    plan: AttentionPlan,
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    out_TQD: Tensor,
    *,
    scale: float,
    workspace: Workspace,
) -> None:
    """Write softmax(scale * q k + bias) v of one layer into `out_TQD`; tokens behind the plan's become 0.

    Queries and pools have one dtype. `workspace` is kept from call to call, by one thread. Raises ValueError
    for shapes and dtypes that do not fit.
    """
    _check(plan, q_TQD, k_SHD, v_SHD, out_TQD)
    out_TQD[plan.num_tokens :] = 0
    if plan.decode is not None:
        tokens = slice(plan.num_tokens)
        run_decode(
            plan.decode, q_TQD[tokens], k_SHD, v_SHD, out_TQD[tokens], scale=scale, workspace=workspace
        )
    math_dtype = extend_dtype(q_TQD.dtype)
    for request in plan.requests:
        run_request(
            request, q_TQD, k_SHD, v_SHD, out_TQD, scale=scale, math_dtype=math_dtype, workspace=workspace
        )


def extend_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of products of many queries: without AMX tiles float32 is twice as fast as bfloat16."""
    if dtype in (torch.bfloat16, torch.float16) and not torch.cpu._is_amx_tile_supported():
        return torch.float32
    return dtype


def _check(plan: AttentionPlan, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor) -> None:
    if k_SHD.shape != v_SHD.shape or q_TQD.shape != out_TQD.shape:
        raise ValueError(
            f"keys {tuple(k_SHD.shape)} and values {tuple(v_SHD.shape)}, queries {tuple(q_TQD.shape)} and output "
            f"{tuple(out_TQD.shape)} must have the same shape"
        )
    num_tokens, num_q_heads, head_dim = q_TQD.shape
    if head_dim != k_SHD.shape[2] or num_q_heads % k_SHD.shape[1] or num_tokens < plan.num_tokens:
        raise ValueError(
            f"queries {tuple(q_TQD.shape)} do not fit keys {tuple(k_SHD.shape)} and a plan of {plan.num_tokens} "
            "tokens: they need the same head dim, a multiple of the KV heads, and at least the plan's tokens"
        )
    if not q_TQD.dtype == k_SHD.dtype == v_SHD.dtype:
        raise ValueError(
            f"queries are {q_TQD.dtype}, keys {k_SHD.dtype}, values {v_SHD.dtype}: one dtype is needed"
        )
