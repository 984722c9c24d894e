"""Attention of a batch's rows with alpha and beta by slot tag, for the CUDA bases.

Rows are read where the host's page table names them: row r begins at entry first_R[r] of the flattened table and has
lens_R[r] keys. No list is built per forward, and a captured decode step replays with other rows.

Dims: R rows of the batch, T its tokens, Q query heads, H KV heads, D head dim, S pool slots, I keys of all rows
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.cpu_rows import KeyBias
from ..kernels.decode_attention import MIN_SPLIT_LEN, decode_attention
from ..kernels.extend_attention import extend_attention
from ..kernels.flashinfer_attention import ClassAttention, Executor, Geometry, plan_classes
from ..kernels.triton_common import num_splits_for


@dataclass(frozen=True, slots=True)
class Shape:
    """What the rows of a model look like, the same in every layer."""

    num_q_heads: int
    scale: float
    max_len: int  # keys that a row may have: chooses the number of splits, so that a captured step keeps it
    max_rows: int  # of a decode step


class BiasedRows:
    """Rows on the Triton kernels, which read each key's tag beside it.

    tags_S is allocated here, before any decode step is captured, and never replaced.
    """

    def __init__(
        self, slot_table: Tensor, k_pool: Tensor, shape: Shape, *, alpha: float, beta: float
    ) -> None:
        self.tags_S = torch.zeros(k_pool.shape[0], dtype=torch.uint8, device=k_pool.device)
        self._table = slot_table  # int32 [request slots, positions]
        self._shape = shape
        self._bias: dict[str, Any] = {
            "tags_S": self.tags_S,
            "alpha": alpha,
            "beta": beta,
            "scale": shape.scale,
        }
        self._first_R: Tensor | None = None
        self._lens_R: Tensor | None = None
        self._qo_indptr_R1: Tensor | None = None

    @property
    def key_bias(self) -> KeyBias:
        return KeyBias(self.tags_S, self._bias["alpha"], self._bias["beta"])

    def plan(self, forward_batch: Any) -> None:
        """Once per forward, for all layers; recorded where a decode step is captured."""
        self._first_R = forward_batch.req_pool_indices.long() * self._table.stride(0)
        self._lens_R = forward_batch.seq_lens.clone()  # the host's own may move on before the last layer
        if not forward_batch.forward_mode.is_decode():
            self._qo_indptr_R1 = _indptr(forward_batch.extend_seq_lens)

    def extend(self, forward_batch: Any, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> Tensor:
        """out [T, Q, D]; queries stand at the last positions of their row."""
        assert self._first_R is not None
        assert self._qo_indptr_R1 is not None
        out, _ = extend_attention(
            q_TQD,
            k_SHD,
            v_SHD,
            self._table.view(-1),
            self._first_R,
            self._qo_indptr_R1,
            kv_lens_R=self._lens_R,
            max_q_len=max(forward_batch.extend_seq_lens_cpu),
            **self._bias,
        )
        return out

    def decode(self, q_RQD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> Tensor:
        """out [R, Q, D]."""
        assert self._first_R is not None
        out, _ = decode_attention(
            q_RQD,
            k_SHD,
            v_SHD,
            self._table.view(-1),
            self._first_R,
            kv_lens_R=self._lens_R,
            max_len=self._shape.max_len,
            **self._bias,
        )
        return out

    def warm_up(self, k_SHD: Tensor, v_SHD: Tensor, dtype: torch.dtype) -> None:
        """Launch what serving may launch, on one key of the host's padding slot, so that nothing compiles later."""
        device, shape = k_SHD.device, self._shape
        zero, one = (
            torch.zeros(1, dtype=torch.int64, device=device),
            torch.ones(1, dtype=torch.int64, device=device),
        )
        q = torch.zeros((1, shape.num_q_heads, k_SHD.shape[-1]), dtype=dtype, device=device)
        slots = torch.zeros(1, dtype=torch.int32, device=device)
        row = (q, k_SHD, v_SHD, slots, zero)
        extend_attention(*row, _indptr(one), kv_lens_R=one, max_q_len=1, **self._bias)
        heads = k_SHD.shape[1]
        for num_splits in sorted(
            {
                num_splits_for(n * heads, shape.max_len, MIN_SPLIT_LEN, device)
                for n in range(1, shape.max_rows + 1)
            }
        ):
            decode_attention(*row, kv_lens_R=one, num_splits=num_splits, **self._bias)


class ClassRows(BiasedRows):
    """Runs of a prefill on FlashInfer, one plan per tag class, merged by log-sum-exp; decode rows as in `BiasedRows`.

    Planning a class reads its lengths on the host, which a captured decode step cannot do.
    """

    def __init__(
        self,
        slot_table: Tensor,
        k_pool: Tensor,
        shape: Shape,
        *,
        alpha: float,
        beta: float,
        make_executor: Callable[[], Executor],
        dtype: torch.dtype,
    ) -> None:
        super().__init__(slot_table, k_pool, shape, alpha=alpha, beta=beta)
        self._classes = ClassAttention(make_executor)
        self._alpha, self._beta = alpha, beta
        num_heads, head_dim = k_pool.shape[1:]
        self._geometry = Geometry(
            shape.num_q_heads, num_heads, head_dim, head_dim, shape.scale, dtype, k_pool.dtype
        )

    def plan(self, forward_batch: Any) -> None:
        super().plan(forward_batch)
        if not forward_batch.forward_mode.is_decode():
            assert self._qo_indptr_R1 is not None
            lists = self._lists(forward_batch)
            classes = plan_classes(
                *lists, self._qo_indptr_R1, self.tags_S, alpha=self._alpha, beta=self._beta
            )
            self._classes.plan(classes, self._geometry)

    def extend(self, forward_batch: Any, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> Tensor:
        out, _ = self._classes.run(q_TQD.contiguous(), k_SHD, v_SHD)
        return out

    def warm_up(self, k_SHD: Tensor, v_SHD: Tensor, dtype: torch.dtype) -> None:
        super().warm_up(k_SHD, v_SHD, dtype)
        slots = torch.zeros(1, dtype=torch.int32, device=k_SHD.device)
        indptr = torch.tensor([0, 1], device=k_SHD.device)
        self._classes.plan(
            plan_classes(slots, indptr, indptr, self.tags_S, alpha=self._alpha, beta=self._beta),
            self._geometry,
        )
        q = torch.zeros((1, self._shape.num_q_heads, k_SHD.shape[-1]), dtype=dtype, device=k_SHD.device)
        self._classes.run(q, k_SHD, v_SHD)

    def _lists(self, forward_batch: Any) -> tuple[Tensor, Tensor]:
        """Slots of all keys, row after row [I], and where each row's begin [R + 1]."""
        lens_R, requests_R = forward_batch.seq_lens.long(), forward_batch.req_pool_indices
        indptr_R1 = _indptr(lens_R)
        num_keys = int(forward_batch.seq_lens_cpu.sum())
        rows = torch.arange(len(lens_R), device=lens_R.device)
        row_I = torch.repeat_interleave(rows, lens_R, output_size=num_keys)
        at_I = torch.arange(num_keys, device=lens_R.device) - indptr_R1[row_I]
        return self._table[requests_R[row_I], at_I], indptr_R1


def _indptr(lens_R: Tensor) -> Tensor:
    return torch.nn.functional.pad(lens_R.long().cumsum(0), (1, 0))
