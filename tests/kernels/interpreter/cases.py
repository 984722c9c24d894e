"""Poisoned operands for kernel tests: NaN in every slot, pad and index that a kernel must not read.

Dims as in kernels/reference.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PAD = 16  # poisoned elements behind every head, so that a read past the head dim shows
NUM_SPARE_PAGES = 3  # poisoned pages that no row uses; padding entries point there


@dataclass(frozen=True)
class Rows:
    """A batch of rows over one pool; fields as the arguments of the kernels."""

    k_pool: Tensor
    v_pool: Tensor
    tags_S: Tensor
    kv_indices: Tensor
    kv_indptr_R1: Tensor
    kv_lens_R: Tensor
    page_size: int

    @property
    def lens(self) -> list[int]:
        return self.kv_lens_R.tolist()

    def paged(self) -> dict[str, object]:
        """The keywords of a call that says the length of every row."""
        return {"page_size": self.page_size, "kv_lens_R": self.kv_lens_R}


def poisoned_pool(
    num_slots: int, num_heads: int, head_dim: int, dtype: torch.dtype, page_size: int, hnd: bool
) -> Tensor:
    """A NaN pool: [S, H, D], or [N, P, H, D] for pages; `hnd` stores heads before the slots of a page."""
    num_pages = num_slots // page_size
    shape = (num_pages, num_heads, page_size) if hnd else (num_pages, page_size, num_heads)
    full = torch.full((*shape, head_dim + PAD), torch.nan).to(dtype)[..., :head_dim]
    if hnd:
        return full.permute(0, 2, 1, 3)
    return full[:, 0] if page_size == 1 else full


def make_rows(
    lens: list[int],
    *,
    num_heads: int = 2,
    head_dim: int = 64,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    page_size: int = 1,
    width: int | None = None,
    hnd: bool = False,
    seed: int = 0,
) -> Rows:
    """Rows of the given lengths in shuffled pages; `width` gives every row a list of that many entries."""
    generator = torch.Generator().manual_seed(seed)
    num_entries = [-(-n // page_size) for n in lens]
    widths = num_entries if width is None else [width] * len(lens)
    num_pages = sum(num_entries) + NUM_SPARE_PAGES
    order = torch.randperm(num_pages, generator=generator)
    spare, order = order[0], order[1:]
    num_slots = num_pages * page_size
    k_pool = poisoned_pool(num_slots, num_heads, head_dim, dtype, page_size, hnd)
    v_pool = poisoned_pool(num_slots, num_heads, value_dim or head_dim, dtype, page_size, hnd)
    # the spare pages look local and sink-like: a kernel that reads their tag changes its result
    tags_S = torch.full((num_slots,), 3, dtype=torch.uint8)
    indices, bounds = [], [0]
    for length, entries, row_width in zip(lens, num_entries, widths, strict=True):
        pages, order = order[:entries], order[entries:]
        key = torch.arange(length)
        slots = pages[key // page_size] * page_size + key % page_size if length else key
        _fill(k_pool, slots, page_size, generator)
        _fill(v_pool, slots, page_size, generator)
        tags_S[slots] = torch.randint(0, 4, (length,), generator=generator).to(torch.uint8)
        indices.append(torch.cat((pages, spare.expand(row_width - entries))))
        bounds.append(bounds[-1] + row_width)
    # the entries behind the last row belong to nobody
    kv_indices = torch.cat((*indices, spare.expand(8))).int()
    return Rows(
        k_pool, v_pool, tags_S, kv_indices, torch.tensor(bounds).int(), torch.tensor(lens).int(), page_size
    )


def _fill(pool: Tensor, slots: Tensor, page_size: int, generator: torch.Generator) -> None:
    values = torch.randn((slots.numel(), *pool.shape[-2:]), generator=generator).to(pool.dtype)
    if pool.dim() == 3:
        pool[slots] = values
    else:
        pool[slots // page_size, slots % page_size] = values


def queries(num_tokens: int, num_q_heads: int, head_dim: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """[T, Q, D] with poison behind every head."""
    generator = torch.Generator().manual_seed(seed)
    full = torch.full((num_tokens, num_q_heads, head_dim + PAD), torch.nan)
    full[..., :head_dim] = torch.randn((num_tokens, num_q_heads, head_dim), generator=generator)
    return full.to(dtype)[..., :head_dim]


def wide(x: Tensor) -> Tensor:
    return x.double()
