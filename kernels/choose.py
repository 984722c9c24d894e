"""Who serves the operations of `ops`: the law, the compiled kernels of the CPU, or Triton. Known here alone."""

from __future__ import annotations

from functools import cache

from torch import Tensor

from .ops import Ops


@cache
def cpu_ops() -> Ops:
    from .ops_cpu import CpuOps

    return CpuOps()


@cache
def law_ops() -> Ops:
    from .ops_law import LawOps

    return LawOps()


def decode_ops(
    kernels: str, device: str, *, num_lists: int = 0, max_len: int = 0, pool: Tensor | None = None
) -> Ops:
    """Those of a server. kernels: as configured; device: its kind. num_lists, max_len, pool: see `TritonOps`.

    Triton serves every CUDA base: FlashInfer has no selection.
    """
    if kernels == "reference":
        return law_ops()
    if device == "cpu":
        return cpu_ops()
    from .ops_triton import TritonOps

    assert pool is not None
    return TritonOps(num_lists, max_len, pool.device)
