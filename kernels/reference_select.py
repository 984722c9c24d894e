"""Selection in plain PyTorch: scan → pool → rerank → top-k, and the keys that are only scored.

Dims as in reference.py, and: X lists per row (1 per layer or one per KV head), W score width, M pool size,
      K selected positions, C label channels

Score. p_qj = softmax_j(scale * q_q . k_j + bias_j) over the keys of the row, summed over the query heads of a
       list: the G heads of a KV head, or all Q heads. Normalising before the sum keeps one loud head from
       choosing for the others.
Ties.  Positions are ordered by (score, then lower position), so the same scores select the same set on every
       device and rank. A selected list ascends; what lies beyond its count is -1.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from .reference import gather_slots, key_bias, math_dtype, row_slots

Heads = Literal["layer", "kv_head"]


class Int4Keys(NamedTuple):
    """A key copy of 4 bits a channel, for scoring only: k ~= code * step + low.

    Byte i of a key holds channel i in its low half and channel i + D / 2 in its high half, so that a kernel
    gets two contiguous halves without a shuffle.
    """

    codes: Tensor  # uint8 [S, H, D / 2]
    ranges: Tensor  # float16 [S, H, 4]: step and low of the low half, step and low of the high half

    @property
    def bytes_per_key(self) -> int:
        """Bytes per token and KV head: 72 for D = 128, where bf16 keys take 256."""
        return self.codes.shape[-1] + 8

    @classmethod
    def empty(cls, num_slots: int, num_heads: int, head_dim: int, device: torch.device | str) -> Int4Keys:
        """Raises ValueError for an odd head dim."""
        if head_dim % 2:
            raise ValueError(f"head dim {head_dim} is odd; an int4 key copy packs two channels in a byte")
        codes = torch.zeros((num_slots, num_heads, head_dim // 2), dtype=torch.uint8, device=device)
        return cls(codes, torch.zeros((num_slots, num_heads, 4), dtype=torch.float16, device=device))


Keys = Tensor | Int4Keys


def quantise_int4(k_THD: Tensor) -> Int4Keys:
    """Quantises each half of the channels: step = (max - low) / 15, code = floor((k - low) / step + 0.5).

    Step and low are rounded to float16 first and the codes are chosen for the rounded values.
    """
    halves = k_THD.float().unflatten(-1, (2, -1))
    low = halves.amin(-1).half()
    step = ((halves.amax(-1) - low.float()) / 15).half()
    divisor = step.float().masked_fill(step == 0, 1.0)
    code = ((halves - low.float()[..., None]) / divisor[..., None] + 0.5).floor().clamp(0, 15).to(torch.uint8)
    return Int4Keys(code[..., 0, :] | (code[..., 1, :] << 4), torch.stack((step, low), -1).flatten(-2))


def dequantise_int4(keys: Int4Keys) -> Tensor:
    """float32 keys [T, H, D]."""
    code = torch.stack((keys.codes & 15, keys.codes >> 4), -2).float()
    step, low = keys.ranges.float().unflatten(-1, (2, 2)).unbind(-1)
    return (code * step[..., None] + low[..., None]).flatten(-2)


def write_int4(keys: Int4Keys, slots_T: Tensor, k_THD: Tensor) -> None:
    """Writes the int4 copy of `k_THD` into the slots, in place."""
    fresh = quantise_int4(k_THD)
    keys.codes[slots_T.long()] = fresh.codes
    keys.ranges[slots_T.long()] = fresh.ranges


def gather_keys(keys: Keys, slots_J: Tensor) -> Tensor:
    """Keys [J, H, D] of the slots, dequantised if they are int4."""
    if isinstance(keys, Tensor):
        return gather_slots(keys, slots_J)
    return dequantise_int4(Int4Keys(keys.codes[slots_J], keys.ranges[slots_J]))


def pooled_scores(
    q_RQD: Tensor,
    keys: Keys,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    scale: float,
    heads: Heads = "layer",
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
    pool_RXM: Tensor | None = None,
    pool_lens_R: Tensor | None = None,
    width: int | None = None,
) -> Tensor:
    """Scores [R, X, W] of the keys of each row, -inf beyond its length; W is `width` or the longest row.

    With `pool_RXM` only its positions are scored and normalised: column j is position pool[r, x, j]. A pool of one
    list serves every list.
    """
    rows = list(row_slots(kv_indices, kv_indptr_R1, page_size=page_size, kv_lens_R=kv_lens_R))
    num_heads = num_kv_heads(keys)
    num_lists = 1 if heads == "layer" else num_heads
    if pool_RXM is not None:
        pool_RXM = pool_RXM.expand(-1, num_lists, -1)
    lens = [slots_J.numel() for slots_J in rows] if pool_lens_R is None else pool_lens_R.tolist()
    shape = (len(rows), num_lists, max(lens, default=0) if width is None else width)
    scores = torch.full(shape, -torch.inf, dtype=math_dtype(q_RQD), device=q_RQD.device)
    for r, slots_J in enumerate(rows):
        for x in range(num_lists):
            listed_J = slots_J if pool_RXM is None else slots_J[pool_RXM[r, x, : lens[r]].long()]
            if listed_J.numel() == 0:
                continue
            heads_of_list = slice(None) if num_lists == 1 else slice(x, x + 1)
            k_JHD = gather_keys(keys, listed_J)[:, heads_of_list].to(scores.dtype)
            q_HGD = q_RQD[r].to(scores.dtype).unflatten(0, (num_heads, -1))[heads_of_list]
            logits_HGJ = torch.einsum("hgd,jhd->hgj", q_HGD, k_JHD) * scale
            bias_J = key_bias(tags_S, listed_J, alpha, beta)
            if bias_J is not None:
                logits_HGJ = logits_HGJ + bias_J.to(scores.dtype)
            scores[r, x, : listed_J.numel()] = logits_HGJ.softmax(-1).sum((0, 1))
    return scores


def top_k(
    scores_RXW: Tensor,
    lens_R: Tensor,
    k: int,
    *,
    positions_RXW: Tensor | None = None,
    num_sinks: int = 0,
    window: int = 0,
    row_lens_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The min(k, len) best positions of each list, ascending: int32 [R, X, K] padded by -1, counts int32 [R].

    Column j stands for position j, or positions_RXW[r, x, j] of an ascending candidate list in a row of
    row_lens_R[r] positions. The first `num_sinks` and the last `window` positions of the row are chosen
    before all others: united with the selection, counted once, and the budget is always used up.
    """
    num_rows, num_lists, _ = scores_RXW.shape
    chosen = torch.full((num_rows, num_lists, k), -1, dtype=torch.int32, device=scores_RXW.device)
    row_lens = (lens_R if row_lens_R is None else row_lens_R).tolist()
    for r, (length, row_len) in enumerate(zip(lens_R.tolist(), row_lens, strict=True)):
        for x in range(num_lists):
            column = torch.arange(length, device=scores_RXW.device)
            position = column if positions_RXW is None else positions_RXW[r, x, :length].long()
            forced = (position < num_sinks) | (position >= row_len - window)
            score = scores_RXW[r, x, :length].masked_fill(forced, torch.inf)
            # a stable sort by descending score leaves equal scores in ascending position
            best = position[score.argsort(descending=True, stable=True)[:k]]
            chosen[r, x, : best.numel()] = best.sort().values.int()
    return chosen, lens_R.clamp(max=k).int()


