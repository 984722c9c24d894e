"""What the Triton kernels share: addresses of paged rows, the tag bias, a dot that the interpreter can run.

Dims as in reference.py. Every offset into a pool is int64 before it is multiplied by a stride: a pool of
a few GiB has more than 2^31 elements.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2E: float = 1.4426950408889634
# of a thread of four warps; without it ptxas saves registers for blocks that never come, and spills
MAX_REGISTERS = 128

TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.float16: tl.float16,
    torch.bfloat16: tl.bfloat16,
    torch.float8_e4m3fn: tl.float8e4nv,
    torch.float8_e5m2: tl.float8e5,
}


@triton.jit
def load_entry(indices_ptr, position, mask, PAGE_SIZE: tl.constexpr):
    """Page and offset of the keys at `position` of a row whose entries begin at `indices_ptr`."""
    page = tl.load(indices_ptr + position // PAGE_SIZE, mask=mask, other=0).to(tl.int64)
    return page, position % PAGE_SIZE


@triton.jit
def load_bias(tags_ptr, page, offset, mask, alpha, beta, PAGE_SIZE: tl.constexpr):
    """alpha on local keys (bit 0) plus beta on false sinks (bit 1); selected, not multiplied: both may be -inf."""
    tag = tl.load(tags_ptr + page * PAGE_SIZE + offset, mask=mask, other=0).to(tl.int32)
    return tl.where(tag & 1 != 0, alpha, 0.0) + tl.where(tag & 2 != 0, beta, 0.0)


@triton.jit
def dot(a, b, acc, SOFT_BITS: tl.constexpr):
    """acc + a @ b with float32 sums; float32 operands keep every bit (no tf32)."""
    if SOFT_BITS > 0:
        # the interpreter holds bfloat16 as integers and would multiply those
        a, b = a.to(tl.float32), b.to(tl.float32)
    return tl.dot(a, b, acc=acc, input_precision="ieee")


@triton.jit
def narrow(x, DTYPE: tl.constexpr, SOFT_BITS: tl.constexpr):
    """float32 to DTYPE, to nearest, ties to even. See `soft_bits`."""
    if SOFT_BITS > 0:
        bits = x.to(tl.int32, bitcast=True)
        bits += (1 << (SOFT_BITS - 1)) - 1 + ((bits >> SOFT_BITS) & 1)
        x = ((bits >> SOFT_BITS) << SOFT_BITS).to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def row_bounds(indptr_ptr, lens_ptr, row, PAGE_SIZE: tl.constexpr, HAS_LENS: tl.constexpr):
    """First entry (int64) and number of keys of a row, both read on the device."""
    first = tl.load(indptr_ptr + row).to(tl.int64)
    if HAS_LENS:
        num_keys = tl.load(lens_ptr + row).to(tl.int32)
    else:
        num_keys = ((tl.load(indptr_ptr + row + 1).to(tl.int64) - first) * PAGE_SIZE).to(tl.int32)
    return first, num_keys


@triton.jit
def split_bounds(num_keys, split, NUM_SPLITS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The keys [begin, end) of one split, whole blocks so that none is shared; empty past the row's end."""
    per_split = tl.cdiv(tl.cdiv(num_keys, NUM_SPLITS), BLOCK_N) * BLOCK_N
    begin = split * per_split
    return begin, tl.minimum(begin + per_split, num_keys)


class PoolStrides(NamedTuple):
    """Elements between neighbouring pages, slots of a page, and heads; the head dim is contiguous."""

    page: int
    slot: int
    head: int


def pool_strides(pool: Tensor, page_size: int) -> PoolStrides:
    """Strides of a [S, H, D] or [N, P, H, D] pool. Raises ValueError if a head is not contiguous."""
    if pool.stride(-1) != 1:
        raise ValueError(f"pool strides {pool.stride()}: the head dim must be contiguous")
    page = pool.stride(0) if pool.dim() == 4 else pool.stride(0) * page_size
    return PoolStrides(page, pool.stride(-3), pool.stride(-2))


def soft_bits(dtype: torch.dtype) -> int:
    """Mantissa bits that a kernel must round away itself; 0 on every device.

    The interpreter truncates float32 to bfloat16 and drops the carry of float8, so there the kernels round in
    integer arithmetic before they convert.
    """
    if not triton.knobs.runtime.interpret:
        return 0
    return {torch.bfloat16: 16, torch.float8_e4m3fn: 20, torch.float8_e5m2: 21}.get(dtype, 0)


def num_splits_for(num_programs: int, max_len: int, min_split_len: int, device: torch.device) -> int:
    """Splits of a row that fill the device about twice; a power of two, at most 64, each of useful length."""
    if device.type != "cuda":
        return 1
    wanted = 2 * torch.cuda.get_device_properties(device).multi_processor_count / max(num_programs, 1)
    useful = max_len / min_split_len
    return 1 << max(0, min(6, int(min(wanted, useful)).bit_length() - 1))
