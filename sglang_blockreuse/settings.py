"""From SGLang's server arguments to our configuration, in whichever process asks."""

from __future__ import annotations

from typing import Any

from .config import Config, ConfigError, load_config
from .layers.plan_loader import load_plan


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
    config = config_of(server_args)
    if config.layers.plan is not None:
        load_plan(config.layers.plan)


def _backends(server_args: Any) -> set[str | None]:
    """Names that the server will look up, as far as the command line decides them."""
    from sglang.srt.platforms import current_platform

    attention = server_args.attention_backend
    if attention is None and current_platform.is_out_of_tree():
        attention = current_platform.get_default_attention_backend()
    return {attention, server_args.radix_cache_backend}
