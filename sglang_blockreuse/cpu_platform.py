"""The CPU platform: SGLang on a plain CPU, on PyTorch's operators alone.

It gives defaults where the user gave none and refuses, by name, what would need compiled kernels.
SGLang asks for its platform while `sglang` itself is being imported, so only sglang.srt.platforms is imported
here, and who imports this file imports `sglang` first.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from .cpu_defaults import MAX_RUNNING_REQUESTS, free_memory_bytes, kv_pool_tokens, set_thread_defaults

ATTENTION_BACKENDS = ("blockreuse", "torch_native")
KV_CACHE_DTYPES = ("auto", "bf16", "bfloat16")
# flag of the host memory pool -> SGLang's default, which needs kernels, and what works without
HOST_MEMORY = {
    "hicache_io_backend": ("kernel", "direct"),
    "hicache_mem_layout": ("page_first", "layer_first"),
}
# each of them starts and then fails in code of SGLang's that takes an accelerator for granted
FLAGS_THAT_NEED_AN_ACCELERATOR = {
    "speculative_algorithm": "verifies drafts with compiled kernels",
    "lora_paths": "pins the adapters' index buffers for an accelerator",
    "enable_lora": "pins the adapters' index buffers for an accelerator",
}


class UnsupportedOnCpuError(ValueError):
    """A setting or a model needs an accelerator or compiled kernels."""


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """SGLang's CPU device operations, without graph capture, Triton or compiled kernels."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities()

    def get_device(self, device_id: int = 0) -> str:
        # SGLang splits this name at ":", so it must be a string and not a torch.device
        return "cpu"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKENDS[0]

    def get_compile_backend(self, mode: str | None = None) -> str:
        # with several ranks SGLang compiles the embedding's mask at the first step, and inductor would
        # need a C++ compiler and minutes for a handful of small operations
        return "eager"

    def get_current_memory_usage(self, device: Any = None) -> float:
        """Bytes that are not free for this process; total minus this is what SGLang takes as free."""
        return float(self.get_device_total_memory() - free_memory_bytes())

    def get_quantization_config(self, quantization: str) -> None:
        refuse_quantization(quantization)

    def get_kv_pool_cls(self, *, kind: str) -> type | None:
        """The host's own, unless the server's layer plan has layers without KV of their own."""
        from sglang.srt.runtime_context import get_server_args

        kv_layers = shared_kv_layers(get_server_args())
        if kind != "mha" or kv_layers is None:
            return None
        from .layers.shared_pool import pool_class

        return pool_class(kv_layers)

    def post_load_model(self, model: Any) -> None:
        """Let the host's sizing know what a token takes, before it sizes the pool, and give it a host memory pool."""
        from sglang.srt.runtime_context import get_server_args

        if get_server_args().enable_hierarchical_cache:
            from .cpu_host_memory import install

            install()
        kv_layers = shared_kv_layers(get_server_args())
        if kv_layers is not None:
            from .host import install_pool_sizing
            from .layers.shared_pool import sizing

            install_pool_sizing(sizing(kv_layers))

    def apply_server_args_defaults(self, server_args: Any) -> None:
        from sglang.srt.arg_groups.overrides import model_config_of

        model = model_config_of(server_args)
        given = server_args._raw_input  # what the user asked for, before SGLang's own defaults
        refuse_build()
        refuse_flags(server_args, given)
        refuse_model(model)
        if given["attention_backend"] is None:
            server_args.attention_backend = self.get_default_attention_backend()
        if server_args.enable_hierarchical_cache:
            for flag, (_, value) in HOST_MEMORY.items():
                setattr(server_args, flag, value)
        if server_args.max_running_requests is None:
            server_args.max_running_requests = MAX_RUNNING_REQUESTS
        if server_args.max_total_tokens is None:
            server_args.max_total_tokens = kv_pool_tokens(
                context_len=model.context_len,
                max_running_requests=server_args.max_running_requests,
                bytes_per_token=kv_bytes_per_token(model, server_args),
                free_bytes=free_memory_bytes() // num_ranks(server_args),
            )
        # an idle scheduler would spin on a core that requests, tokenizer and other programs need
        server_args.sleep_on_idle = True
        set_thread_defaults(num_ranks(server_args))


