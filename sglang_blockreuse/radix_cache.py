"""The radix cache `blockreuse`: SGLang's unified radix cache that knows which KV is local."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle, CacheRequestOutcome, InsertParams

from .blocks.manager import BlockManager, plan_of
from .blocks.step import PrefillSteps
from .eviction import SPECULATIVE
from .tiered_cache import TieredCache, key_of


class BlockReuseCache(TieredCache):
    """Publishes exact KV only, and tells the manager when requests let go of their homes."""

    # set by the factory right after construction
    blocks: BlockManager
    steps: PrefillSteps
    row_modes: Any = None  # layers.row_modes.RowModes, where the attention backend keeps one

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
                key=key_of(req.full_untruncated_fill_ids[first_local:up_to], namespace),
                value=row[first_local:up_to].to(dtype=torch.int64, copy=True),
                priority=(req.priority or 0) if req.blockreuse.took_path else SPECULATIVE,
            )
        )
        req.kv.cache_protected_len = up_to  # the tree's from here on, not the request's to free
        for home, home_namespace in self.blocks.homes_of(req):
            self.used(home.tokens, home_namespace, priority=req.priority or 0, num_prefix=home.prefix_len)

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
