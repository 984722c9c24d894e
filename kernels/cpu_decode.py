"""Rows of one query on the CPU: split over the keys, read in place where the slots allow, merged.

Dims: R rows, Q query heads, H KV heads, G query heads per KV head, D head dim, S pool slots, L keys of a piece,
      P pieces of a call, C full pieces of a row, M pieces of a row, N copied keys of a call

    keys of a row   [ piece | piece | ... | tail ]    a piece is CHUNK keys at a multiple of CHUNK

Pieces give the threads work where a model has few KV heads. A piece whose slots form a lattice (a prompt, or the
tokens of a batch that decoded together) is a strided view of the pool; only the others and the tails are copied.
Cuts depend on positions alone, so a row gets the same result wherever its slots lie and whatever shares the batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .cpu_rows import KeyBias, Row, Workspace, flash

CHUNK = 512  # keys of a piece; the flash kernel's own block of keys
TAIL_STEP = 128  # tails are padded to a multiple of it, so that a batch has few lengths of tails
MAX_COPIED_KEYS = 8192  # keys that one call copies; bounds its buffers

_Item = TypeVar("_Item")


@dataclass(frozen=True, kw_only=True)
class ViewPieces:
    """Consecutive pieces of one row, at slots start + piece * piece_step + key * key_step."""

    row: int
    num_pieces: int
    start: int
    piece_step: int
    key_step: int  # > 1 where a batch decoded together: its size
    bias_P11L: Tensor | None


@dataclass(frozen=True, kw_only=True)
class CopiedPieces:
    """Pieces of any rows, padded to one length."""

    rows_P: Tensor
    slots_N: Tensor  # int64 [P * L]; padding repeats the row's first slot
    bias_P11L: Tensor | None  # float32, -inf on padding


@dataclass(frozen=True, kw_only=True)
class DecodePlan:
    """The results of `views` and then of `copies` are numbered through; `order` names them row by row."""

    tokens_R: Tensor | None  # the row's token in the forward; None: row r is token r
    views: tuple[ViewPieces, ...]
    copies: tuple[CopiedPieces, ...]
    order_RM: Tensor | None  # by position; None: the results are numbered this way already
    pad_RM11: Tensor | None  # float32, -inf behind a row's last piece; None: all rows have as many


def plan_decode(slot_table: Tensor, rows: Sequence[Row], num_tokens: int, bias: KeyBias | None) -> DecodePlan:
    """Plan `rows` of one query each, out of a forward of `num_tokens` tokens."""
    requests_R = torch.tensor([row.request for row in rows])
    num_full = [row.end // CHUNK for row in rows]
    slots_RCL = slot_table[requests_R, : max(num_full) * CHUNK].long().view(len(rows), max(num_full), CHUNK)
    results: list[tuple[int, int]] = []  # (row, piece), as numbered
    views: list[ViewPieces] = []
    scattered: list[tuple[int, int]] = []
    for r, first, last, lattice in _stretches(slots_RCL, num_full):
        pieces = [(r, piece) for piece in range(first, last)]
        if lattice is None:
            scattered += pieces
            continue
        start, piece_step, key_step = lattice
        views.append(
            ViewPieces(
                row=r,
                num_pieces=last - first,
                start=start,
                piece_step=piece_step,
                key_step=key_step,
                bias_P11L=_bias_P11L(bias, slots_RCL[r, first:last]),
            )
        )
        results += pieces
    copies: list[CopiedPieces] = []
    for part in _split(scattered, MAX_COPIED_KEYS // CHUNK):
        rows_P, pieces_P = torch.tensor(part).unbind(1)
        slots_PL = slots_RCL[rows_P, pieces_P]
        copies.append(
            CopiedPieces(rows_P=rows_P, slots_N=slots_PL.flatten(), bias_P11L=_bias_P11L(bias, slots_PL))
        )
        results += part
    for padded_len, tails in _tails(rows):
        for part_rows in _split(tails, MAX_COPIED_KEYS // padded_len):
            copies.append(_copied_tails(slot_table, rows, part_rows, padded_len, bias))
            results += [(r, num_full[r]) for r in part_rows]
    order_RM, pad_RM11 = _order(results, len(rows))
    return DecodePlan(
        tokens_R=None if len(rows) == num_tokens else torch.tensor([row.first for row in rows]),
        views=tuple(views),
        copies=tuple(copies),
        order_RM=order_RM,
        pad_RM11=pad_RM11,
    )


def _stretches(
    slots_RCL: Tensor, num_full: Sequence[int]
) -> Iterator[tuple[int, int, int, tuple[int, int, int] | None]]:
    """Every row's full pieces as stretches (row, first, last, lattice): (start, piece step, key step) or None."""
    if slots_RCL.shape[1] == 0:
        return
    step_RC = slots_RCL[..., 1] - slots_RCL[..., 0]
    even_RC = (slots_RCL.diff(dim=-1) == step_RC[..., None]).all(-1) & (step_RC > 0)
    starts, steps, evens = slots_RCL[..., 0].tolist(), step_RC.tolist(), even_RC.tolist()
    for r, num_pieces in enumerate(num_full):
        start, step, even = starts[r], steps[r], evens[r]
        first = 0
        while first < num_pieces:
            last = first + 1
            if not even[first]:
                while last < num_pieces and not even[last]:
                    last += 1
                yield r, first, last, None
            else:
                jump = start[last] - start[first] if last < num_pieces else 0
                # as_strided takes no negative stride
                while (
                    last < num_pieces
                    and jump > 0
                    and even[last]
                    and step[last] == step[first]
                    and start[last] - start[last - 1] == jump
                ):
                    last += 1
                yield r, first, last, (start[first], max(jump, 0), step[first])
            first = last


