"""Builds the radix cache `blockreuse` in the scheduler process, or says why it cannot work."""

from __future__ import annotations

import functools
import logging
from typing import Any

from .blocks.load import KvLoader, moved_once
from .blocks.manager import BlockManager
from .blocks.rope import UnsupportedRope, find_ropes
from .blocks.shared_kv import SharedKv
from .blocks.step import PrefillSteps
from .blocks.tags import SlotTags
from .config import Config
from .errors import short
from .features import UnsupportedServer, check_server
from .host import any_over_ranks, install_hooks, require_contract, shared_secret, sum_over_ranks
from .kernels.dispatch import Dispatcher
from .metrics import Metrics
from .settings import config_of
from .storage import identity, names_min_fetch

logger = logging.getLogger(__name__)


def create_radix_cache(ctx: Any) -> Any:
    """The factory behind `--radix-cache-backend blockreuse`; ctx: the host's TreeCacheBuildContext."""
    from sglang.srt.mem_cache.registry import create_unified_radix_cache
    from sglang.srt.runtime_context import get_memory

    from .radix_cache import BlockReuseCache
    from .tiered_cache import name_storage

    config = config_of(ctx.server_args)
    require_contract()
    check_server(ctx)
    loader, off_reason = _loader(ctx, config)
    memory = get_memory()
    if memory.hicache_storage_backend is not None:
        name_storage(_identity(ctx))
    cache = create_unified_radix_cache(ctx, cache_class=BlockReuseCache)
    cache.identity, cache.min_fetch = functools.partial(_identity, ctx), config.blocks.min_block_tokens
    if not names_min_fetch(memory.hicache_storage_backend_extra_config):
        cache.fetch_from(cache.min_fetch)
    metrics = Metrics(_metric_labels(ctx))
    pool_size = int(ctx.params.token_to_kv_pool_allocator.size)
    host_homes = None
    if cache.cache_controller is not None:
        # what is pushed out of the one pool while homes are compiled is found in the other
        pool_size += int(cache.cache_controller.mem_pool_host.size)
        host_homes = None if loader is None else loader.on_host(cache.cache_controller)
    cache.blocks = BlockManager(
        config=config,
        tree=cache,
        bos=_bos(ctx.model_config),
        neutral_prefix=_tokens_of(config, "compile_prefix_text", add_special_tokens=True),
        company_text=_tokens_of(config, "company", add_special_tokens=False),
        pool_size=pool_size,
        metrics=metrics,
        layer_plan=_sparse_plan(ctx.tp_worker.model_runner.attn_backend),
        shared_kv=_shared_kv(ctx.tp_worker.model_runner.attn_backend),
        off_reason=off_reason,
        home_token=shared_secret(),
        index_secret=shared_secret(),
    )
    cache.steps = PrefillSteps(
        cache.blocks,
        loader,
        metrics=metrics,
        num_layers=ctx.model_config.num_hidden_layers,
        shared_layers=getattr(ctx.tp_worker.model_runner.attn_backend, "readers", ()),
        reduce=sum_over_ranks,
        any_rank=any_over_ranks,
        max_forward_tokens=_max_forward_tokens(),
        tags=_tags(ctx, config),
        host_homes=host_homes,
    )
    _report_memory(ctx.model_config.num_hidden_layers, cache.kv_memory())
    _join_backend(ctx.tp_worker.model_runner.attn_backend, cache, metrics)
    install_hooks()
    logger.info("blockreuse: block reuse is %s, configuration %s", off_reason or "on", config.describe())
    return cache


def _identity(ctx: Any) -> str:
    """What names this server's KV in storage, of the weights as they are now."""
    from sglang.srt.runtime_context import get_memory

    runner = ctx.tp_worker.model_runner
    return identity(
        runner.model,
        ctx.model_config.hf_config,
        kv_dtype=runner.kv_cache_dtype,
        layout=get_memory().hicache_mem_layout,
    )


def _max_forward_tokens() -> int | None:
    """What the server's settings let one prefill forward compute."""
    from sglang.srt.runtime_context import get_schedule

    schedule = get_schedule()
    chunk = schedule.chunked_prefill_size
    return int(chunk) if chunk and chunk > 0 else schedule.max_prefill_tokens


def _loader(ctx: Any, config: Config) -> tuple[KvLoader | None, str | None]:
    """How KV is moved for this model, or None and the reason why blocks are not reused."""
    runner = ctx.tp_worker.model_runner
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    try:
        _check_pool(pool)
        num_layers = len(pool.k_buffer)
        groups = moved_once(
            find_ropes(runner.model, num_layers, attn_backend=runner.attn_backend),
            getattr(pool, "kv_layers", range(num_layers)),
        )
    except UnsupportedRope as error:
        if config.strict:
            raise
        logger.warning("blockreuse: serving without block reuse: %s", error)
        return None, "unsupported_model"
    return KvLoader(pool.k_buffer, pool.v_buffer, groups, Dispatcher(config.kernels)), None


