"""Block reuse in plain PyTorch: the law that every faster kernel must equal.

Dims: S pool slots, N pages, P page size, H KV heads, G query heads per KV head, Q = H * G query heads,
      D key head dim, E value head dim, T tokens, R rows, I index entries, J keys of one row, F rotary_dim / 2

Pools. A pool is [S, H, D], or a [N, P, H, D] view of any strides; slot s is page s // P, offset s % P.
       A [N, H, P, D] storage takes part as its `.permute(0, 2, 1, 3)` view.
Rows.  Row r reads the index entries kv_indices[kv_indptr[r] : kv_indptr[r + 1]]. An entry is a page, so key j
       stands in slot kv_indices[kv_indptr[r] + j // page_size] * page_size + j % page_size; with page_size 1
       entries are slots. kv_lens_R gives the number of keys where the entries do not: page_size > 1, or
       fixed-width lists that are filled in part.
Tags.  One uint8 per slot: bit 0 local, bit 1 false sink (the source's S', which leaves out the true sinks, the first s
       tokens of the sequence). The logit of query i and key j is
       s_ij = scale * q_i . k_j + alpha * [local_j] + beta * [false sink_j].
Sums run in float64 for float64 operands and in float32 for every other dtype; log-sum-exps are natural.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

TAG_LOCAL = 1  # bit 0: the slot's KV differs from what a full prefill would have written
TAG_FALSE_SINK = 2  # bit 1: a leading token of a block that is not the first, and no true sink
NUM_TAG_CLASSES = 4

# Integer types that carry the bits of a storage type: a copy keeps every bit, NaN payloads and -0 included.
_BITS_OF_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def delta_cos_sin(inv_freq_F: Tensor, delta_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of delta * inv_freq, exact to float64, as two float32 [T, F] tables.

    `delta_T` is new position - home position; the inverse frequencies are the model's own, after scaling
    (linear, llama3, yarn), because a rotation by a difference needs nothing but the frequencies.
    """
    angle_TF = delta_T.to(torch.float64)[:, None] * inv_freq_F.to(torch.float64)[None, :]
    return angle_TF.cos().float(), angle_TF.sin().float()


