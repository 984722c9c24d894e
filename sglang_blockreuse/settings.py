"""From SGLang's server arguments to our configuration, in whichever process asks."""

from __future__ import annotations

from typing import Any

from .config import Config, ConfigError, load_config
from .errors import short
from .layers.plan_loader import LayerPlan, load_plan

TOKENIZER_APP = "sglang_blockreuse.http_app:app"


def config_of(server_args: Any) -> Config:
    """The configuration of a server. Raises ConfigError."""
    chosen = getattr(server_args, "_blockreuse", None) or {}
    return load_config(chosen.get("blockreuse_config"), layer_plan=chosen.get("layer_plan"))


def check_cli(server_args: Any) -> None:
    """Fail while the command line is being read, before any model is loaded."""
    chosen = [flag for flag, value in server_args._blockreuse.items() if value]
    if chosen and "blockreuse" not in _backends(server_args):
        raise ConfigError(
            f"--{chosen[0].replace('_', '-')} is given, but neither --attention-backend nor --radix-cache-backend "
            "is blockreuse, so nothing would read it. Launch with `sglang-blockreuse serve`, or name the backends."
        )
    require_namespaces(runnable_plan(config_of(server_args)), server_args)
    if server_args.radix_cache_backend == "blockreuse" and server_args.page_size not in (None, 1):
        raise ConfigError(
            f"--page-size is {server_args.page_size}, but blocks are cut at single tokens. "
            "Use --page-size 1 with --radix-cache-backend blockreuse."
        )


def prepare_tokenizer(server_args: Any) -> None:
    """Make marks in text readable in the processes that tokenise. Raises ConfigError where they cannot be."""
    from sglang.srt.environ import envs

    from .host import install_tokenizer_hooks

    blocks = config_of(server_args).blocks
    keys = [key for key in ("separator", "parts") if getattr(blocks, key)]
    if keys and envs.SGLANG_RUST_SERVER.get():
        raise ConfigError(
            f"blocks.{keys[0]} marks blocks in text, but with SGLANG_RUST_SERVER=1 text is tokenised where no "
            "plug-in runs. Unset the variable, or leave the key out and send input_ids with blockreuse_spans."
        )
    if keys and (server_args.smg_grpc_mode or server_args.grpc_mode):
        raise ConfigError(
            f"blocks.{keys[0]} marks blocks in text, but with --smg-grpc-mode (--grpc-mode) the gateway tokenises, "
            "where no plug-in runs. Drop the flag (--grpc-port serves gRPC beside HTTP), or leave the key out and send "
            "input_ids with blockreuse_spans."
        )
    if keys and server_args.skip_tokenizer_init:
        raise ConfigError(
            f"blocks.{keys[0]} marks blocks in text, but --skip-tokenizer-init takes the tokeniser away. "
            "Drop the flag, or leave the key out and send input_ids with blockreuse_spans."
        )
    if (server_args.tokenizer_worker_num or 1) > 1:
        path = envs.SGLANG_HTTP_SERVER_APP_PATH
        if keys and path.is_set() and path.get() != TOKENIZER_APP:
            raise ConfigError(
                f"SGLANG_HTTP_SERVER_APP_PATH is {short(path.get())}, so tokenizer workers would not read "
                f"blocks.{keys[0]}. Unset it, use --tokenizer-worker-num 1, or import {TOKENIZER_APP} in it."
            )
        if not path.is_set():
            path.set(TOKENIZER_APP)
    install_tokenizer_hooks()


def runnable_plan(config: Config) -> LayerPlan | None:
    """The chosen plan, or None. Raises PlanError; what a device cannot run is refused where the device is known."""
    return None if config.layers.plan is None else load_plan(config.layers.plan)


def require_namespaces(plan: LayerPlan | None, server_args: Any) -> None:
    """KV that sparse decode wrote must not be found by requests that expect a full prefill's."""
    if plan is None or all(entry.role == "dense" and entry.kv_from is None for entry in plan.spec.layers):
        return
    if server_args.radix_cache_backend != "blockreuse":
        raise ConfigError(
            f"layer plan {short(plan.name)} has layers that are not dense on their own KV, and --radix-cache-backend "
            f"is {server_args.radix_cache_backend}, which would publish their KV as if it were a full prefill's. "
            "Use --radix-cache-backend blockreuse with it."
        )


def _backends(server_args: Any) -> set[str | None]:
    """Names that the server will look up, as far as the command line decides them."""
    from sglang.srt.platforms import current_platform

    attention = server_args.attention_backend
    if attention is None and current_platform.is_out_of_tree():
        attention = current_platform.get_default_attention_backend()
    return {attention, server_args.radix_cache_backend}
