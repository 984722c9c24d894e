"""Chooses who moves blocks: Triton, the compiled CPU kernel or the reference. For decode under a plan see choose.py.

Dims as in reference.py.

A gate answers from operand types alone (device, dtype, head size, page size), never from data, so a captured
graph and its replay choose alike. Operands that no fast kernel covers go to the reference and are counted;
operands that no kernel covers are the caller's mistake and raise ValueError inside the operation.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from . import cpu_rotate_copy, reference

if TYPE_CHECKING:
    from .rotate_copy import PoolTable

logger = logging.getLogger(__name__)

Choice = Literal["auto", "reference", "triton", "flashinfer"]
Kind = Literal["reference", "triton", "flashinfer"]

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_HEAD_DIM = 256
MAX_GROUP = 64  # query heads per KV head: a program holds the whole group
FLASHINFER_HEAD_DIMS = (64, 128, 256)
MIN_FLOAT8_CAPABILITY = (8, 9)  # e4m3 is no type of older devices


@dataclass(frozen=True)
class Operands:
    """What a gate may look at."""

    device: str
    dtype: torch.dtype  # of the queries, or of the keys that move
    kv_dtype: torch.dtype
    head_dim: int
    group: int
    page_size: int

    @classmethod
    def of(cls, q: Tensor, k: Tensor, page_size: int) -> Operands:
        return cls(
            q.device.type, q.dtype, k.dtype, q.shape[-1], max(q.shape[-2] // k.shape[-2], 1), page_size
        )


def refusal_of_triton(operands: Operands) -> str | None:
    """Why the Triton kernels do not serve these operands, or None."""
    if operands.device != "cuda":
        return f"device {operands.device}"
    if operands.dtype not in FLOATS + FLOAT8:
        return f"dtype {operands.dtype}"
    if operands.kv_dtype not in FLOATS + FLOAT8 + (torch.uint8,):
        return f"KV dtype {operands.kv_dtype}"
    if torch.float8_e4m3fn in (operands.dtype, operands.kv_dtype) and _capability() < MIN_FLOAT8_CAPABILITY:
        return f"float8 on sm_{_capability()[0]}{_capability()[1]}"
    if operands.head_dim > MAX_HEAD_DIM:
        return f"head dim {operands.head_dim} > {MAX_HEAD_DIM}"
    if operands.group > MAX_GROUP:
        return f"{operands.group} query heads per KV head > {MAX_GROUP}"
    return None


def refusal_of_flashinfer(operands: Operands) -> str | None:
    """Why FlashInfer does not serve these operands, or None."""
    if operands.device != "cuda":
        return f"device {operands.device}"
    if operands.dtype not in (torch.float16, torch.bfloat16):
        return f"dtype {operands.dtype}"
    if operands.head_dim not in FLASHINFER_HEAD_DIMS:
        return f"head dim {operands.head_dim} is none of {FLASHINFER_HEAD_DIMS}"
    return None


@cache
def _capability() -> tuple[int, int]:
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


@dataclass
class Dispatcher:
    """Serves `reference.rotate_copy` with its signature.

    `choice` forces a kind; operands outside its gate still fall back. `fallbacks` counts, per operation and
    reason, the calls that a forced or fast kind refused; a metrics exporter reads it.
    """

    choice: Choice = "auto"
    fallbacks: Counter[tuple[str, str]] = field(default_factory=Counter)
    _logged: set[tuple[str, str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.choice not in ("auto", "reference", "triton", "flashinfer"):
            raise ValueError(
                f"kernels: {self.choice!r} is no kind of kernel; use auto, reference, triton or flashinfer"
            )

    def kind_for(self, operation: str, operands: Operands) -> Kind:
        """The kind that serves an operation.

        FlashInfer plans on the host once per batch, which only `flashinfer_attention.ClassAttention` can do: a
        caller that asks for attention call by call is served by Triton.
        """
        wanted: Kind = "reference" if self.choice == "reference" else "triton"
        refusal = refusal_of_triton(operands) if wanted == "triton" else None
        # the reference is the home of the CPU, so an automatic choice there is no fallback
        if refusal is not None and (self.choice != "auto" or operands.device == "cuda"):
            self.fallbacks[operation, refusal] += 1
        kind: Kind = "reference" if refusal is not None else wanted
        self._log_once(operation, kind, refusal)
        return kind

    def planned_kind(self, operands: Operands) -> Kind:
        """The kind for a backend that plans a batch once and then runs every layer of it."""
        if self.choice in ("auto", "flashinfer"):
            refusal = refusal_of_flashinfer(operands)
            if refusal is None:
                self._log_once("planned attention", "flashinfer", None)
                return "flashinfer"
            if self.choice == "flashinfer":
                self.fallbacks["planned attention", refusal] += 1
        return self.kind_for("planned attention", operands)

    def _log_once(self, operation: str, kind: str, refusal: str | None) -> None:
        entry = (operation, kind, refusal or "")
        if entry not in self._logged:
            self._logged.add(entry)
            reason = f" ({refusal} is outside the Triton kernels)" if refusal else ""
            logger.info("blockreuse: %s runs on the %s kernel%s", operation, kind, reason)

    def rotate_copy(
        self,
        k_pools: Tensor | Sequence[Tensor] | PoolTable,
        v_pools: Tensor | Sequence[Tensor] | PoolTable,
        src_slots_T: Tensor,
        dst_slots_T: Tensor,
        cos_TF: Tensor,
        sin_TF: Tensor,
        *,
        is_neox: bool = True,
    ) -> None:
        """See `reference.rotate_copy`; a `PoolTable` made once spares the Triton kernel its address tables."""
        k_layers, v_layers = _pools(k_pools), _pools(v_pools)
        operands = Operands.of(k_layers[0], k_layers[0], 1)
        if self.choice != "reference" and cpu_rotate_copy.covers(k_layers[0]):
            self._log_once("rotate_copy", "compiled CPU", None)
            cpu_rotate_copy.rotate_copy(
                k_layers, v_layers, src_slots_T, dst_slots_T, cos_TF, sin_TF, is_neox=is_neox
            )
        elif self.kind_for("rotate_copy", operands) == "triton":
            _triton("rotate_copy")(
                k_pools, v_pools, src_slots_T, dst_slots_T, cos_TF, sin_TF, is_neox=is_neox
            )
        else:
            reference.rotate_copy(
                k_layers, v_layers, src_slots_T, dst_slots_T, cos_TF, sin_TF, is_neox=is_neox
            )

    def cached_cos_sin(self, cos_sin_cache: Tensor, old_T: Tensor, new_T: Tensor) -> tuple[Tensor, Tensor]:
        """See `reference.cached_cos_sin`."""
        if self.choice != "reference" and cpu_rotate_copy.covers_table(cos_sin_cache):
            return cpu_rotate_copy.cached_cos_sin(cos_sin_cache, old_T, new_T)
        operands = Operands(cos_sin_cache.device.type, cos_sin_cache.dtype, cos_sin_cache.dtype, 1, 1, 1)
        if self.kind_for("cached_cos_sin", operands) == "triton":
            angles: tuple[Tensor, Tensor] = _triton("cached_cos_sin", "rotate_copy")(
                cos_sin_cache, old_T, new_T
            )
            return angles
        return reference.cached_cos_sin(cos_sin_cache, old_T, new_T)


@cache
def _triton(function: str, module: str | None = None) -> Callable[..., Any]:
    """A Triton kernel's function; imported on first use, so that a CPU server never imports triton for it."""
    kernel: Callable[..., Any] = getattr(import_module(f".{module or function}", __package__), function)
    return kernel


def _pools(pools: Tensor | Sequence[Tensor] | PoolTable) -> Sequence[Tensor]:
    if isinstance(pools, Tensor):
        return [pools]
    return pools if isinstance(pools, Sequence) else pools.pools