def cached_cos_sin(cos_sin_cache: Tensor, old_T: Tensor, new_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation from position old to new, from a table [max_position, 2F] of cos | sin.

    With m^2 = co^2 + so^2: cos = (cn co + sn so) / m^2, sin = (sn co - cn so) / m^2. Dividing by m^2 takes
    out the magnitude that yarn puts into the table, so keys keep theirs. Returns float32 [T, F] tables.
    """
    half = cos_sin_cache.shape[-1] // 2
    old_T2F = cos_sin_cache[old_T].to(torch.float64)
    new_T2F = cos_sin_cache[new_T].to(torch.float64)
    co, so = old_T2F[:, :half], old_T2F[:, half:]
    cn, sn = new_T2F[:, :half], new_T2F[:, half:]
    square = co * co + so * so
    return ((cn * co + sn * so) / square).float(), ((sn * co - cn * so) / square).float()


def rotate_keys(k_THD: Tensor, cos_TF: Tensor, sin_TF: Tensor, *, is_neox: bool = True) -> Tensor:
    """Rotates the first 2F channels of every key; the rest passes through. A rotation by zero moves the bits.

    Pairs are (i, i + F) in the neox layout and (2i, 2i + 1) in the gptj layout:
    x' = x cos - y sin, y' = y cos + x sin. `cos_TF`, `sin_TF` may have one row, which serves every token.
    """
    half = cos_TF.shape[-1]
    if 2 * half > k_THD.shape[-1]:
        raise ValueError(
            f"rotary dim {2 * half} exceeds the head dim {k_THD.shape[-1]}; pass F = rotary_dim / 2"
        )
    wide = math_dtype(k_THD)
    cos, sin = cos_TF[:, None].to(wide), sin_TF[:, None].to(wide)
    first = slice(0, half) if is_neox else slice(0, 2 * half, 2)
    second = slice(half, 2 * half) if is_neox else slice(1, 2 * half, 2)
    x, y = k_THD[..., first].to(wide), k_THD[..., second].to(wide)
    out = k_THD.clone()
    still = (sin == 0) & (cos == 1)
    out_bits, k_bits = _bits(out), _bits(k_THD)
    for part, rotated in ((first, x * cos - y * sin), (second, y * cos + x * sin)):
        moved = _bits(rotated.to(k_THD.dtype))
        out_bits[..., part] = torch.where(still, k_bits[..., part], moved)
    return out


def rotate_copy(
    k_pools: Tensor | Sequence[Tensor],
    v_pools: Tensor | Sequence[Tensor],
    src_slots_T: Tensor,
    dst_slots_T: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    is_neox: bool = True,
) -> None:
    """Copies K and V from source to destination slots of every layer and rotates the copied K by delta.

    `k_pools`, `v_pools`: one pool or one per layer, written in place. `src_slots_T`, `dst_slots_T`: int32 or
    int64 token slots. `cos_TF`, `sin_TF`: float32 [T, F], or [1, F] for one delta, see `delta_cos_sin`;
    layers with other frequencies take a call of their own. V and a key with delta 0 keep every bit.
    Raises ValueError when shapes disagree, a destination repeats, or a source is also a destination.
    """
    k_layers, v_layers = _layers(k_pools), _layers(v_pools)
    check_rotate_copy(k_layers, v_layers, src_slots_T, dst_slots_T, cos_TF, sin_TF)
    check_disjoint(src_slots_T, dst_slots_T)
    if src_slots_T.numel() == 0:
        return
    for k_pool, v_pool in zip(k_layers, v_layers, strict=True):
        k_THD = gather_slots(k_pool, src_slots_T)
        _scatter_slots(k_pool, dst_slots_T, rotate_keys(k_THD, cos_TF, sin_TF, is_neox=is_neox))
        _scatter_slots(v_pool, dst_slots_T, gather_slots(v_pool, src_slots_T))


def check_rotate_copy(
    k_layers: Sequence[Tensor],
    v_layers: Sequence[Tensor],
    src_slots_T: Tensor,
    dst_slots_T: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
) -> None:
    """Raises ValueError for operands of `rotate_copy` whose shapes disagree; reads no tensor data."""
    if not all(pool.is_floating_point() for pool in k_layers):
        raise ValueError("a key pool holds integers; pass a float8 pool as a view of its float8 type")
    if len(k_layers) != len(v_layers):
        raise ValueError(
            f"{len(k_layers)} key pools but {len(v_layers)} value pools; pass one of each per layer"
        )
    if src_slots_T.shape != dst_slots_T.shape or src_slots_T.dim() != 1:
        raise ValueError(
            f"src_slots {tuple(src_slots_T.shape)} and dst_slots {tuple(dst_slots_T.shape)} must be equal [T]"
        )
    if cos_TF.shape != sin_TF.shape or cos_TF.dim() != 2 or cos_TF.shape[0] not in (1, src_slots_T.shape[0]):
        raise ValueError(
            f"cos {tuple(cos_TF.shape)} and sin {tuple(sin_TF.shape)} must be [T, F] or [1, F] "
            f"for T = {src_slots_T.shape[0]} slots"
        )


def check_disjoint(src_slots_T: Tensor, dst_slots_T: Tensor) -> None:
    """Raises ValueError if a slot is both source and destination, or destination twice. Synchronises."""
    if dst_slots_T.unique().numel() != dst_slots_T.numel():
        raise ValueError("dst_slots repeats a slot; each destination must be written once")
    both = torch.isin(src_slots_T, dst_slots_T)
    if bool(both.any()):
        raise ValueError(
            f"slots {src_slots_T[both][:8].tolist()} are both source and destination; "
            "copy from home slots into the request's own slots"
        )


def extend_attention(
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    qo_indptr_R1: Tensor,
    *,
    scale: float,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of ragged virtual rows; returns out [T, Q, E] in q's dtype and lse [T, Q].

    Row r holds the queries qo_indptr[r] : qo_indptr[r + 1], which stand at the *last* positions of its keys:
    query i of m sees the keys 0 ... n - m + i. A run [a, b) is the row of keys 0 ... b - 1 and b - a queries.
    Raises ValueError if a row has more queries than keys.
    """
    rows = _rows(q_TQD, k_SHD, v_SHE, kv_indices, kv_indptr_R1, page_size, kv_lens_R)
    out, lse = _empty_state(q_TQD, v_SHE)
    bounds = qo_indptr_R1.tolist()
    for r, slots_J in enumerate(rows):
        first, last = bounds[r], bounds[r + 1]
        num_queries, num_keys = last - first, slots_J.numel()
        if num_queries > num_keys:
            raise ValueError(
                f"row {r} has {num_queries} queries for {num_keys} keys; queries are its last positions"
            )
        if num_queries == 0:
            continue
        position = torch.arange(num_keys - num_queries, num_keys, device=q_TQD.device)
        hidden = torch.arange(num_keys, device=q_TQD.device)[None, :] > position[:, None]
        state = _attend(
            q_TQD[first:last], k_SHD, v_SHE, slots_J, hidden, scale, key_bias(tags_S, slots_J, alpha, beta)
        )
        out[first:last], lse[first:last] = state
    return out.to(q_TQD.dtype), lse


def decode_attention(
    q_RQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    *,
    scale: float,
    tags_S: Tensor | None = None,
    alpha: float = 0.0,
    beta: float = 0.0,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of one query per row over its keys; returns out [R, Q, E] in q's dtype and lse [R, Q].

    The index list is the whole history (dense) or any selection of it (sparse). `kv_indices` may be [H, I]:
    one list of equal length per KV head. A row without keys gives out 0 and lse -inf.
    """
    out, lse = _empty_state(q_RQD, v_SHE)
    num_heads = k_SHD.shape[-2]
    group = q_RQD.shape[1] // num_heads
    per_head = kv_indices.dim() == 2
    for h in range(num_heads if per_head else 1):
        queries = slice(h * group, (h + 1) * group) if per_head else slice(None)
        heads = slice(h, h + 1) if per_head else slice(None)
        k, v = k_SHD[..., heads, :], v_SHE[..., heads, :]
        rows = _rows(
            q_RQD[:, queries],
            k,
            v,
            kv_indices[h] if per_head else kv_indices,
            kv_indptr_R1,
            page_size,
            kv_lens_R,
        )
        for r, slots_J in enumerate(rows):
            if slots_J.numel() == 0:
                continue
            bias_J = key_bias(tags_S, slots_J, alpha, beta)
            state = _attend(q_RQD[r : r + 1, queries], k, v, slots_J, None, scale, bias_J)
            out[r : r + 1, queries], lse[r : r + 1, queries] = state
    return out.to(q_RQD.dtype), lse


def _attend(
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    slots_J: Tensor,
    hidden_TJ: Tensor | None,
    scale: float,
    bias_J: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Attention of T queries over the keys in `slots_J`; query head q reads KV head q // G."""
    wide = math_dtype(q_TQD)
    num_tokens, num_q_heads, _ = q_TQD.shape
    k_JHD = gather_slots(k_SHD, slots_J).to(wide)
    v_JHE = gather_slots(v_SHE, slots_J).to(wide)
    num_heads = k_JHD.shape[1]
    q_THGD = q_TQD.to(wide).unflatten(1, (num_heads, num_q_heads // num_heads))
    logits_HGTJ = torch.einsum("thgd,jhd->hgtj", q_THGD, k_JHD) * scale
    if bias_J is not None:
        logits_HGTJ = logits_HGTJ + bias_J.to(wide)
    if hidden_TJ is not None:
        logits_HGTJ = logits_HGTJ.masked_fill(hidden_TJ, -torch.inf)
    lse_HGT = logits_HGTJ.logsumexp(-1)
    # a bias of -inf may hide every key of a row
    base_HGT = lse_HGT.masked_fill(lse_HGT.isneginf(), 0.0)
    out_THGE = torch.einsum("hgtj,jhe->thge", (logits_HGTJ - base_HGT[..., None]).exp(), v_JHE)
    return out_THGE.flatten(1, 2), lse_HGT.permute(2, 0, 1).reshape(num_tokens, num_q_heads)


def merge_states(outs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over a union of disjoint key sets from the attention over each: outs [T, Q, E], lses [T, Q].

    lse = log sum_c exp(lse_c), out = sum_c exp(lse_c - lse) out_c. A set without keys has lse -inf and its
    out is not read into the sum; if no set has keys, out is 0 and lse -inf.
    """
    lse_CTQ = torch.stack(tuple(lses))
    lse_TQ = lse_CTQ.logsumexp(0)
    weight_CTQ = (lse_CTQ - lse_TQ.masked_fill(lse_TQ.isneginf(), 0.0)).exp()
    total = torch.zeros_like(outs[0], dtype=lse_TQ.dtype)
    for out_TQE, weight_TQ in zip(outs, weight_CTQ, strict=True):
        share = out_TQE.to(lse_TQ.dtype) * weight_TQ[..., None]
        total += torch.where(weight_TQ[..., None] > 0, share, torch.zeros_like(share))
    return total.to(outs[0].dtype), lse_TQ


class ClassList(NamedTuple):
    """The keys of one tag class, row by row, in the order of the row."""

    tag: int  # 0 ... 3, the value of both bits
    slots_I: Tensor  # token slots, int64
    positions_I: Tensor  # index of the key in its row, int64
    indptr_R1: Tensor  # int64


def split_by_class(
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    tags_S: Tensor,
    *,
    page_size: int = 1,
    kv_lens_R: Tensor | None = None,
) -> list[ClassList]:
    """Splits each row's keys by tag; only classes with keys are returned, in ascending order of the tag.

    The bias is constant in a class, so the biased softmax over a row equals `merge_states` of the plain
    attention over each class with its lse shifted by `class_bias(tag)`.
    """
    rows = list(row_slots(kv_indices, kv_indptr_R1, page_size=page_size, kv_lens_R=kv_lens_R))
    classes = []
    for tag in range(NUM_TAG_CLASSES):
        kept = [((tags_S[slots_J] & (NUM_TAG_CLASSES - 1)) == tag).nonzero()[:, 0] for slots_J in rows]
        lens = torch.tensor([0, *(at.numel() for at in kept)], device=tags_S.device)
        if int(lens.sum()) == 0:
            continue
        slots = torch.cat([slots_J[at] for slots_J, at in zip(rows, kept, strict=True)])
        classes.append(ClassList(tag, slots, torch.cat(kept), lens.cumsum(0)))
    return classes


def class_bias(tag: int, alpha: float, beta: float) -> float:
    """The additive logit term of every key with this tag; -inf hides the class."""
    return (alpha if tag & TAG_LOCAL else 0.0) + (beta if tag & TAG_FALSE_SINK else 0.0)


def gather_slots(pool: Tensor, slots_T: Tensor) -> Tensor:
    """Rows [T, H, D] of a pool [S, H, D] or [N, P, H, D], bit by bit."""
    bits = _bits(pool)
    slots_T = slots_T.long()
    picked = (
        bits.index_select(0, slots_T)
        if pool.dim() == 3
        else bits[slots_T // pool.shape[1], slots_T % pool.shape[1]]
    )
    return picked.view(pool.dtype)


def _scatter_slots(pool: Tensor, slots_T: Tensor, rows_THD: Tensor) -> None:
    bits, slots_T = _bits(pool), slots_T.long()
    if pool.dim() == 3:
        bits.index_copy_(0, slots_T, _bits(rows_THD))
    else:
        bits[slots_T // pool.shape[1], slots_T % pool.shape[1]] = _bits(rows_THD)


def row_slots(
    kv_indices: Tensor, kv_indptr_R1: Tensor, *, page_size: int = 1, kv_lens_R: Tensor | None = None
) -> Iterator[Tensor]:
    """Yields the int64 slots of each row's keys. Raises ValueError if a row has more keys than entries."""
    bounds = kv_indptr_R1.tolist()
    for r, num_keys in enumerate(check_rows(kv_indptr_R1, page_size=page_size, kv_lens_R=kv_lens_R)):
        num_entries = -(-num_keys // page_size)
        entries = kv_indices[bounds[r] : bounds[r] + num_entries].long()
        if page_size == 1:
            yield entries
            continue
        key = torch.arange(num_keys, device=kv_indices.device)
        yield entries[key // page_size] * page_size + key % page_size


def check_rows(kv_indptr_R1: Tensor, *, page_size: int, kv_lens_R: Tensor | None) -> list[int]:
    """The number of keys of each row. Raises ValueError if a row has more keys than entries. Synchronises."""
    if page_size > 1 and kv_lens_R is None:
        raise ValueError(
            f"page_size {page_size} needs kv_lens_R: entries are pages and do not tell the last page's length"
        )
    entries: list[int] = kv_indptr_R1.diff().tolist()
    lens: list[int] = entries if kv_lens_R is None else kv_lens_R.tolist()
    for r, (num_keys, available) in enumerate(zip(lens, entries, strict=True)):
        if (needed := -(-num_keys // page_size)) > available:
            raise ValueError(f"row {r} has {available} entries, but {num_keys} keys need {needed}")
    return lens


def _rows(
    q_TQD: Tensor,
    k_SHD: Tensor,
    v_SHE: Tensor,
    kv_indices: Tensor,
    kv_indptr_R1: Tensor,
    page_size: int,
    kv_lens_R: Tensor | None,
) -> Iterator[Tensor]:
    check_attention(q_TQD, k_SHD, v_SHE, page_size)
    return row_slots(kv_indices, kv_indptr_R1, page_size=page_size, kv_lens_R=kv_lens_R)


def check_attention(q_TQD: Tensor, k_SHD: Tensor, v_SHE: Tensor, page_size: int) -> None:
    """Raises ValueError for attention operands whose shapes disagree; reads no tensor data."""
    if q_TQD.dim() != 3 or q_TQD.shape[-1] != k_SHD.shape[-1] or q_TQD.shape[1] % k_SHD.shape[-2]:
        raise ValueError(
            f"q {tuple(q_TQD.shape)} does not fit keys {tuple(k_SHD.shape)}: "
            "q is [T, H * G, D] for keys [..., H, D]"
        )
    if k_SHD.shape[:-1] != v_SHE.shape[:-1]:
        raise ValueError(
            f"keys {tuple(k_SHD.shape)} and values {tuple(v_SHE.shape)} differ before the head dim"
        )
    if k_SHD.dim() == 4 and k_SHD.shape[1] != page_size:
        raise ValueError(
            f"pool {tuple(k_SHD.shape)} has pages of {k_SHD.shape[1]} but page_size is {page_size}"
        )


def _empty_state(q_TQD: Tensor, v_SHE: Tensor) -> tuple[Tensor, Tensor]:
    shape, wide = (*q_TQD.shape[:2], v_SHE.shape[-1]), math_dtype(q_TQD)
    out = torch.zeros(shape, dtype=wide, device=q_TQD.device)
    return out, torch.full(shape[:2], -torch.inf, dtype=wide, device=q_TQD.device)


def key_bias(tags_S: Tensor | None, slots_J: Tensor, alpha: float, beta: float) -> Tensor | None:
    """float64 [J] additive logit terms of the keys, or None where there are no tags."""
    if tags_S is None:
        return None
    biases = [class_bias(tag, alpha, beta) for tag in range(NUM_TAG_CLASSES)]
    table = torch.tensor(biases, dtype=torch.float64, device=tags_S.device)
    return table[(tags_S[slots_J] & (NUM_TAG_CLASSES - 1)).long()]


def _layers(pools: Tensor | Sequence[Tensor]) -> Sequence[Tensor]:
    return [pools] if isinstance(pools, Tensor) else pools


def math_dtype(x: Tensor) -> torch.dtype:
    """The type sums run in: float64 for float64, else float32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _bits(x: Tensor) -> Tensor:
    return x.view(_BITS_OF_SIZE[x.element_size()])
