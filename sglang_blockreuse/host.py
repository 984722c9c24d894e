"""Where SGLang is met: every name of the host in use, why, and the hooks that need no subclass.

Doors in order of preference: registry, subclass, hook. Hooks are installed by the radix-cache
factory, in the scheduler process and only when `--radix-cache-backend blockreuse` was chosen,
so an installed but unchosen package changes nothing.
"""

from __future__ import annotations

import inspect
import pkgutil
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

SUPPORTED_SGLANG = (">=0.5.23", "<0.6")

Kind = Literal["registry", "subclass", "hook", "call"]


@dataclass(frozen=True, slots=True)
class HostName:
    """One name of the host and what we rely on."""

    target: str  # dotted path
    kind: Kind
    reason: str
    parameters: tuple[str, ...] = ()  # parameters that must exist, in this order


_SRT = "sglang.srt."
CONTRACT: tuple[HostName, ...] = (
    HostName(
        _SRT + "arg_groups.choices.add_attention_backend_choices", "registry", "name on the command line"
    ),
    HostName(
        _SRT + "layers.attention.attention_registry.register_attention_backend",
        "registry",
        "attention backend",
        ("name",),
    ),
    HostName(
        _SRT + "mem_cache.registry.register_radix_cache_backend",
        "registry",
        "radix cache",
        ("name", "factory"),
    ),
    HostName(
        _SRT + "mem_cache.registry.create_unified_radix_cache",
        "call",
        "builds our subclass with the host's components",
        ("ctx", "cache_class"),
    ),
    HostName(_SRT + "server_args.ServerArgs.add_cli_args", "hook", "our two flags", ("parser",)),
    HostName(
        _SRT + "server_args.ServerArgs.from_cli_args", "hook", "their values reach every process", ("args",)
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint",
        "subclass",
        "publish exact KV only",
        ("self", "req", "up_to"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.on_release",
        "subclass",
        "let homes go",
        ("self", "req", "checkpointed"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.reset",
        "subclass",
        "companions are chosen anew for an empty tree",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.base_prefix_cache.BasePrefixCache.finish",
        "subclass",
        "a queued home was aborted",
        ("self", "handle", "outcome"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.match_prefix",
        "call",
        "block lookup",
        ("self", "params"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.path_device_indices",
        "call",
        "slots of a home",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.lock",
        "call",
        "homes stay",
        ("self", "node_id"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.unlock", "call", "homes go", ("self", "lock")
    ),
    HostName(
        _SRT + "mem_cache.radix_cache.RadixKey.__init__",
        "call",
        "tree key",
        ("self", "token_ids", "extra_key", "cache_salt"),
    ),
    HostName(
        _SRT + "managers.schedule_policy.PrefillAdder.add_one_req",
        "subclass",
        "hold, plan, admit",
        ("self", "req"),
    ),
    HostName(
        _SRT + "managers.schedule_policy.PrefillAdder.preempt_to_schedule",
        "subclass",
        "nobody is preempted for a request that is held",
        ("self", "req"),
    ),
    HostName(
        _SRT + "managers.schedule_policy.PrefillAdder._select_prefill_admission",
        "subclass",
        "charge computed tokens",
        ("self", "req"),
    ),
    HostName(
        _SRT + "managers.schedule_policy.PrefillAdder.add_chunked_req",
        "subclass",
        "the same for chunks",
        ("self", "req"),
    ),
    HostName(
        _SRT
        + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.build_additional_customized_info",
        "subclass",
        "usage in meta_info",
        ("self", "reqs"),
    ),
    HostName(
        _SRT + "managers.scheduler_components.output_streamer.SchedulerOutputStreamer.stream_output",
        "subclass",
        "homes answer nobody",
        ("self", "reqs", "return_logprob", "skip_req"),
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler.get_prefill_adder_class", "hook", "our admission", ("self",)
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler.get_output_streamer_class", "hook", "our streamer", ("self",)
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler._add_request_to_queue",
        "hook",
        "read marks, queue homes first",
        ("self", "req", "is_retracted"),
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler.send_abort_output",
        "hook",
        "homes answer nobody",
        ("self", "abort_req", "req"),
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler.get_internal_state",
        "hook",
        "state in /server_info",
        ("self", "recv_req"),
    ),
    HostName(
        _SRT + "managers.scheduler.Scheduler.run_batch",
        "hook",
        "results count what was computed of each request",
        ("self", "batch"),
    ),
    HostName(
        _SRT + "model_executor.forward_batch_info.ForwardBatch.init_new",
        "hook",
        "load reused KV, fold into rows",
        ("batch", "model_runner"),
    ),
    HostName(
        _SRT + "model_executor.forward_batch_info.ForwardBatch.__init__",
        "call",
        "a layer is run alone at start-up",
        ("self", "forward_mode", "batch_size", "seq_lens", "out_cache_loc", "positions"),
    ),
    HostName(_SRT + "model_executor.forward_context.ForwardContext", "call", "the same"),
    HostName(_SRT + "model_executor.forward_context.forward_context", "call", "the same", ("ctx",)),
    HostName(
        _SRT + "layers.logits_processor.LogitsMetadata.from_forward_batch",
        "hook",
        "one logit per request",
        ("forward_batch",),
    ),
    HostName(
        _SRT + "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.load_batch",
        "hook",
        "a captured prefill knows its fold",
        ("self", "forward_batch"),
    ),
    HostName(
        _SRT + "model_executor.model_runner.ModelRunner.forward",
        "hook",
        "unfold for sampling",
        ("self", "forward_batch"),
    ),
    HostName(
        _SRT + "arg_groups.resolution_hooks.register_resolution_hook",
        "registry",
        "settings are checked and marks are read, with and without a command line",
        ("name",),
    ),
    HostName(
        _SRT + "managers.tokenizer_manager.TokenizerManager._tokenize_one_request",
        "hook",
        "cut text at separators",
        ("self", "obj"),
    ),
    HostName(
        _SRT + "managers.tokenizer_manager.TokenizerManager._batch_tokenize_and_process",
        "hook",
        "the same for batches",
        ("self", "batch_size", "obj"),
    ),
    HostName(
        _SRT + "entrypoints.openai.serving_chat.OpenAIServingChat._process_messages",
        "hook",
        "mark content parts, hand spans on",
        ("self", "request", "is_multimodal"),
    ),
    HostName(
        _SRT + "entrypoints.openai.parallel_prompt_encode.parallel_prompt_encode",
        "hook",
        "cut the rendered chat template",
        ("tokenizer", "text", "encode_kwargs"),
    ),
    HostName(
        _SRT + "entrypoints.openai.serving_completions.OpenAIServingCompletion._prepare_echo_prompts",
        "hook",
        "no separator is echoed",
        ("self", "request"),
    ),
    HostName(
        _SRT + "entrypoints.openai.serving_completions.OpenAIServingCompletion._get_echo_text",
        "hook",
        "the same for streams",
        ("self", "request", "index"),
    ),
    HostName(
        _SRT + "entrypoints.openai.serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request",
        "hook",
        "counts what a request would have",
        ("self", "adapted_request", "request", "raw_request"),
    ),
    HostName(
        _SRT + "entrypoints.grpc_bridge.RuntimeHandle.tokenize",
        "hook",
        "the same over gRPC",
        ("self", "text", "add_special_tokens"),
    ),
    HostName(
        _SRT + "entrypoints.ollama.serving.OllamaServing.handle_chat",
        "hook",
        "separators are refused where nothing cuts them",
        ("self", "request", "raw_request"),
    ),
    HostName(
        _SRT + "managers.io_struct.GenerateReqInput",
        "call",
        "text, input_ids and sampling_params of a request",
    ),
    HostName(_SRT + "entrypoints.http_server.app", "call", "the application of tokenizer workers"),
    HostName(
        _SRT + "utils.hf_transformers_utils.get_tokenizer",
        "call",
        "tokenise the configured compile prefix",
        ("tokenizer_name",),
    ),
    HostName(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.forward_extend",
        "subclass",
        "attention on the CPU",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    HostName(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.forward_decode",
        "subclass",
        "the same for decode",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    HostName(
        _SRT + "layers.attention.triton_backend.TritonAttnBackend.forward_extend",
        "subclass",
        "attention on CUDA: virtual rows, probes, alpha and beta",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    HostName(
        _SRT + "layers.attention.flashinfer_backend.FlashInferAttnBackend.forward_extend",
        "subclass",
        "the same where kernels are FlashInfer's",
        ("self", "q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
    ),
    HostName(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.shared_read_ends",
        "subclass",
        "rows with alpha and beta read the page table in every layer",
        ("self", "fm"),
    ),
    HostName(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata_in_graph",
        "subclass",
        "their rows are found anew in every replay",
        ("self", "forward_batch"),
    ),
    HostName(
        _SRT + "runtime_context.get_platform", "call", "which generation of devices the base is chosen for"
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.ReqToTokenPool.alloc_rows",
        "call",
        "counts in req_generation how often a request slot was handed out, which tells rows apart",
        ("self", "need_size"),
    ),
    HostName(
        _SRT + "layers.attention.base_attn_backend.AttentionBackend.init_forward_metadata",
        "subclass",
        "plan rows once per forward",
        ("self", "forward_batch"),
    ),
    HostName(_SRT + "layers.radix_attention.RadixAttention", "call", "what a layer asks of attention"),
    HostName(_SRT + "layers.radix_attention.AttentionType", "call", "causal decoder layers only"),
    HostName(_SRT + "configs.model_config.AttentionArch", "call", "MLA and others are refused"),
    HostName(_SRT + "mem_cache.memory_pool.KVWriteLoc", "call", "where a forward writes its KV"),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.set_kv_buffer",
        "call",
        "write before attending",
        ("self", "layer", "loc_info"),
    ),
    HostName(
        _SRT + "distributed.get_tp_group",
        "call",
        "evidence of a probe and ids of homes are the same on every rank, and what fails on one fails on all",
    ),
    HostName(
        _SRT + "state_capturer.base.TopkCaptureOutput.finalize",
        "call",
        "what forwards before a step capture by slot is stored",
        ("self",),
    ),
    HostName(
        _SRT + "utils.common.require_mlp_sync",
        "call",
        "refuse ranks that exchange token counts before a fold",
    ),
    HostName(_SRT + "runtime_context.get_serving", "call", "whether the host cuts prompts that are too long"),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.insert",
        "subclass",
        "publish local paths in a namespace of their own, ranked for eviction",
        ("self", "params"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.inc_host_lock_ref",
        "call",
        "homes in host memory stay",
        ("self", "node_id"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.dec_host_lock_ref",
        "call",
        "and go",
        ("self", "node_id", "params"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._apply_cache_action",
        "subclass",
        "local paths are not copied to host memory",
        ("self", "action"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._evict_device_leaf",
        "subclass",
        "nor when they leave the device",
        ("self", "node_id", "tracker"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._apply_eviction_result",
        "call",
        "the same",
        ("self", "result"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache._accumulate_tracker",
        "call",
        "the same",
        ("self", "tracker", "delta"),
    ),
    HostName(
        _SRT + "mem_cache.unified_radix_cache.UnifiedRadixCache.attach_storage_backend",
        "subclass",
        "storage is named by the weights as they are then",
        ("self", "storage_backend"),
    ),
    HostName(
        _SRT
        + "mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.build_hicache_transfers",
        "call",
        "slots of homes in host memory",
        ("self", "component_type", "node_id", "phase"),
    ),
    HostName(
        _SRT
        + "mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.drop_subtree_no_host",
        "call",
        "a local path leaves without a copy",
        ("self", "node_id"),
    ),
    HostName(
        _SRT
        + "mem_cache.unified_cache.unified_tree_core_interface.UnifiedTreeCoreInterface.prefetch_anchor_info",
        "call",
        "whose namespace a node is in",
        ("self", "node_id"),
    ),
    HostName(
        _SRT + "mem_cache.unified_cache.cache_action.BackupKV",
        "call",
        "a copy to host memory that is asked for",
    ),
    HostName(
        _SRT + "mem_cache.unified_cache.components.base.CacheTransferPhase",
        "call",
        "which slots are asked for",
    ),
    HostName(
        _SRT + "mem_cache.pool_host.mha.MHATokenToKVPoolHost.load_to_device_per_layer",
        "call",
        "KV from host memory into a request's own slots",
        ("self", "device_pool", "host_indices", "device_indices", "layer_id", "io_backend"),
    ),
    HostName(
        _SRT + "mem_cache.pool_host.base.HostKVCache.storage_format_tag",
        "call",
        "the mark in storage keys",
    ),
    HostName(
        _SRT + "mem_cache.pool_host.base.HICACHE_HOST_MEMORY_RESERVE_BYTES",
        "call",
        "less is left free on a machine without GPUs",
    ),
    HostName(
        _SRT + "mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS",
        "registry",
        "host memory that no CUDA registers",
    ),
    HostName(
        _SRT + "managers.cache_controller.HiCacheController.move_indices",
        "call",
        "indices where the transfer wants them",
        ("self", "host_indices", "device_indices"),
    ),
    HostName(
        _SRT + "managers.cache_controller.LayerDoneCounter.wait_until",
        "call",
        "layers that are still on their way to the device",
        ("self", "threshold"),
    ),
    HostName(
        _SRT
        + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.begin_weight_update",
        "hook",
        "storage keeps KV of the old weights",
        ("self", "recv_req"),
    ),
    HostName(
        _SRT
        + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_disk",
        "hook",
        "the same",
        ("self", "recv_req"),
    ),
    HostName(
        _SRT
        + "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager.update_weights_from_ipc",
        "hook",
        "the same",
        ("self", "recv_req"),
    ),
    HostName(
        _SRT + "mem_cache.events.KVCacheEventRecorder.record_store",
        "subclass",
        "local paths are not advertised",
        ("self", "node"),
    ),
    HostName(
        _SRT + "mem_cache.events.KVCacheEventRecorder.record_remove",
        "subclass",
        "nor taken back",
        ("self", "node"),
    ),
    HostName(
        _SRT + "mem_cache.cache_init_params.CacheInitParams.__init__",
        "call",
        "the tree core whose recorder sees nodes",
        ("self", "tree_core_backend"),
    ),
    HostName(_SRT + "runtime_context.get_observability", "call", "whether events are asked for"),
    HostName(_SRT + "managers.schedule_batch.FINISH_ABORT", "call", "an aborted row is not published"),
    HostName(_SRT + "platforms.interface.SRTPlatform", "subclass", "SGLang on a plain CPU"),
    HostName(
        _SRT + "platforms.interface.SRTPlatform.get_kv_pool_cls",
        "subclass",
        "a pool in which layers share KV",
        ("self", "kind"),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._create_buffers",
        "subclass",
        "how that pool is carved; the platform's contract names it",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._build_kv_buffer_descs",
        "call",
        "described anew",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._init_data_ptrs_and_strides",
        "call",
        "addresses anew",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool._slot_move_pointer_buffers",
        "subclass",
        "a shared buffer is moved once",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.get_kv_size_bytes",
        "subclass",
        "a shared buffer is counted once",
        ("self",),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.move_kv_cache",
        "subclass",
        "the same for moves between slots",
        ("self", "tgt_loc", "src_loc"),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.get_cpu_copy",
        "subclass",
        "and for copies in host memory",
        ("self", "indices"),
    ),
    HostName(
        _SRT + "mem_cache.memory_pool.MHATokenToKVPool.load_cpu_copy",
        "subclass",
        "and back",
        ("self", "kv_cache_cpu", "indices"),
    ),
    HostName(_SRT + "runtime_context.get_server_args", "call", "the plan, where the pool is built"),
    HostName(
        _SRT + "platforms.interface.SRTPlatform.post_load_model",
        "subclass",
        "in the worker, before the pool is sized",
        ("self", "model"),
    ),
    HostName(
        _SRT + "model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes",
        "hook",
        "tokens of a plan whose layers share KV take fewer bytes",
        ("self", "available_bytes", "page_size"),
    ),
    HostName(
        _SRT + "platforms.interface.SRTPlatform.apply_server_args_defaults",
        "subclass",
        "defaults where the user gave none",
        ("self", "server_args"),
    ),
    HostName(
        _SRT + "platforms.interface.SRTPlatform.get_compile_backend",
        "subclass",
        "no C++ compiler at run time",
        ("self", "mode"),
    ),
    HostName(_SRT + "arg_groups.overrides.model_config_of", "call", "refuse models by what they are"),
    HostName(_SRT + "platforms.cpu.CpuDeviceMixin", "subclass", "device operations of the CPU"),
    HostName(
        _SRT + "environ.envs",
        "call",
        "eager input buffers hold one row per request; folded batches have more",
    ),
    HostName(
        _SRT + "layers.rotary_embedding.base.RotaryEmbedding.forward_native",
        "call",
        "rotary self-test",
        ("self", "positions", "query", "key"),
    ),
    HostName(
        _SRT + "layers.rotary_embedding.base.RotaryEmbedding._compute_cos_sin_cache",
        "call",
        "the table in float32, whatever the module cast it to",
    ),
)


@dataclass(frozen=True, slots=True)
class ContractResult:
    name: str
    kind: Kind
    reason: str
    ok: bool
    detail: str


class HostContractError(RuntimeError):
    """The installed SGLang lacks something we rely on, or did not apply a hook."""


def check_contract() -> list[ContractResult]:
    """Resolve every name of CONTRACT against the installed SGLang and compare parameters."""
    return [_check(entry) for entry in CONTRACT]


def _check(entry: HostName) -> ContractResult:
    try:
        found = pkgutil.resolve_name(entry.target)
    except (ImportError, AttributeError) as error:
        return ContractResult(entry.target, entry.kind, entry.reason, False, f"not found: {error}")
    if not entry.parameters:
        return ContractResult(entry.target, entry.kind, entry.reason, True, "")
    # hooked functions keep the original below __wrapped__, which signature() follows
    actual = list(inspect.signature(found).parameters)
    missing = [p for p in entry.parameters if p not in actual and p not in ("self", "cls")]
    detail = f"parameters {missing} are missing; it takes {actual}" if missing else ""
    return ContractResult(entry.target, entry.kind, entry.reason, not missing, detail)


def require_contract() -> None:
    """Raise HostContractError naming everything that does not hold."""
    broken = [r for r in check_contract() if not r.ok]
    if broken:
        raise HostContractError(
            "blockreuse: this SGLang does not offer what the extension needs:\n"
            + "\n".join(f"  {r.name} ({r.reason}): {r.detail}" for r in broken)
            + f"\nInstall sglang {','.join(SUPPORTED_SGLANG)}, or a version of sglang-blockreuse made for yours."
        )


def sum_over_ranks(values: Any) -> Any:
    """Sum of a tensor over the tensor-parallel ranks, the same on each of them."""
    from sglang.srt.distributed import get_tp_group

    return get_tp_group().all_reduce(values)


def any_over_ranks(flags: list[bool]) -> list[bool]:
    """Whether each flag is set on any tensor-parallel rank; a call of all ranks together where there are several.

    On the host, so that no rank waits for its device.
    """
    import torch
    from sglang.srt.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return flags
    found = torch.tensor(flags, dtype=torch.uint8)
    torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX, group=group.cpu_group)
    return [bool(flag) for flag in found.tolist()]


def shared_secret() -> str:
    """A random token that no client knows, the same on every tensor-parallel rank."""
    from sglang.srt.distributed import get_tp_group

    return str(get_tp_group().broadcast_object(secrets.token_hex(16)))


@contextmanager
def lone_forward(attn_backend: Any, positions_T: Any) -> Iterator[Any]:
    """Surroundings of one layer's forward outside of the model's: yields the host's ForwardBatch of one prompt.

    Its KV belongs into slots 1 to T, so nothing may be cached yet: a layer may write there.
    """
    import torch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

    num_tokens = len(positions_T)
    one = torch.ones(1, dtype=torch.int64, device=positions_T.device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND,
        batch_size=1,
        input_ids=torch.zeros_like(positions_T),
        req_pool_indices=0 * one,
        seq_lens=num_tokens * one,
        out_cache_loc=torch.arange(1, num_tokens + 1, device=positions_T.device),
        seq_lens_sum=num_tokens,
        positions=positions_T,
    )
    with forward_context(ForwardContext(attn_backend)):
        yield batch


def install_hooks() -> None:
    """Register and apply the scheduler-side hooks; idempotent. Raises HostContractError."""
    from sglang.srt.environ import envs
    from sglang.srt.plugins.hook_registry import HookType

    from . import hooks

    updater = "managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager."
    _install(
        {
            "managers.scheduler.Scheduler.get_prefill_adder_class": (
                hooks.prefill_adder_class,
                HookType.AFTER,
            ),
            "managers.scheduler.Scheduler.get_output_streamer_class": (
                hooks.output_streamer_class,
                HookType.AFTER,
            ),
            "managers.scheduler.Scheduler._add_request_to_queue": (
                hooks.add_request_to_queue,
                HookType.AROUND,
            ),
            "managers.scheduler.Scheduler.send_abort_output": (hooks.send_abort_output, HookType.AROUND),
            "managers.scheduler.Scheduler.get_internal_state": (hooks.internal_state, HookType.AFTER),
            "managers.scheduler.Scheduler.run_batch": (hooks.after_run_batch, HookType.AFTER),
            updater + "begin_weight_update": (hooks.begin_weight_update, HookType.AROUND),
            updater + "update_weights_from_disk": (hooks.update_weights_from_disk, HookType.AROUND),
            updater + "update_weights_from_ipc": (hooks.update_weights_from_ipc, HookType.AROUND),
            "model_executor.forward_batch_info.ForwardBatch.init_new": (
                hooks.init_forward_batch,
                HookType.AROUND,
            ),
            "layers.logits_processor.LogitsMetadata.from_forward_batch": (
                hooks.logits_metadata,
                HookType.AROUND,
            ),
            "model_executor.runner.prefill_cuda_graph_runner.PrefillCudaGraphRunner.load_batch": (
                hooks.after_load_batch,
                HookType.AFTER,
            ),
            "model_executor.model_runner.ModelRunner.forward": (hooks.after_model_forward, HookType.AFTER),
        }
    )
    # one row per request is all that the eager runner's static input buffers hold
    envs.SGLANG_EAGER_INPUT_NO_COPY.set(True)


def install_pool_sizing(hook: Callable[..., Any]) -> None:
    """Register and apply a hook around the sizing of the KV pool; idempotent. Raises HostContractError."""
    from sglang.srt.plugins.hook_registry import HookType

    target = "model_executor.pool_configurator.DefaultPoolConfigurator.calculate_pool_sizes"
    _install({target: (hook, HookType.AROUND)})


def install_tokenizer_hooks() -> None:
    """Register and apply the hooks of processes that tokenise; idempotent. Raises HostContractError."""
    from sglang.srt.plugins.hook_registry import HookType

    from . import prompt_hooks, tokenizer_hooks

    manager, openai = "managers.tokenizer_manager.TokenizerManager.", "entrypoints.openai."
    _install(
        {
            manager + "_tokenize_one_request": (tokenizer_hooks.tokenize_one, HookType.AROUND),
            manager + "_batch_tokenize_and_process": (tokenizer_hooks.tokenize_batch, HookType.AROUND),
            openai + "serving_chat.OpenAIServingChat._process_messages": (
                tokenizer_hooks.process_messages,
                HookType.AROUND,
            ),
            openai + "parallel_prompt_encode.parallel_prompt_encode": (
                tokenizer_hooks.encode_prompt,
                HookType.AROUND,
            ),
            openai + "serving_completions.OpenAIServingCompletion._prepare_echo_prompts": (
                prompt_hooks.echo_prompts,
                HookType.AFTER,
            ),
            openai + "serving_completions.OpenAIServingCompletion._get_echo_text": (
                prompt_hooks.echo_text,
                HookType.AFTER,
            ),
            openai + "serving_tokenize.OpenAIServingTokenize._handle_non_streaming_request": (
                prompt_hooks.tokenize,
                HookType.AROUND,
            ),
            "entrypoints.grpc_bridge.RuntimeHandle.tokenize": (prompt_hooks.tokenize_grpc, HookType.AROUND),
            "entrypoints.ollama.serving.OllamaServing.handle_chat": (
                prompt_hooks.ollama_chat,
                HookType.AROUND,
            ),
        }
    )


def _install(targets: dict[str, tuple[Callable[..., Any], Any]]) -> None:
    """Register and apply hooks below `sglang.srt`, on top of what other plug-ins hooked there.

    SGLang logs and goes on where a hook does not apply. We do not: raises HostContractError.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry

    for target, (hook, kind) in targets.items():
        name = _SRT + target
        if any(known is hook for _, known, _ in HookRegistry._hooks[name]):
            continue
        if name in HookRegistry._patched:
            # another plug-in was there first, and SGLang applies the hooks of a target once only
            HookRegistry._apply_target(name, [(kind, hook, None)])
        HookRegistry.register(name, hook, kind)
    HookRegistry.apply_hooks()
    missing = [t for t in targets if _SRT + t not in HookRegistry._patched]
    if missing:
        raise HostContractError(
            f"blockreuse: SGLang did not apply the hooks on {', '.join(missing)}. "
            "Another plug-in may have replaced them; run `sglang-blockreuse check`."
        )
