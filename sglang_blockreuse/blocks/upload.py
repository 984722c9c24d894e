"""How the host's numbers reach the device: as one, and without waiting for what the device does."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def upload(arrays: Sequence[NDArray[np.int64]], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays [n] on the device, int64, as parts of one buffer.

    The buffer is pinned: from other memory the copy would queue behind everything that the stream has to do, and the
    host with it. torch hands it out again only when the device has read it.
    """
    sizes = [len(array) for array in arrays]
    held = torch.empty(sum(sizes), dtype=torch.int64, pin_memory=device.type == "cuda")
    np.concatenate(arrays, out=held.numpy())
    parts: tuple[Tensor, ...] = held.to(device, non_blocking=True).split(sizes)
    return parts