def _shared_kv(backend: Any) -> SharedKv | None:
    """How the server's layer plan shares main KV between layers; None where every layer keeps its own."""
    plan = getattr(backend, "layer_plan", None)
    if plan is None or not plan.shared_layers:
        return None
    return SharedKv(plan=plan.name, fingerprint=plan.fingerprint, trained=plan.trained_sharing)


def _report_memory(num_layers: int, kv: dict[str, int]) -> None:
    if kv and kv["layers"] < num_layers:
        logger.info(
            "blockreuse: %d of %d layers keep KV of their own: %.1f MB in place of %.1f MB",
            kv["layers"],
            num_layers,
            kv["bytes"] / 1e6,
            kv["bytes"] / 1e6 * num_layers / kv["layers"],
        )


def _sparse_plan(backend: Any) -> str | None:
    """Fingerprint of the layer plan that decode runs under; None where every layer reads everything."""
    sparse = getattr(backend, "sparse", None)
    return None if sparse is None else str(sparse.plan.fingerprint)


def _join_backend(backend: Any, cache: Any, metrics: Metrics) -> None:
    """Let the attention backend know which requests decode dense and what the loader writes, and count where the
    server counts."""
    cache.row_modes = getattr(backend, "row_modes", None)
    sparse = getattr(backend, "sparse", None)
    if sparse is not None:
        sparse.metrics = metrics
        metrics.sources.append(sparse.report)
        cache.steps.announce = sparse.written
        cache.steps.sparse_repair = backend.repair is not None


def _tags(ctx: Any, config: Config) -> SlotTags | None:
    """Slot tags shared with the attention backend, where the configuration corrects attention at all."""
    blocks = config.blocks
    if blocks.alpha == 0.0 and blocks.beta == 0.0:
        return None
    backend = ctx.tp_worker.model_runner.attn_backend
    pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    tags = SlotTags(
        pool.k_buffer[0].shape[0], num_sinks=blocks.num_true_sinks, device=pool.k_buffer[0].device
    )
    if backend.tags is not None:
        tags.values_S = backend.tags  # a captured decode step reads this very tensor
    else:
        backend.tags, backend.alpha, backend.beta = tags.values_S, blocks.alpha, blocks.beta
    return tags


def _check_pool(pool: Any) -> None:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    from .layers.shared_pool import SharedKvPool

    supported = type(pool) is MHATokenToKVPool or isinstance(pool, SharedKvPool)
    if not supported or getattr(pool, "use_hnd", False):
        raise UnsupportedRope(
            f"KV pool {type(pool).__name__} is not supported; blocks are moved in token-major pools of plain "
            "multi-head or grouped-query attention (MHATokenToKVPool, layout NHD)"
        )
    if pool.store_dtype != pool.dtype:
        raise UnsupportedRope(
            f"KV stored as {pool.store_dtype} for {pool.dtype} is not supported; use --kv-cache-dtype auto"
        )


def _bos(model_config: Any) -> int | None:
    bos = getattr(model_config.hf_config, "bos_token_id", None)
    return bos if isinstance(bos, int) else None


def _tokens_of(config: Config, key: str, *, add_special_tokens: bool) -> tuple[int, ...] | None:
    """Tokens of a text in the `blocks` section; None where it holds none. Raises UnsupportedServer.

    add_special_tokens: it stands where a prompt begins.
    """
    from sglang.srt.runtime_context import get_model, get_serving
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    text = getattr(config.blocks, key)
    if not isinstance(text, str):
        return None
    serving, model = get_serving(), get_model()
    if serving.skip_tokenizer_init:
        raise UnsupportedServer(
            f"blocks.{key} is {short(text)}, but --skip-tokenizer-init leaves nothing to encode it with. "
            "Drop the flag, or the text."
        )
    tokenizer = get_tokenizer(
        serving.tokenizer_path,
        tokenizer_mode=serving.tokenizer_mode,
        trust_remote_code=model.trust_remote_code,
        revision=model.revision,
        tokenizer_backend=serving.tokenizer_backend,
    )
    return tuple(tokenizer.encode(text, add_special_tokens=add_special_tokens))


def _metric_labels(ctx: Any) -> dict[str, Any] | None:
    from sglang.srt.runtime_context import get_serving

    if ctx.tp_rank != 0 or not ctx.server_args.enable_metrics:
        return None  # every rank does the same, one counts
    return {"model_name": get_serving().served_model_name}