def refuse_flags(server_args: Any, given: dict[str, Any]) -> None:
    """Raise UnsupportedOnCpuError, which names flag, value and way out, for a flag that cannot work."""
    device = server_args.device
    if device != "cpu":
        raise UnsupportedOnCpuError(
            f"--device {device}: no such accelerator was found, and the CPU platform serves only cpu. "
            "Leave --device away, or check the driver and the PyTorch build."
        )
    for flag in ("attention_backend", "prefill_attention_backend", "decode_attention_backend"):
        _refuse_other_than(ATTENTION_BACKENDS, flag, given[flag] or ATTENTION_BACKENDS[0])
    _refuse_other_than(KV_CACHE_DTYPES, "kv_cache_dtype", server_args.kv_cache_dtype)
    if server_args.enable_hierarchical_cache:
        for flag, (default, value) in HOST_MEMORY.items():
            if given[flag] != default:  # SGLang does not say whether a default was asked for
                _refuse_other_than((value,), flag, given[flag])
    for flag, reason in FLAGS_THAT_NEED_AN_ACCELERATOR.items():
        value = getattr(server_args, flag)
        if value:
            raise UnsupportedOnCpuError(
                f"{_spelled(flag, value)} {reason}. "
                "Leave it away on the CPU platform, or use a machine with an accelerator."
            )


def refuse_model(model: Any) -> None:
    """Raise UnsupportedOnCpuError for a model whose kernels need an accelerator."""
    from sglang.srt.configs.model_config import AttentionArch

    # from --quantization or from the checkpoint itself
    if model.quantization is not None:
        refuse_quantization(model.quantization)
    if model.attention_arch != AttentionArch.MHA:
        raise UnsupportedOnCpuError(
            f"{model.hf_config.architectures[0]} uses {AttentionArch(model.attention_arch).name} attention, whose "
            "kernels need an accelerator. The CPU platform serves models with multi-head or grouped-query "
            "attention (Llama, Qwen2, Qwen3, …)."
        )


def refuse_build() -> None:
    """Raise UnsupportedOnCpuError where PyTorch lacks what SGLang's processes meet through on a CPU."""
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
        raise UnsupportedOnCpuError(
            f"torch {torch.__version__} was built without gloo, which SGLang's process groups need on a CPU. "
            "Install a standard build of PyTorch."
        )


def refuse_quantization(quantization: str) -> None:
    raise UnsupportedOnCpuError(
        f"quantization {quantization!r} needs compiled kernels, which the CPU platform does not have. "
        "Serve an unquantised checkpoint (bfloat16 or float32), or use a machine with an accelerator."
    )


def _refuse_other_than(allowed: tuple[str, ...], flag: str, value: str) -> None:
    if value not in allowed:
        raise UnsupportedOnCpuError(
            f"{_spelled(flag, value)} needs an accelerator or compiled kernels. "
            f"Allowed on the CPU platform: {', '.join(allowed)}."
        )


def _spelled(flag: str, value: Any) -> str:
    """A field of ServerArgs as the user writes it."""
    words = f"--{flag.replace('_', '-')}"
    return f"{words} {value}" if isinstance(value, str) else words


def num_ranks(server_args: Any) -> int:
    """Scheduler processes that share this machine."""
    ranks = server_args.tp_size * server_args.pp_size * server_args.dp_size
    return max(1, int(ranks) // max(1, int(server_args.nnodes)))


def kv_bytes_per_token(model: Any, server_args: Any) -> int:
    """Bytes of K and V that one token takes in the pool of one rank."""
    layers = -(-model.num_attention_layers // server_args.pp_size)
    kv_layers = shared_kv_layers(server_args)
    if kv_layers is not None:
        layers = len(set(kv_layers))
    heads = model.get_num_kv_heads(server_args.tp_size)
    return int(layers * heads * (model.head_dim + model.v_head_dim) * model.dtype.itemsize)


def shared_kv_layers(server_args: Any) -> tuple[int, ...] | None:
    """The layer whose KV each layer reads under the server's layer plan; None where each reads its own.

    Raises PlanError or ConfigError.
    """
    from sglang.srt.arg_groups.overrides import model_config_of

    from .layers.backend import bind_layer_plan
    from .settings import config_of

    if (server_args.attention_backend or ATTENTION_BACKENDS[0]) != ATTENTION_BACKENDS[0]:
        return None  # another backend reads no plan
    plan = bind_layer_plan(config_of(server_args), model_config_of(server_args))
    return plan.kv_layers if plan is not None and plan.shared_layers else None
