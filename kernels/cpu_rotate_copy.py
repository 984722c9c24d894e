"""`rotate_copy` on the CPU: one compiled pass per layer, bit-equal to reference.rotate_copy.

The reference makes a dozen passes over the copied keys; here every key is read once, rotated in
registers and written once, so the copy runs at memory speed. Numba, which SGLang installs, needs
no C compiler on the user's machine.

Dims: S pool slots, H KV heads, D head dim, T tokens, F rotary_dim / 2
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import reference
from .cpu_cache import compiled

_STORAGE = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}


def covers(pool: Tensor) -> bool:
    """Whether a pool can be served here; the reference serves the rest."""
    return pool.device.type == "cpu" and pool.dtype in _STORAGE and pool.dim() == 3


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
    reference.check_disjoint(src_slots_T, dst_slots_T)
    source, target = src_slots_T.long().numpy(), dst_slots_T.long().numpy()
    cos = np.ascontiguousarray(cos_TF.expand(num_tokens, -1).numpy())
    sin = np.ascontiguousarray(sin_TF.expand(num_tokens, -1).numpy())
    for k_pool, v_pool in zip(k_pools, v_pools, strict=True):
        storage = _STORAGE[k_pool.dtype]
        kernel = _compiled(k_pool.dtype, is_neox)
        kernel(k_pool.view(storage).numpy(), v_pool.view(storage).numpy(), source, target, cos, sin)


def warm_up(pool: Tensor, *, is_neox: bool) -> None:
    """Compile for this pool's type now, so that no request waits for it (seconds)."""
    tiny = torch.zeros(2, 1, pool.shape[2], dtype=pool.dtype)
    slots = torch.tensor([0]), torch.tensor([1])
    angle = torch.zeros(1, pool.shape[2] // 2)
    rotate_copy([tiny], [tiny.clone()], *slots, angle.cos(), angle.sin(), is_neox=is_neox)


@functools.cache
def _compiled(dtype: torch.dtype, is_neox: bool) -> Callable[..., None]:
    import numba

    # no fused multiply-add and no reassociation: the reference's bits are the contract
    jit = numba.njit(nogil=True, error_model="numpy")
    to_float, from_float = (
        (jit(_bf16_to_float), jit(_float_to_bf16)) if dtype == torch.bfloat16 else (jit(_keep), jit(_keep))
    )

    def rotate_copy_layer(
        k_SHD: Any, v_SHD: Any, source_T: Any, target_T: Any, cos_TF: Any, sin_TF: Any
    ) -> None:
        num_heads, head_dim, half = k_SHD.shape[1], k_SHD.shape[2], cos_TF.shape[1]
        x, out = np.empty(head_dim, np.float32), np.empty(head_dim, np.float32)
        bits = np.empty(head_dim, k_SHD.dtype)
        for t in range(source_T.shape[0]):
            source, target = source_T[t], target_T[t]
            for h in range(num_heads):
                to_float(k_SHD[source, h], x)
                if is_neox:
                    for f in range(half):
                        out[f] = x[f] * cos_TF[t, f] - x[half + f] * sin_TF[t, f]
                        out[half + f] = x[half + f] * cos_TF[t, f] + x[f] * sin_TF[t, f]
                else:
                    for f in range(half):
                        out[2 * f] = x[2 * f] * cos_TF[t, f] - x[2 * f + 1] * sin_TF[t, f]
                        out[2 * f + 1] = x[2 * f + 1] * cos_TF[t, f] + x[2 * f] * sin_TF[t, f]
                from_float(out, bits)
                for f in range(half):
                    # a pair that is not rotated keeps its bits, signed zeros and NaN payloads included
                    first, second = (f, half + f) if is_neox else (2 * f, 2 * f + 1)
                    if cos_TF[t, f] == 1.0 and sin_TF[t, f] == 0.0:
                        bits[first], bits[second] = k_SHD[source, h, first], k_SHD[source, h, second]
                for d in range(2 * half, head_dim):
                    bits[d] = k_SHD[source, h, d]
                for d in range(head_dim):
                    k_SHD[target, h, d] = bits[d]
                for d in range(v_SHD.shape[2]):
                    v_SHD[target, h, d] = v_SHD[source, h, d]

    return compiled(nogil=True, error_model="numpy")(rotate_copy_layer)


def _bf16_to_float(bits: Any, out: Any) -> None:
    words = out.view(np.uint32)
    for d in range(bits.shape[0]):
        words[d] = np.uint32(bits[d]) << np.uint32(16)


def _float_to_bf16(x: Any, out: Any) -> None:
    words = x.view(np.uint32)
    for d in range(x.shape[0]):
        # round to nearest, ties to even, as torch does
        odd = (words[d] >> np.uint32(16)) & np.uint32(1)
        out[d] = np.uint16((words[d] + np.uint32(0x7FFF) + odd) >> np.uint32(16))


def _keep(x: Any, out: Any) -> None:
    for d in range(x.shape[0]):
        out[d] = x[d]
