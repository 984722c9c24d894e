"""`rotate_copy` and `cached_cos_sin` on the CPU: one compiled pass each, bit-equal to the reference.

The reference makes a dozen passes over the copied keys; here every key is read once, rotated in registers and
written once, so the copy runs at the speed of memory. Numba, which SGLang installs, needs no C compiler on the user's
machine.

Dims: S pool slots, H KV heads, D head dim, T tokens, F rotary_dim / 2, P positions
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from . import reference
from .cpu_cache import compiled
from .cpu_numba import STORAGE, as_array, bit_casts, loader


def covers(pool: Tensor) -> bool:
    """Whether a pool can be served here; the reference serves the rest."""
    return pool.device.type == "cpu" and pool.dtype in STORAGE and pool.dim() == 3


def covers_table(cos_sin_cache: Tensor) -> bool:
    """The same for a table of angles."""
    return cos_sin_cache.device.type == "cpu" and cos_sin_cache.dtype == torch.float32


def rotate_copy(
    k_pools: Sequence[Tensor],
    v_pools: Sequence[Tensor],
    src_slots_T: Tensor,
    dst_slots_T: Tensor,
    cos_TF: Tensor,
    sin_TF: Tensor,
    *,
    is_neox: bool = True,
) -> None:
    """Twin of `reference.rotate_copy`, same operands, same bits, same errors.

    Pools are bfloat16 or float32 [S, H, D] of any strides over slots; `cos_TF`, `sin_TF` are float32
    [T, F] or [1, F].
    """
    reference.check_rotate_copy(k_pools, v_pools, src_slots_T, dst_slots_T, cos_TF, sin_TF)
    num_tokens = src_slots_T.numel()
    if num_tokens == 0:
        return
    source, target = src_slots_T.long().numpy(), dst_slots_T.long().numpy()
    if not _are_disjoint(source, target, k_pools[0].shape[0]):
        reference.check_disjoint(src_slots_T, dst_slots_T)  # says which
    cos = np.ascontiguousarray(cos_TF.expand(num_tokens, -1).numpy())
    sin = np.ascontiguousarray(sin_TF.expand(num_tokens, -1).numpy())
    for k_pool, v_pool in zip(k_pools, v_pools, strict=True):
        kernel = _compiled(k_pool.dtype, is_neox)
        kernel(as_array(k_pool), as_array(v_pool), source, target, cos, sin)


def cached_cos_sin(cos_sin_cache: Tensor, old_T: Tensor, new_T: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `reference.cached_cos_sin` for a float32 table [P, 2F]. Raises IndexError as the reference does."""
    num_positions, half = cos_sin_cache.shape[0], cos_sin_cache.shape[1] // 2
    cos_TF, sin_TF = torch.empty((2, old_T.numel(), half))
    old, new = old_T.long().numpy(), new_T.long().numpy()
    for positions in (old, new):
        if positions.size and not 0 <= positions.min() <= positions.max() < num_positions:
            return reference.cached_cos_sin(cos_sin_cache, old_T, new_T)  # counts from the end, or raises
    _angles()(cos_sin_cache.numpy(), old, new, cos_TF.numpy(), sin_TF.numpy())
    return cos_TF, sin_TF


