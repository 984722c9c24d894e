"""What the compiled CPU kernels share: bit casts, a vectorisable exponential, loads of pool elements.

LLVM vectorises a loop only if nothing in it is a call, so the exponential is arithmetic and bit casts: relative
error below 2e-7, 0 below -87.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

# pool dtype -> the dtype of its memory as the kernels read it
STORAGE = {torch.bfloat16: torch.uint16, torch.float32: torch.float32}

# reductions may be reordered; NaN and infinities keep their meaning
REORDER = {"reassoc", "contract", "nsz"}

_LOG2_E = np.float32(1.44269504088896341)
# ln 2 in two parts, the first exact in few bits, so that x - n * ln 2 loses nothing
_LN2_HIGH, _LN2_LOW = np.float32(0.693359375), np.float32(-2.12194440e-4)
_EXP_LOW = np.float32(-87.0)
_HALF, _ONE, _ZERO = np.float32(0.5), np.float32(1.0), np.float32(0.0)
_COEFFICIENTS = tuple(
    np.float32(c)
    for c in (
        1.9875691500e-4,
        1.3981999507e-3,
        8.3334519073e-3,
        4.1665795894e-2,
        1.6666665459e-1,
        5.0000001201e-1,
    )
)
_C0, _C1, _C2, _C3, _C4, _C5 = _COEFFICIENTS


def as_array(tensor: Tensor) -> Any:
    """A numpy view of a CPU tensor; bfloat16 as its bits."""
    storage = STORAGE.get(tensor.dtype)
    return (tensor if storage is None else tensor.view(storage)).numpy()


@functools.cache
def bit_casts() -> tuple[Any, Any]:
    """(uint32 -> float32, float32 -> uint32), the bits unchanged."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def to_float(typing_context: Any, bits: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.FloatType())

        return types.float32(types.uint32), build

    @intrinsic
    def to_bits(typing_context: Any, value: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.bitcast(arguments[0], ir.IntType(32))

        return types.uint32(types.float32), build

    return to_float, to_bits


@functools.cache
def exponential() -> Any:
    """float32 -> float32, e ** x for x <= 0 as a softmax has it."""
    import numba

    to_float, _ = bit_casts()

    @numba.njit(inline="always", error_model="numpy")
    def exp(x: Any) -> Any:
        n = np.floor(x * _LOG2_E + _HALF)
        r = (x - n * _LN2_HIGH) - n * _LN2_LOW
        p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
        power = to_float(np.uint32((np.int32(n) + np.int32(127)) << np.int32(23)))
        value = (p * r * r + r + _ONE) * power
        return value if x > _EXP_LOW else _ZERO

    return exp


@functools.cache
def half_loader() -> Any:
    """Bits of a float16 -> float32."""
    from llvmlite import ir
    from numba import types
    from numba.extending import intrinsic

    @intrinsic
    def load(typing_context: Any, bits: Any) -> Any:
        def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            return builder.fpext(builder.bitcast(arguments[0], ir.HalfType()), ir.FloatType())

        return types.float32(types.uint16), build

    return load


@functools.cache
def loader(dtype: torch.dtype) -> Any:
    """Element of a pool's memory -> float32."""
    import numba

    to_float, _ = bit_casts()
    if dtype == torch.bfloat16:

        @numba.njit(inline="always")
        def load(bits: Any) -> Any:
            return to_float(np.uint32(bits) << np.uint32(16))

    else:

        @numba.njit(inline="always")
        def load(bits: Any) -> Any:
            return bits

    return load
