"""What of host memory and storage a server with block reuse does not start with; part of features.REFUSED."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

# Backends that were run with homes in them. Others may name KV by less than the model, or want whole pages.
STORAGE_BACKENDS = ("file",)


def refuse_storage(backend: str) -> str | None:
    """Why a storage backend is not used, or None."""
    if backend in STORAGE_BACKENDS:
        return None
    return (
        f"--hicache-storage-backend {backend} was never run with document blocks: whether it takes pages of one token, "
        "and keeps KV of other weights apart, is not known"
    )


def _host_memory_mode(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_memory

    mode = get_memory().hicache_host_memory_mode
    if not ctx.enable_hierarchical_cache or mode == "cache":
        return None
    return f"--hicache-host-memory-mode is {mode}, where KV only passes through host memory and no home is found in it"


def _storage_backend(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_memory

    backend = get_memory().hicache_storage_backend
    return None if backend is None else refuse_storage(backend)


def _shared_layers(ctx: Any) -> str | None:
    plan = getattr(ctx.tp_worker.model_runner.attn_backend, "layer_plan", None)
    if not ctx.enable_hierarchical_cache or plan is None or not plan.shared_layers:
        return None
    return (
        f"--enable-hierarchical-cache with layer plan {plan.name}, whose layers share KV (kv_from): such KV is the "
        "plan's alone and stays on the device"
    )


# name, what is wrong with this server, way out
TIERS: tuple[tuple[str, Callable[[Any], str | None], str], ...] = (
    (
        "host memory that is only passed through (--hicache-host-memory-mode buffer_only)",
        _host_memory_mode,
        "Use --hicache-host-memory-mode cache.",
    ),
    (
        "storage backends other than file (--hicache-storage-backend)",
        _storage_backend,
        f"Use one of: {', '.join(STORAGE_BACKENDS)}, or host memory (--enable-hierarchical-cache) without storage.",
    ),
    (
        "host memory under a layer plan with kv_from",
        _shared_layers,
        "Drop --enable-hierarchical-cache, or take a plan whose layers keep KV of their own.",
    ),
)