def warm_up(pool: Tensor, *, is_neox: bool) -> None:
    """Compile for this pool's type now, so that no request waits for it (seconds)."""
    tiny = torch.zeros(2, 1, pool.shape[2], dtype=pool.dtype)
    slots = torch.tensor([0]), torch.tensor([1])
    angles = cached_cos_sin(torch.ones(2, 2 * (pool.shape[2] // 2)), *slots)
    rotate_copy([tiny], [tiny.clone()], *slots, *angles, is_neox=is_neox)


def _are_disjoint(source_T: NDArray[np.int64], target_T: NDArray[np.int64], num_slots: int) -> bool:
    """Whether no slot is a target twice or both; one look at each slot instead of a sort."""
    is_target_S = np.zeros(num_slots, dtype=bool)
    is_target_S[target_T] = True
    return np.count_nonzero(is_target_S) == target_T.size and not is_target_S[source_T].any()


@functools.cache
def _compiled(dtype: torch.dtype, is_neox: bool) -> Callable[..., None]:
    import numba

    # no fused multiply-add and no reassociation: the reference's bits are the contract
    load, narrow = loader(dtype), _narrow(dtype)

    @numba.njit(inline="always")
    def turned(x: Any, y: Any, cos: Any, sin: Any) -> Any:
        """A pair; one that is not rotated keeps its bits, signed zeros and NaN payloads included."""
        x_wide, y_wide = load(x), load(y)
        is_still = (cos == np.float32(1.0)) & (sin == np.float32(0.0))
        x_new, y_new = narrow(x_wide * cos - y_wide * sin), narrow(y_wide * cos + x_wide * sin)
        return x if is_still else x_new, y if is_still else y_new

    def rotate_copy_layer(
        k_SHD: Any, v_SHD: Any, source_T: Any, target_T: Any, cos_TF: Any, sin_TF: Any
    ) -> None:
        num_heads, head_dim, half = k_SHD.shape[1], k_SHD.shape[2], cos_TF.shape[1]
        # beside the pool: LLVM vectorises a loop that does not read and write one array, and not one with gaps
        row_D, pairs_D = np.empty(head_dim, k_SHD.dtype), np.empty(head_dim, k_SHD.dtype)
        for t in range(source_T.shape[0]):
            source, target, cos_F, sin_F = source_T[t], target_T[t], cos_TF[t], sin_TF[t]
            for h in range(num_heads):
                from_D, to_D = k_SHD[source, h], k_SHD[target, h]
                for d in range(head_dim):
                    row_D[d] = from_D[d]
                if is_neox:
                    for f in range(half):
                        to_D[f], to_D[half + f] = turned(row_D[f], row_D[half + f], cos_F[f], sin_F[f])
                else:
                    for f in range(half):
                        x, y = turned(row_D[2 * f], row_D[2 * f + 1], cos_F[f], sin_F[f])
                        pairs_D[2 * f], pairs_D[2 * f + 1] = x, y
                    for d in range(2 * half):
                        to_D[d] = pairs_D[d]
                for d in range(2 * half, head_dim):
                    to_D[d] = row_D[d]
                for d in range(v_SHD.shape[2]):
                    v_SHD[target, h, d] = v_SHD[source, h, d]

    return compiled(nogil=True, error_model="numpy")(rotate_copy_layer)


@functools.cache
def _angles() -> Callable[..., None]:
    def cached_cos_sin_rows(table_P2F: Any, old_T: Any, new_T: Any, cos_TF: Any, sin_TF: Any) -> None:
        half = cos_TF.shape[1]
        for t in range(old_T.shape[0]):
            old_2F, new_2F = table_P2F[old_T[t]], table_P2F[new_T[t]]
            for f in range(half):
                co, so = np.float64(old_2F[f]), np.float64(old_2F[half + f])
                cn, sn = np.float64(new_2F[f]), np.float64(new_2F[half + f])
                square = co * co + so * so
                cos_TF[t, f] = np.float32((cn * co + sn * so) / square)
                sin_TF[t, f] = np.float32((sn * co - cn * so) / square)

    return compiled(nogil=True, error_model="numpy")(cached_cos_sin_rows)


@functools.cache
def _narrow(dtype: torch.dtype) -> Any:
    """float32 -> element of a pool's memory."""
    import numba

    if dtype != torch.bfloat16:
        return numba.njit(inline="always")(_same)
    _, to_bits = bit_casts()

    @numba.njit(inline="always")
    def narrow(value: Any) -> Any:
        # round to nearest, ties to even, as torch does
        bits = to_bits(value)
        odd = (bits >> np.uint32(16)) & np.uint32(1)
        return np.uint16((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))

    return narrow


def _same(value: Any) -> Any:
    return value