def above(
    scores_RXW: Tensor,
    lens_R: Tensor,
    least: float,
    cap: int,
    *,
    positions_RXW: Tensor | None = None,
    num_sinks: int = 0,
    window: int = 0,
    row_lens_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `top_k` chooses of at most `cap` positions, less those whose score does not exceed `least`.

    The first `num_sinks` and the last `window` positions of the row stay whatever their score. Returns positions
    int32 [R, X, cap], ascending and padded by -1, and counts int32 [R, X]: lists of a row differ in length.
    """
    words = {"num_sinks": num_sinks, "window": window, "row_lens_R": row_lens_R}
    best_RXK, _ = top_k(scores_RXW, lens_R, cap, positions_RXW=positions_RXW, **words)  # type: ignore[arg-type]
    kept_RXK = torch.full_like(best_RXK, -1)
    counts_RX = torch.zeros(best_RXK.shape[:2], dtype=torch.int32, device=best_RXK.device)
    row_lens = (lens_R if row_lens_R is None else row_lens_R).tolist()
    for r, (length, row_len) in enumerate(zip(lens_R.tolist(), row_lens, strict=True)):
        for x in range(best_RXK.shape[1]):
            best = best_RXK[r, x, : min(cap, length)].long()
            column = (
                best
                if positions_RXW is None
                else torch.searchsorted(positions_RXW[r, x, :length].long(), best)
            )
            forced = (best < num_sinks) | (best >= row_len - window)
            kept = best[forced | (scores_RXW[r, x, column] > least)]
            kept_RXK[r, x, : kept.numel()] = kept.int()
            counts_RX[r, x] = kept.numel()
    return kept_RXK, counts_RX


def scan(
    q_RQD: Tensor,
    keys: Keys,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    size: int,
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
    """Scores the whole history and keeps the best `size` positions: the pool of a Full layer, or its indices.

    Returns positions int32 [R, X, size] and counts int32 [R], see `top_k`.
    """
    lens_R = row_lens(kv_indptr_R1, kv_lens_R)
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
        kv_lens_R=kv_lens_R,
    )
    return top_k(scores, lens_R, size, num_sinks=num_sinks, window=window)


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
    """Scores the pool of an earlier layer with this layer's queries and keeps the best `k` positions.

    `pool_RXM` int32 positions ascending, of which pool_lens_R[r] are valid. Returns as `scan`.
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
        kv_lens_R=kv_lens_R,
        pool_RXM=pool_RXM,
        pool_lens_R=pool_lens_R,
    )
    return top_k(
        scores,
        pool_lens_R,
        k,
        positions_RXW=pool_RXM.expand(-1, scores.shape[1], -1),
        num_sinks=num_sinks,
        window=window,
        row_lens_R=row_lens(kv_indptr_R1, kv_lens_R),
    )


