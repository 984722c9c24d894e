"""The attention backend `blockreuse`: one name, built on what serves virtual rows on this device.

A row of a folded batch reads keys that another row of the same forward writes, so the base must
write K/V before it attends, and its index buffers must hold more rows than there are requests.
"""

from __future__ import annotations

import logging
from typing import Any

from ..config import Config
from ..settings import config_of, runnable_plan
from .bases import Base, Machine, Model, base_of, is_corrected, require_served
from .plan import BoundPlan

logger = logging.getLogger(__name__)


def create_attention_backend(runner: Any) -> Any:
    """Build the backend for a host ModelRunner. Raises ConfigError where no base fits."""
    from sglang.srt.runtime_context import get_parallel

    config = config_of(runner.server_args)
    plan = bind_layer_plan(config, runner.model_config)
    for warning in plan.warnings if plan else ():
        logger.warning("blockreuse: %s", warning)
    base = base_of(config.kernels, Machine.of(runner.device))
    model = Model.of(runner.model_config, runner.sliding_window_size, num_ranks=get_parallel().tp_size)
    require_served(config, plan, base, model)
    backend = _build(base, runner, config, plan)
    logger.info(
        "blockreuse: attention on %s by %s, layer plan %s",
        runner.device,
        type(backend).__name__,
        config.layers.plan if plan else "none",
    )
    return backend


def check_base(server_args: Any) -> None:
    """Refuse, before weights are loaded, what the base of this server will not serve. Raises ConfigError."""
    from sglang.srt.arg_groups.overrides import model_config_of, resolved_view

    config = config_of(server_args)
    view = resolved_view(server_args)
    base = base_of(config.kernels, Machine.of(view.device))
    model_config = model_config_of(server_args)
    model = Model.of(model_config, num_ranks=view.tp_size)
    require_served(config, bind_layer_plan(config, model_config), base, model)


def bind_layer_plan(config: Config, model_config: Any) -> BoundPlan | None:
    """The plan bound to the model, or None where none was chosen. Raises PlanError or ConfigError."""
    plan = runnable_plan(config)
    if plan is None:
        return None
    architectures = getattr(model_config.hf_config, "architectures", None) or [None]
    return plan.bind(model_config.num_hidden_layers, architectures[0])


def _build(base: Base, runner: Any, config: Config, plan: BoundPlan | None) -> Any:
    if base == "cpu":
        from .cpu_backend import CpuAttnBackend

        return CpuAttnBackend(runner, plan, kernels=config.kernels, timing=config.layers.timing)
    backend = cuda_class(base)(runner)
    backend.max_captured_rows = _max_captured_rows(runner)
    if is_corrected(config):
        backend.correct(runner, alpha=config.blocks.alpha, beta=config.blocks.beta)
    if plan is not None and plan.is_sparse:
        backend.follow(runner, plan, kernels=config.kernels)
    return backend


def _max_captured_rows(runner: Any) -> int:
    """Rows that a captured prefill takes in place of requests.

    Only the host's breakable graphs run attention and the language model's head on the batch as it is; in the others
    both are captured for one row per request.
    """
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.runtime_context import get_exec

    config = get_exec().graph.cuda_graph_config
    is_breakable = config is not None and config.prefill.backend == Backend.BREAKABLE
    return int(runner.req_to_token_pool.size) if is_breakable else 0


def cuda_class(base: Base) -> Any:
    """Imported when chosen: each pulls in kernels that other devices may not have."""
    if base == "triton":
        from .triton_base import BlockReuseTritonBackend as found
    elif base == "flashinfer":
        from .flashinfer_base import BlockReuseFlashInferBackend as found
    else:
        from .fa3_base import BlockReuseFa3Backend as found
    return found
