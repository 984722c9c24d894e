"""SGLang's host memory pool on a plain CPU: ordinary memory and index copies where the host has CUDA's.

`torch.cpu` brings streams and events that do nothing, so transfers are synchronous and everything else is the host's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from typing import Any

from torch import Tensor

# Left to the system and to other programs when the pool is sized. The host's 10 GiB are those of a machine with GPUs.
RESERVED_BYTES = 2**30


def install() -> None:
    """Idempotent; in the scheduler's process, before the host builds the pool."""
    from sglang.srt.mem_cache import utils
    from sglang.srt.mem_cache.pool_host import base, common, mha

    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = RESERVED_BYTES
    common.ALLOC_MEMORY_FUNCS["cpu"] = _allocate
    mha.transfer_kv_direct = _transfer
    # nothing to pin for: read-only, whatever the constructor asks for
    mha.MHATokenToKVPoolHost.pin_memory = property(lambda self: False, lambda self, value: None)
    utils.get_native_hash = page_hashes  # the host compiles C++ for it at the first query of storage


def _allocate(dims: Any, dtype: Any, device: str, pin_memory: bool, allocator: Any, **kwargs: Any) -> Any:
    return allocator.allocate(dims, dtype=dtype, device=device)


def _transfer(
    *,
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Twin of the host's `transfer_kv_direct`; indices are of tokens, whatever the page."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def page_hashes(tokens: Any, prior_digest: bytes | None, page_size: int | None = None) -> str | list[str]:
    """Twin of the host's chain of SHA-256 over pages of token ids: keys of storage, the same on every platform.

    Returns one hexadecimal digest per page, or one of everything where page_size is None.
    """
    raw = getattr(tokens, "raw_token_ids", None)
    ids = raw() if raw is not None else getattr(tokens, "token_ids", tokens)
    num_tokens, digest, found = len(tokens), prior_digest or b"", []
    step = page_size or max(num_tokens, 1)
    for start in range(0, num_tokens, step):
        page = [int(ids[at]) for at in range(start, min(start + step, num_tokens))]
        digest = hashlib.sha256(digest + struct.pack(f"<{len(page)}I", *page)).digest()
        found.append(digest.hex())
    if page_size is not None:
        return found
    return found[0] if found else hashlib.sha256(digest).hexdigest()