def to_slots(
    positions_RXK: Tensor, kv_indices: Tensor, kv_indptr_R1: Tensor, *, page_size: int = 1
) -> Tensor:
    """Slots int64 [R, X, K] of selected positions, once per layer group; padding (-1) becomes slot 0."""
    entry = kv_indptr_R1[:-1, None, None].long() + positions_RXK.clamp(min=0).long() // page_size
    # an empty row may stand at the end of the entries
    page = kv_indices[entry.clamp(max=max(kv_indices.numel() - 1, 0))].long()
    slots = page * page_size + positions_RXK.clamp(min=0).long() % page_size
    return slots.masked_fill(positions_RXK < 0, 0)


def row_lens(kv_indptr_R1: Tensor, kv_lens_R: Tensor | None) -> Tensor:
    """Keys of each row."""
    return kv_indptr_R1.diff() if kv_lens_R is None else kv_lens_R


def num_kv_heads(keys: Keys) -> int:
    return keys.shape[-2] if isinstance(keys, Tensor) else keys.codes.shape[-2]


def label_channels(q_TQD: Tensor, k_THD: Tensor, num_channels: int) -> Tensor:
    """The channels [H, C] of each KV head by largest mean |q_d| * mean |k_d|, ascending (Double Sparsity)."""
    num_heads = k_THD.shape[1]
    weight_HD = k_THD.float().abs().mean(0) * q_TQD.float().abs().unflatten(1, (num_heads, -1)).mean((0, 2))
    return weight_HD.sort(dim=-1, descending=True, stable=True).indices[:, :num_channels].sort(-1).values


def label_keys(k_THD: Tensor, channels_HC: Tensor) -> Tensor:
    """Keys [T, H, C] that `pooled_scores` takes with `label_queries`, at the scale of the full head."""
    return k_THD.gather(-1, channels_HC.expand(k_THD.shape[0], -1, -1))


def label_queries(q_RQD: Tensor, channels_HC: Tensor) -> Tensor:
    """Queries [R, Q, C] on the channels of their KV head."""
    per_query = channels_HC.repeat_interleave(q_RQD.shape[1] // channels_HC.shape[0], 0)
    return q_RQD.gather(-1, per_query.expand(q_RQD.shape[0], -1, -1))


class PageBounds(NamedTuple):
    """Channel-wise range of the keys of each page (Quest)."""

    low: Tensor  # [N, H, D]
    high: Tensor  # [N, H, D]


def page_bounds(k_NPHD: Tensor) -> PageBounds:
    return PageBounds(k_NPHD.amin(1), k_NPHD.amax(1))


def page_scores(
    q_RQD: Tensor,
    bounds: PageBounds,
    page_indices: Tensor,
    page_indptr_R1: Tensor,
    *,
    scale: float,
    heads: Heads = "layer",
) -> Tensor:
    """Scores [R, X, W] of pages, pooled as keys are, from the bound sum_d max(q_d low_d, q_d high_d)."""
    num_heads = bounds.low.shape[-2]
    rows = list(row_slots(page_indices, page_indptr_R1))
    num_lists = 1 if heads == "layer" else num_heads
    shape = (len(rows), num_lists, max((pages.numel() for pages in rows), default=0))
    scores = torch.full(shape, -torch.inf, dtype=math_dtype(q_RQD), device=q_RQD.device)
    for r, pages in enumerate(rows):
        q_HG1D = q_RQD[r].to(scores.dtype).unflatten(0, (num_heads, -1))[:, :, None]
        low, high = (x[pages].to(scores.dtype).transpose(0, 1)[:, None] for x in bounds)
        mass_HGJ = (torch.maximum(q_HG1D * low, q_HG1D * high).sum(-1) * scale).softmax(-1)
        scores[r, :, : pages.numel()] = mass_HGJ.sum((0, 1)) if num_lists == 1 else mass_HGJ.sum(1)
    return scores
