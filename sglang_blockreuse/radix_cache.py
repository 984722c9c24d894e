"""The radix cache `blockreuse`: SGLang's unified radix cache that knows which KV is local."""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    CacheRequestOutcome,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from .blocks.manager import BlockManager, plan_of
from .blocks.match import Namespace
from .types import RequestState


class BlockReuseCache(UnifiedRadixCache):
    """Publishes exact KV only, and tells the manager when requests let go of their homes.

    Homes are ordinary nodes (compile prefix -> block), so eviction, locks, LRU order and
    namespaces are SGLang's own.
    """

    blocks: BlockManager  # set by the factory right after construction

    def lookup(self, tokens: array[int], namespace: Namespace) -> tuple[int, Any]:
        match = self.match_prefix(
            MatchPrefixParams(
                key=RadixKey(tokens, extra_key=namespace.extra_key, cache_salt=namespace.cache_salt)
            )
        )
        return int(match.device_prefix_len), match.last_device_node

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish up to the first local position.

        What lies behind it stays the request's own and is freed with it: KV that depends on
        local KV must never be found by a request that asked for exact KV, and the tree would
        repoint an exact request's row onto it (its insert removes duplicates by token ids).
        """
        state: RequestState | None = getattr(req, "blockreuse", None)
        first_local = None if state is None else state.first_local
        exact_end = up_to if first_local is None else min(up_to, first_local)
        super().checkpoint(req, up_to=exact_end, **kwargs)
        self.blocks.arrivals.computed(req, up_to=up_to, exact_end=exact_end)
        plan = plan_of(req)
        if plan is not None and up_to >= plan.end:
            self.blocks.release(req)

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.blocks.release(req)
        if req.finished():
            self.blocks.compiler.ended(req.rid)

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        super().finish(handle, outcome)
        self.blocks.compiler.ended(handle.rid)

    def accounting(self) -> dict[str, int]:
        """Slots of the pool by owner; with no request running, free + evictable + protected = size."""
        allocator = self.token_to_kv_pool_allocator
        return {
            "free": int(allocator.available_size()),
            "evictable": int(self.evictable_size()),
            "protected": int(self.protected_size()),
            "size": int(allocator.size),
        }
