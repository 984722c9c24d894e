"""Entry point `sglang.srt.plugins`: puts the name `blockreuse` into SGLang's registries.

Runs in every SGLang process, before the command line is parsed. Installing the package changes
nothing: what the names stand for is imported when somebody chooses them.
"""

from __future__ import annotations

from typing import Any

NAME = "blockreuse"


def register() -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.mem_cache.registry import get_radix_cache_factory, register_radix_cache_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if get_radix_cache_factory(NAME) is not None:
        return  # one process, several loads
    add_attention_backend_choices([NAME])
    register_attention_backend(NAME)(_attention_backend)
    register_radix_cache_backend(NAME, _radix_cache)
    register_resolution_hook("handle_other_validations")(_resolve)
    for step in ("handle_model_specific_adjustments", "handle_deterministic_inference"):
        register_resolution_hook(step)(_explain)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.add_cli_args", _add_cli_args, HookType.AFTER)
    HookRegistry.register("sglang.srt.server_args.ServerArgs.from_cli_args", _from_cli_args, HookType.AROUND)


def _attention_backend(runner: Any) -> Any:
    from .layers.backend import create_attention_backend

    return create_attention_backend(runner)


def _radix_cache(ctx: Any) -> Any:
    from .factory import create_radix_cache

    return create_radix_cache(ctx)


def _resolve(server_args: Any, previous: Any) -> None:
    """The one step that every launch takes in the process that tokenises, with or without a command line."""
    previous(server_args)
    if server_args.attention_backend == NAME:
        from .layers.backend import check_base

        check_base(server_args)
    if server_args.radix_cache_backend == NAME:
        from .settings import prepare_tokenizer

        prepare_tokenizer(server_args)


def _explain(server_args: Any, previous: Any) -> None:
    """Some models and settings are served by attention backends that SGLang knows by name, and ours is none of them."""
    try:
        previous(server_args)
    except (AssertionError, ValueError) as error:
        if server_args.attention_backend != NAME or NAME not in str(error):
            raise
        from .config import ConfigError

        raise ConfigError(
            f"attention backend blockreuse cannot serve this model or setting: {error} Choose one of those backends, "
            "and with it another --radix-cache-backend, or drop the setting."
        ) from error


def _add_cli_args(result: Any, parser: Any) -> None:
    group = parser.add_argument_group("sglang-blockreuse")
    group.add_argument(
        "--blockreuse-config",
        metavar="PATH",
        help="Configuration of the extension, YAML or JSON; default: the file named by SGLANG_BLOCKREUSE_CONFIG.",
    )
    group.add_argument(
        "--layer-plan",
        metavar="NAME|PATH",
        help="Layer plan for decode: a shipped plan or a file. Overrides layers.plan of the configuration.",
    )


def _from_cli_args(original: Any, cls: type, args: Any) -> Any:
    server_args = original(cls, args)
    chosen = {key: getattr(args, key, None) for key in ("blockreuse_config", "layer_plan")}
    # an underscore attribute rides along when SGLang hands the record to its processes
    server_args._blockreuse = chosen
    if NAME in (server_args.radix_cache_backend, server_args.attention_backend) or any(chosen.values()):
        from .settings import check_cli

        check_cli(server_args)
    return server_args
