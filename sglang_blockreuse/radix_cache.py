"""The radix cache `blockreuse`: SGLang's unified radix cache that knows which KV is local."""

from __future__ import annotations

import dataclasses
from array import array
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import (
    CacheRequestHandle,
    CacheRequestOutcome,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_observability

from .blocks.manager import BlockManager, plan_of
from .blocks.match import Namespace
from .blocks.step import PrefillSteps
from .kv_events import TREE_CORE, exact_events


class BlockReuseCache(UnifiedRadixCache):
    """Publishes exact KV only, and tells the manager when requests let go of their homes.

    Homes are ordinary nodes (compile prefix -> block), so eviction, locks, LRU order and
    namespaces are SGLang's own.
    """

    # set by the factory right after construction
    blocks: BlockManager
    steps: PrefillSteps
    row_modes: Any = None  # layers.row_modes.RowModes, where the attention backend keeps one

    def __init__(self, params: Any) -> None:
        announces = bool(get_observability().kv_events_config)  # on every rank, although the first one speaks
        super().__init__(dataclasses.replace(params, tree_core_backend=TREE_CORE) if announces else params)
        if announces:
            self.tree_core.kv_events = exact_events(self.tree_core.kv_events)

    def lookup(self, tokens: array[int], namespace: Namespace) -> tuple[int, Any]:
        match = self.match_prefix(MatchPrefixParams(key=_key(tokens, namespace)))
        return int(match.device_prefix_len), match.last_device_node

    def checkpoint(self, req: Any, *, up_to: int, **kwargs: Any) -> None:
        """Publish up to the first local position.

        What lies behind it stays the request's own and is freed with it: KV that depends on
        local KV must never be found by a request that asked for exact KV, and the tree would
        repoint an exact request's row onto it (its insert removes duplicates by token ids).
        """
        first_local = self.blocks.local_from(req)
        exact_end = up_to if first_local is None else min(up_to, first_local)
        super().checkpoint(req, up_to=exact_end, **kwargs)
        self.blocks.arrivals.computed(req, up_to=up_to, exact_end=exact_end)
        if req.finished():
            self._publish_path(req, up_to)
        plan = plan_of(req)
        if plan is not None and up_to >= plan.end:
            self.blocks.release(req)

    def _publish_path(self, req: Any, up_to: int) -> None:
        """Hand the finished row's local part to the tree, in a namespace that exact requests never see."""
        path = self.blocks.path_of(req)
        if path is None or self.disable or isinstance(req.finished_reason, FINISH_ABORT):
            return
        first_local, namespace = path
        if req.kv.cache_protected_len != first_local or up_to <= first_local:
            return
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx]
        self.insert(
            InsertParams(
                key=_key(req.full_untruncated_fill_ids[first_local:up_to], namespace),
                value=row[first_local:up_to].to(dtype=torch.int64, copy=True),
                priority=req.priority or 0,
            )
        )
        req.kv.cache_protected_len = up_to  # the tree's from here on, not the request's to free
        for tokens, home_namespace in self.blocks.homes_of(req):
            # homes serve many prompts, this path one: it must be evicted first
            self.touch_prefix(_key(tokens, home_namespace))

    def on_release(self, req: Any, *, checkpointed: bool) -> None:
        super().on_release(req, checkpointed=checkpointed)
        self.blocks.release(req)
        if req.finished():
            was_aborted = isinstance(req.finished_reason, FINISH_ABORT)
            self.blocks.ended(req, "aborted" if was_aborted else "computed")

    def finish(self, handle: CacheRequestHandle, outcome: CacheRequestOutcome) -> None:
        super().finish(handle, outcome)
        self.blocks.compiler.ended(handle.rid, "aborted")  # it was queued, and nothing of it was computed

    def reset(self) -> None:
        super().reset()
        if hasattr(self, "blocks"):  # the host empties a new tree too
            self.blocks.arrivals.tree_emptied()

    def kv_memory(self) -> dict[str, int]:
        """Bytes of the KV pool, and how many layers keep KV of their own in it; empty for pools of other kinds."""
        pool = self.token_to_kv_pool_allocator.get_kvcache()
        if not getattr(pool, "k_buffer", None):
            return {}
        k_bytes, v_bytes = pool.get_kv_size_bytes()
        return {"bytes": int(k_bytes + v_bytes), "layers": len({x.data_ptr() for x in pool.k_buffer})}

    def accounting(self) -> dict[str, int]:
        """Slots of the pool by owner; with no request running, free + evictable + protected = size."""
        allocator = self.token_to_kv_pool_allocator
        return {
            "free": int(allocator.available_size()),
            "evictable": int(self.evictable_size()),
            "protected": int(self.protected_size()),
            "size": int(allocator.size),
        }


def _key(tokens: array[int], namespace: Namespace) -> RadixKey:
    return RadixKey(tokens, extra_key=namespace.extra_key, cache_salt=namespace.cache_salt)