def _tails(rows: Sequence[Row]) -> Iterator[tuple[int, list[int]]]:
    """Rows by the padded length of their tail."""
    by_len: dict[int, list[int]] = {}
    for r, row in enumerate(rows):
        tail_len = row.end % CHUNK
        if tail_len:
            by_len.setdefault(-(-tail_len // TAIL_STEP) * TAIL_STEP, []).append(r)
    yield from by_len.items()


def _copied_tails(
    slot_table: Tensor, rows: Sequence[Row], part: list[int], padded_len: int, bias: KeyBias | None
) -> CopiedPieces:
    ends_P1 = torch.tensor([[rows[r].end] for r in part])
    requests_P1 = torch.tensor([[rows[r].request] for r in part])
    position_PL = ends_P1 // CHUNK * CHUNK + torch.arange(padded_len)
    padding_PL = position_PL >= ends_P1
    slots_PL = slot_table[requests_P1, position_PL.masked_fill(padding_PL, 0)].long()
    bias_PL = bias.at(slots_PL) if bias is not None else None
    mask_PL = torch.zeros(slots_PL.shape) if bias_PL is None else bias_PL
    return CopiedPieces(
        rows_P=torch.tensor(part),
        slots_N=slots_PL.flatten(),
        # a mask even where nothing is padded: the kernel's sums must not depend on what shares the call
        bias_P11L=mask_PL.masked_fill(padding_PL, -torch.inf)[:, None, None],
    )


def _order(results: Sequence[tuple[int, int]], num_rows: int) -> tuple[Tensor | None, Tensor | None]:
    """`order_RM` and `pad_RM11` of results that belong to (row, piece)."""
    by_row: list[dict[int, int]] = [{} for _ in range(num_rows)]
    for number, (r, piece) in enumerate(results):
        by_row[r][piece] = number
    order = [[numbers[piece] for piece in sorted(numbers)] for numbers in by_row]
    width = max(map(len, order))
    ragged = any(len(numbers) < width for numbers in order)
    if not ragged and [n for numbers in order for n in numbers] == list(range(len(results))):
        return None, None
    # padding repeats the row's own first piece: what another row holds must not reach it, NaN included
    order_RM = torch.tensor([numbers + numbers[:1] * (width - len(numbers)) for numbers in order])
    if not ragged:
        return order_RM, None
    num_pieces_R1 = torch.tensor([[len(numbers)] for numbers in order])
    padding_RM = torch.arange(width) >= num_pieces_R1
    return order_RM, torch.zeros(order_RM.shape).masked_fill(padding_RM, -torch.inf)[:, :, None, None]


def _bias_P11L(bias: KeyBias | None, slots_PL: Tensor) -> Tensor | None:
    bias_PL = bias.at(slots_PL) if bias is not None else None
    return bias_PL[:, None, None] if bias_PL is not None else None


def _split(items: list[_Item], size: int) -> Iterator[list[_Item]]:
    for first in range(0, len(items), size):
        yield items[first : first + size]


def run_decode(
    plan: DecodePlan,
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHD: Tensor,
    out_TQD: Tensor,
    *,
    scale: float,
    workspace: Workspace,
) -> None:
    """Write the rows' attention into their tokens of `out_TQD`."""
    _, num_heads, head_dim = k_SHD.shape
    q_RQD = q_TQD if plan.tokens_R is None else q_TQD[plan.tokens_R]
    q_RHGD = q_RQD.reshape(q_RQD.shape[0], num_heads, -1, head_dim)
    outs, lses = [], []
    for view in plan.views:
        q_PHGD = q_RHGD[view.row].expand(view.num_pieces, -1, -1, -1)
        k_PHLD, v_PHLD = _lattice(k_SHD, view), _lattice(v_SHD, view)
        out_PHGD, lse_PHG = flash(q_PHGD, k_PHLD, v_PHLD, attn_mask=view.bias_P11L, scale=scale)
        outs.append(out_PHGD)
        lses.append(lse_PHG)
    for copy in plan.copies:
        k_PHLD, v_PHLD = _gather(k_SHD, copy, "keys", workspace), _gather(v_SHD, copy, "values", workspace)
        out_PHGD, lse_PHG = flash(q_RHGD[copy.rows_P], k_PHLD, v_PHLD, attn_mask=copy.bias_P11L, scale=scale)
        outs.append(out_PHGD)
        lses.append(lse_PHG)
    out_PHGD, lse_PHG = (outs[0], lses[0]) if len(outs) == 1 else (torch.cat(outs), torch.cat(lses))
    merged_RHGD = _merge(plan, out_PHGD, lse_PHG, q_RHGD.shape[0])
    if plan.tokens_R is None:
        out_TQD.view(q_RHGD.shape).copy_(merged_RHGD)
    else:
        out_TQD[plan.tokens_R] = merged_RHGD.reshape(q_RQD.shape).to(out_TQD.dtype)


def _merge(plan: DecodePlan, out_PHGD: Tensor, lse_PHG: Tensor, num_rows: int) -> Tensor:
    """[R, H, G, D]: each row's pieces weighted by exp(lse), in position order."""
    if plan.order_RM is None:
        out_RMHGD = out_PHGD.unflatten(0, (num_rows, -1))
        lse_RMHG = lse_PHG.unflatten(0, (num_rows, -1))
    else:
        out_RMHGD, lse_RMHG = out_PHGD[plan.order_RM], lse_PHG[plan.order_RM]
    if out_RMHGD.shape[1] == 1:
        return out_RMHGD[:, 0]
    if plan.pad_RM11 is not None:
        lse_RMHG = lse_RMHG + plan.pad_RM11
    return (out_RMHGD * lse_RMHG.softmax(1)[..., None]).sum(1)


def _lattice(pool_SHD: Tensor, view: ViewPieces) -> Tensor:
    """[P, H, L, D] of the pool, in place."""
    slot, head, channel = pool_SHD.stride()
    _, num_heads, head_dim = pool_SHD.shape
    return pool_SHD.as_strided(
        (view.num_pieces, num_heads, CHUNK, head_dim),
        (view.piece_step * slot, head, view.key_step * slot, channel),
        pool_SHD.storage_offset() + view.start * slot,
    )


def _gather(pool_SHD: Tensor, copy: CopiedPieces, name: str, workspace: Workspace) -> Tensor:
    """[P, H, L, D], copied; index_select moves whole slots, where advanced indexing moves channels."""
    num_heads, head_dim = pool_SHD.shape[1:]
    copied = workspace.take(name, (copy.slots_N.numel(), num_heads, head_dim), pool_SHD.dtype)
    torch.index_select(pool_SHD, 0, copy.slots_N, out=copied)
    return copied.view(copy.rows_P.numel(), -1, num_heads, head_dim).transpose(1, 2)
