"""Which errors cost a request its reuse, and which must end the server."""

from __future__ import annotations

import torch

# how drivers and libraries of a device begin their messages; PyTorch raises some of them as plain RuntimeError
DEVICE_ERRORS = ("CUDA error", "CUDA driver error", "CUDA out of memory", "CUBLAS_", "NCCL")


def is_device_error(error: BaseException) -> bool:
    """Whether the device's state, or that of the ranks together, is unknown after the error.

    Such an error is raised again: what would be computed after it, for anybody, could not be trusted.
    """
    kinds = (torch.AcceleratorError, torch.OutOfMemoryError, torch.distributed.DistError)
    return isinstance(error, kinds) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in DEVICE_ERRORS)
    )
