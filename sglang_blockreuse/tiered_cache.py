"""SGLang's unified radix cache as it is asked for homes: on the device, and below that in the host's memory pool.

Host memory (`--enable-hierarchical-cache`) and storage behind it hold what any request may use who has the tokens
before it. Our own namespaces stay on the device: a local path is a whole prompt that hardly anybody asks for again and
would push out homes that many share, and it means nothing to another server.
"""

from __future__ import annotations

import dataclasses
from array import array
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.cache_action import BackupKV
from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
from sglang.srt.mem_cache.unified_cache.components.base import CacheTransferPhase
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
from sglang.srt.runtime_context import get_observability

from .blocks.match import Namespace
from .blocks.paths import PREFIX
from .blocks.tiers import Found, HomeSlots
from .eviction import Order
from .features_tiers import refuse_storage
from .kv_events import TREE_CORE, exact_events
from .storage import names_min_fetch


class _Held(NamedTuple):
    lock: Any  # of the device's part
    host: Any  # of the part below it; None where there is none


class TieredCache(UnifiedRadixCache):
    """Homes are ordinary nodes (compile prefix -> block), so locks, namespaces, copies to host memory and from there
    to storage are SGLang's own."""

    # set by the factory right after construction
    identity: Callable[[], str]  # what names this server's KV in storage
    min_fetch: int  # tokens from which on storage is asked, where the user does not say

    def __init__(self, params: Any) -> None:
        self._order = Order(params.eviction_policy)
        params = dataclasses.replace(params, eviction_policy=self._order.policy)
        announces = bool(get_observability().kv_events_config)  # on every rank, although the first one speaks
        super().__init__(dataclasses.replace(params, tree_core_backend=TREE_CORE) if announces else params)
        if announces:
            self.tree_core.kv_events = exact_events(self.tree_core.kv_events)

    # -- homes -------------------------------------------------------------------------------

    def lookup(self, tokens: array[int], namespace: Namespace) -> tuple[int, Found]:
        match = self.match_prefix(MatchPrefixParams(key=key_of(tokens, namespace)))
        num_device, num_host = int(match.device_prefix_len), int(match.host_hit_length)
        found = Found(num_device, num_host, match.last_device_node, match.best_match_node)
        return num_device + num_host, found

    def slots(self, found: Found) -> HomeSlots:
        device_T = self.path_device_indices(found.device_node)
        if not found.num_host:
            return HomeSlots(device_T, torch.empty(0, dtype=torch.int64))
        (spec,) = self.tree_core.build_hicache_transfers(
            ComponentType.FULL, found.node, CacheTransferPhase.LOAD_BACK
        )
        return HomeSlots(device_T, spec.host_indices.cpu())

    def hold(self, found: Found) -> Any:
        if not found.num_host:
            return _Held(self.lock(found.device_node), None)
        host = self.inc_host_lock_ref(found.node).to_dec_params()
        return _Held(self.lock(found.node), host)

    def let_go(self, lock: Any) -> None:
        if lock.host is not None:
            self.dec_host_lock_ref(lock.lock.node, lock.host)
        self.unlock(lock.lock)

    # -- what leaves first ---------------------------------------------------------------------

    def insert(self, params: InsertParams) -> Any:
        return super().insert(dataclasses.replace(params, priority=self._order.rank(params.priority)))

    def used(self, tokens: array[int], namespace: Namespace, *, priority: int, num_prefix: int) -> None:
        """Count a use of a home as the host counts a prompt that comes again: homes are looked up and never inserted
        a second time, so to the host they would all be seen once.

        num_prefix: tokens of the compile prefix, which others count for.
        """
        _, found = self.lookup(tokens, namespace)
        if not found.num_device:
            return
        self.insert(
            InsertParams(
                key=key_of(tokens[: found.num_device], namespace),
                value=self.path_device_indices(found.device_node),
                prev_prefix_len=found.num_device,  # the tree's own slots, not duplicates to be freed
                inserted_len=num_prefix,
                priority=priority,
            )
        )

    # -- what stays on the device ----------------------------------------------------------------

    def _apply_cache_action(self, action: Any) -> None:
        if isinstance(action, BackupKV) and self._is_ours(action.node_ids[-1]):
            return
        super()._apply_cache_action(action)

    def _evict_device_leaf(self, node_id: Any, tracker: Any) -> Any:
        backup = super()._evict_device_leaf(node_id, tracker)
        if backup is None or not self._is_ours(node_id):
            return backup
        # what the host does where host memory has no room, without its complaint that there is none
        result = self.tree_core.drop_subtree_no_host(node_id)
        self._apply_eviction_result(result)
        self._accumulate_tracker(tracker, result.tracker)
        return None

    def _is_ours(self, node_id: Any) -> bool:
        extra_key, _ = self.tree_core.prefetch_anchor_info(node_id)
        return (extra_key or "").startswith(PREFIX)

    # -- storage -----------------------------------------------------------------------------------

    def fetch_from(self, num_tokens: int) -> None:
        """Ask storage for what is at least this long."""
        if self.cache_controller is not None:
            self.prefetch_threshold = self.cache_controller.prefetch_threshold = num_tokens

    def attach_storage_backend(self, storage_backend: str, *args: Any, **kwargs: Any) -> tuple[bool, str]:
        problem = refuse_storage(storage_backend)
        if problem is not None:
            return False, f"blockreuse: {problem}"
        if not self.enable_storage:
            name_storage(self.identity())  # weights may have changed since storage was detached
        attached: tuple[bool, str] = super().attach_storage_backend(storage_backend, *args, **kwargs)
        if attached[0] and not names_min_fetch(kwargs.get("storage_backend_extra_config_json")):
            self.fetch_from(self.min_fetch)
        return attached

    # -- accounting --------------------------------------------------------------------------------

    def accounting(self) -> dict[str, int]:
        """Slots by owner; with no request running, free + evictable + protected = size.

        host_free, host_size: of the host's memory pool, where there is one; the rest of it holds exact KV.
        """
        allocator = self.token_to_kv_pool_allocator
        slots = {
            "free": int(allocator.available_size()),
            "evictable": int(self.evictable_size()),
            "protected": int(self.protected_size()),
            "size": int(allocator.size),
        }
        if self.cache_controller is not None:
            pool = self.cache_controller.mem_pool_host
            slots |= {"host_free": int(pool.available_size()), "host_size": int(pool.size)}
        return slots


def name_storage(identity: str) -> None:
    """Mark the host's keys of storage with what this server's KV is, see storage.py; read when storage is attached."""
    MHATokenToKVPoolHost.storage_format_tag = identity


def key_of(tokens: array[int], namespace: Namespace) -> RadixKey:
    return RadixKey(tokens, extra_key=namespace.extra_key, cache_salt=namespace.cache_salt)
