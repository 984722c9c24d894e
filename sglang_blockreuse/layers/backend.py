"""The attention backend `blockreuse`: one name, built on what serves virtual rows on this device.

A row of a folded batch reads keys that another row of the same forward writes, so the base must
write K/V before it attends, and its index buffers must hold more rows than there are requests.
"""

from __future__ import annotations

import logging
from typing import Any

from ..config import Config, ConfigError
from ..errors import short
from ..settings import config_of, runnable_plan
from .plan import BoundPlan

logger = logging.getLogger(__name__)

# Index buffers are sized for this many rows per request slot: 8 bytes each, a few MB at most.
ROWS_PER_REQUEST = 256


def create_attention_backend(runner: Any) -> Any:
    """Build the backend for a host ModelRunner. Raises ConfigError where no base fits."""
    config = config_of(runner.server_args)
    plan = bind_layer_plan(config, runner.model_config)
    for warning in plan.warnings if plan else ():
        logger.warning("blockreuse: %s", warning)
    device = str(runner.device).split(":")[0]
    backend = _BASES.get(device, _unsupported)(runner, config, plan)
    logger.info(
        "blockreuse: attention on %s by %s, layer plan %s",
        device,
        type(backend).__name__,
        config.layers.plan if plan else "none",
    )
    return backend


def bind_layer_plan(config: Config, model_config: Any) -> BoundPlan | None:
    """The plan bound to the model, or None where none was chosen. Raises PlanError or ConfigError."""
    plan = runnable_plan(config)
    if plan is None:
        return None
    architectures = getattr(model_config.hf_config, "architectures", None) or [None]
    return plan.bind(model_config.num_hidden_layers, architectures[0])


def _cpu(runner: Any, config: Config, plan: BoundPlan | None) -> Any:
    if config.kernels not in ("auto", "reference"):
        raise ConfigError(
            f"kernels is {config.kernels!r}, but on the CPU it must be auto or reference: "
            f"{config.kernels} needs a CUDA device."
        )
    from .cpu_backend import CpuAttnBackend

    return CpuAttnBackend(runner, plan, timing=config.layers.timing)


def _cuda(runner: Any, config: Config, plan: BoundPlan | None) -> Any:
    if plan is not None and not plan.is_dense:
        raise ConfigError(
            f"layer plan {short(config.layers.plan)} (--layer-plan or layers.plan) has layers that are not dense, or "
            "not on KV of their own (kv_from), which is served on the CPU only in this version. Choose full on CUDA."
        )
    if config.kernels == "reference":
        raise ConfigError("kernels is 'reference', but on CUDA it must be auto, triton or flashinfer.")
    if config.kernels == "flashinfer":
        return _flashinfer(runner)
    return _triton(runner)


def _triton(runner: Any) -> Any:
    import torch
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    class BlockReuseTritonBackend(TritonAttnBackend):
        """SGLang's Triton backend with index buffers for virtual rows; it writes K/V first."""

        def __init__(self, runner: Any) -> None:
            num_rows = runner.req_to_token_pool.size * ROWS_PER_REQUEST + 1
            self.qo_indptr: torch.Tensor
            self.mask_indptr: torch.Tensor
            super().__init__(
                runner, kv_indptr_buf=torch.zeros(num_rows, dtype=torch.int32, device=runner.device)
            )
            self.qo_indptr = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)
            self.mask_indptr = torch.zeros(num_rows, dtype=torch.int64, device=runner.device)

        def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
            return fits_prefill_graph(forward_batch)

    return BlockReuseTritonBackend(runner)


def _flashinfer(runner: Any) -> Any:
    import torch
    from sglang.srt.environ import envs
    from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend

    class BlockReuseFlashInferBackend(FlashInferAttnBackend):
        """SGLang's FlashInfer backend on its paged path; the ragged one writes K/V after it attends."""

        def __init__(self, runner: Any) -> None:
            envs.SGLANG_FLASHINFER_USE_PAGED.set(True)
            num_rows = runner.req_to_token_pool.size * ROWS_PER_REQUEST
            super().__init__(
                runner,
                kv_indptr_buf=torch.zeros(num_rows + 1, dtype=torch.int32, device=runner.device),
                kv_last_page_len_buf=torch.ones(num_rows, dtype=torch.int32, device=runner.device),
                init_new_workspace=runner.init_new_workspace,
            )
            # the prefill planner holds this very list
            self.qo_indptr[0] = torch.zeros(num_rows + 1, dtype=torch.int32, device=runner.device)

        def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
            return fits_prefill_graph(forward_batch)

    return BlockReuseFlashInferBackend(runner)


def fits_prefill_graph(forward_batch: Any) -> bool:
    """A captured prefill has static buffers for one row per request, which a folded batch exceeds."""
    from ..blocks.rows import fold_of

    return fold_of(forward_batch) is None


def _unsupported(runner: Any, config: Config, plan: BoundPlan | None) -> Any:
    raise ConfigError(
        f"attention backend blockreuse: device {runner.device!r} is not supported; "
        f"supported: {', '.join(sorted(_BASES))}. Choose another --attention-backend."
    )


_BASES = {"cpu": _cpu, "cuda": _cuda}
