"""Rows of several queries on the CPU: one load of a request's keys, then its rows in tiles.

Dims: T tokens, Q query heads, H KV heads, G query heads per KV head, D head dim, S pool slots,
      J keys of a request, N queries of a tile

    short rows   [ keys 0 ... end )    tile: rows that lie close share a mask
    long row     [ prefix | self ]     the prefix without a mask, self causal, merged by log-sum-exp
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from .cpu_rows import KeyBias, Row, Workspace, flash

CAUSAL_LEN = 256  # a row of so many queries is cut at its prefix; also bounds the queries of a mask
# A row joins the tile before it while the logits this computes in vain, per head, cost less than a call.
JOIN_BUDGET = 6144


@dataclass(frozen=True, kw_only=True)
class MaskedTile:
    """Tokens [first, last) of short rows; each sees the keys up to its own position."""

    first: int
    last: int
    num_keys: int
    mask_NJ: Tensor  # float32: 0 or the key's bias, -inf where hidden


@dataclass(frozen=True, kw_only=True)
class CausalTile:
    """Tokens [first, last) of one long row."""

    first: int
    last: int
    prefix_len: int
    prefix_bias_J: Tensor | None
    self_bias_N: Tensor | None


@dataclass(frozen=True, kw_only=True)
class RequestPlan:
    """Adjacent rows of one request, in position order."""

    slots_J: Tensor  # int64
    start: int | None  # the first slot, where the slots are consecutive
    tiles: tuple[MaskedTile | CausalTile, ...]


def plan_request(slot_table: Tensor, rows: list[Row], bias: KeyBias | None) -> RequestPlan:
    """Plan rows of one request whose keys nest."""
    slots_J = slot_table[rows[0].request, : rows[-1].end].long()
    bias_J = bias.at(slots_J) if bias is not None else None
    tiles: list[MaskedTile | CausalTile] = []
    for tile in _tiles(rows):
        tiles.append(_masked(tile, bias_J) if isinstance(tile, list) else _causal(tile, bias_J))
    consecutive = bool((slots_J.diff() == 1).all())
    return RequestPlan(slots_J=slots_J, start=int(slots_J[0]) if consecutive else None, tiles=tuple(tiles))


def _tiles(rows: Iterable[Row]) -> Iterator[list[Row] | Row]:
    """Long rows, and lists of short rows that share a mask, in token order."""
    short: list[Row] = []
    for row in rows:
        is_long = row.num_queries >= CAUSAL_LEN or row.prefix_len == 0
        num_queries = sum(joined.num_queries for joined in short)
        if short and (
            is_long
            or num_queries + row.num_queries > CAUSAL_LEN
            or num_queries * (row.end - short[-1].end) > JOIN_BUDGET
        ):
            yield short
            short = []
        if is_long:
            yield row
        else:
            short.append(row)
    if short:
        yield short


def _masked(rows: list[Row], bias_J: Tensor | None) -> MaskedTile:
    num_keys = rows[-1].end
    position_N = torch.cat([torch.arange(row.prefix_len, row.end) for row in rows])
    hidden_NJ = torch.arange(num_keys) > position_N[:, None]
    shown_J = torch.zeros(num_keys) if bias_J is None else bias_J[:num_keys]
    return MaskedTile(
        first=rows[0].first,
        last=rows[0].first + position_N.numel(),
        num_keys=num_keys,
        mask_NJ=shown_J.expand(hidden_NJ.shape).masked_fill(hidden_NJ, -torch.inf),
    )


def _causal(row: Row, bias_J: Tensor | None) -> CausalTile:
    return CausalTile(
        first=row.first,
        last=row.first + row.num_queries,
        prefix_len=row.prefix_len,
        prefix_bias_J=None if bias_J is None else bias_J[: row.prefix_len],
        self_bias_N=None if bias_J is None else bias_J[row.prefix_len : row.end],
    )


def run_request(
    plan: RequestPlan,
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    out_TQD: Tensor,
    *,
    scale: float,
    math_dtype: torch.dtype,
    workspace: Workspace,
) -> None:
    """Write the attention of the request's rows into their tokens of `out_TQD`; products run in `math_dtype`."""
    k_HJD = _load(plan, k_SHD, math_dtype, "keys", workspace)
    v_HJD = _load(plan, v_SHD, math_dtype, "values", workspace)
    for tile in plan.tiles:
        q_NHGD = q_TQD[tile.first : tile.last].unflatten(1, (k_HJD.shape[0], -1))
        q_HGND = q_NHGD.permute(1, 2, 0, 3).to(math_dtype)
        if isinstance(tile, MaskedTile):
            j = tile.num_keys
            out_HGND, _ = _attend(q_HGND, k_HJD[:, :j], v_HJD[:, :j], mask=tile.mask_NJ, scale=scale)
        else:
            out_HGND = _run_causal(tile, q_HGND, k_HJD, v_HJD, scale=scale)
        out_TQD[tile.first : tile.last].view(q_NHGD.shape).copy_(out_HGND.permute(2, 0, 1, 3))


def _run_causal(tile: CausalTile, q_HGND: Tensor, k_HJD: Tensor, v_HJD: Tensor, *, scale: float) -> Tensor:
    a, b = tile.prefix_len, tile.prefix_len + tile.last - tile.first
    out_HGND, lse_HGN = _attend(
        q_HGND, k_HJD[:, a:b], v_HJD[:, a:b], is_causal=True, mask=tile.self_bias_N, scale=scale
    )
    if a == 0:
        return out_HGND
    prefix_HGND, prefix_lse_HGN = _attend(
        q_HGND, k_HJD[:, :a], v_HJD[:, :a], mask=tile.prefix_bias_J, scale=scale
    )
    weight_HGN1 = (prefix_lse_HGN - lse_HGN).sigmoid()[..., None]
    return torch.lerp(out_HGND.float(), prefix_HGND.float(), weight_HGN1)


def _attend(
    q_HGND: Tensor,
    k_HJD: Tensor,
    v_HJD: Tensor,
    *,
    scale: float,
    mask: Tensor | None,
    is_causal: bool = False,
) -> tuple[Tensor, Tensor]:
    """out [H, G, N, D] and lse [H, G, N]. KV heads are the kernel's batch: a group reads them by stride 0."""
    group = q_HGND.shape[1]
    k_HGJD = k_HJD[:, None].expand(-1, group, -1, -1)
    v_HGJD = v_HJD[:, None].expand(-1, group, -1, -1)
    if mask is not None:
        mask = mask.expand(1, 1, -1, -1) if mask.dim() == 2 else mask[None, None, None]
    out, lse = flash(q_HGND, k_HGJD, v_HGJD, 0.0, is_causal, attn_mask=mask, scale=scale)
    return out, lse


def _load(plan: RequestPlan, pool_SHD: Tensor, dtype: torch.dtype, name: str, workspace: Workspace) -> Tensor:
    """The request's keys or values [H, J, D], copied: the kernel reads them faster one head after the other."""
    _, num_heads, head_dim = pool_SHD.shape
    num_keys = plan.slots_J.numel()
    if plan.start is None:
        k_JHD = workspace.take(f"gathered {name}", (num_keys, num_heads, head_dim), pool_SHD.dtype)
        torch.index_select(pool_SHD, 0, plan.slots_J, out=k_JHD)
    else:
        k_JHD = pool_SHD[plan.start : plan.start + num_keys]
    return workspace.take(name, (num_heads, num_keys, head_dim), dtype).copy_(k_JHD.transpose(0, 1))
