"""Which base the attention backend `blockreuse` is built on, and what is refused on it before weights are loaded.

    base        class of the host       taken for `kernels`
    cpu         (our own)               auto, reference                        on a CPU
    fa3         FlashAttentionBackend   auto on sm90                           on CUDA
    flashinfer  FlashInferAttnBackend   flashinfer, and auto on sm100          on CUDA
    triton      TritonAttnBackend       triton, and auto on every other device

auto follows SGLang's own default, where rows of one request may read what the same forward writes: its paged
FlashInfer path stands in for trtllm_mha on sm100 and its Triton class for FlashInfer's ragged path elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from ..config import Config, ConfigError
from ..errors import short
from ..kernels.dispatch import FLASHINFER_HEAD_DIMS, MAX_GROUP, MAX_HEAD_DIM
from .plan import BoundPlan
from .plan_support import unsupported_on_cuda

Base = Literal["cpu", "triton", "flashinfer", "fa3"]


@dataclass(frozen=True, slots=True)
class Machine:
    """What decides the base: the kind of device, and on CUDA its generation in the host's words."""

    device: str
    is_sm90: bool = False
    is_sm100: bool = False

    @classmethod
    def of(cls, device: str) -> Machine:
        """`device` as the host spells it, with or without an index."""
        from sglang.srt.runtime_context import get_platform

        kind = str(device).split(":")[0]
        if kind != "cuda":
            return cls(kind)
        platform = get_platform()
        return cls(kind, bool(platform.is_hopper_with_cuda_12_3), bool(platform.is_sm100))


def base_of(kernels: str, machine: Machine) -> Base:
    """Raises ConfigError for a device or a choice that no base serves."""
    if machine.device == "cpu":
        if kernels not in ("auto", "reference"):
            raise ConfigError(
                f"kernels is {kernels!r}, but on the CPU it must be auto or reference: "
                f"{kernels} needs a CUDA device."
            )
        return "cpu"
    if machine.device != "cuda":
        raise ConfigError(
            f"attention backend blockreuse: device {machine.device!r} is not supported; supported: cpu, cuda. "
            "Choose another --attention-backend."
        )
    if kernels == "reference":
        raise ConfigError("kernels is 'reference', but on CUDA it must be auto, triton or flashinfer.")
    if kernels in ("triton", "flashinfer"):
        return "triton" if kernels == "triton" else "flashinfer"
    if machine.is_sm90:
        return "fa3"
    return "flashinfer" if machine.is_sm100 else "triton"


@dataclass(frozen=True, slots=True)
class Model:
    """What of a model decides whether a base serves it."""

    num_q_heads: int
    num_kv_heads: int
    head_dims: tuple[int, int]  # of keys and of values
    sliding_window: int | None  # tokens
    has_sinks: bool  # of its own, beside the tokens
    num_ranks: int = 1  # that share its heads

    @classmethod
    def of(cls, config: Any, sliding_window: int | None = None, *, num_ranks: int) -> Model:
        """`config` is the host's model configuration. A window given here was asked of the loaded model; before that
        only hybrids are known to have one, because other configurations name windows that their model ignores."""
        if sliding_window is None and config.is_hybrid_swa:
            sliding_window = config.sliding_window_size
        return cls(
            num_q_heads=config.num_attention_heads,
            num_kv_heads=max(config.get_total_num_kv_heads(), 1),
            head_dims=(config.head_dim, config.v_head_dim),
            sliding_window=sliding_window,
            has_sinks=config.has_attention_sinks,
            num_ranks=num_ranks,
        )


def require_served(config: Config, plan: BoundPlan | None, base: Base, model: Model) -> None:
    """Raises ConfigError with every reason why `base` cannot serve this configuration of this model."""
    if base == "cpu":
        return  # refuses in words of its own: cpu_platform.py, cpu_backend.py, plan_support.py
    reasons = list(_refusals(config, plan, base, model))
    if reasons:
        raise ConfigError(f"attention backend blockreuse on CUDA ({base}): {'; '.join(reasons)}.")


def _refusals(config: Config, plan: BoundPlan | None, base: Base, model: Model) -> Iterator[str]:
    if plan is not None and not plan.is_dense:
        reasons = [*unsupported_on_cuda(plan, model.num_ranks), *_unattended("a layer plan", base, model)]
        if reasons:
            yield (
                f"layer plan {short(config.layers.plan)} (--layer-plan or layers.plan) is not served on CUDA: "
                f"{'; '.join(reasons)}. Change the plan, or choose full"
            )
    if config.layers.timing:
        yield "layers.timing reads the host's clock within a step, and a captured step has none. Set it to false"
    if base == "flashinfer" and model.sliding_window is not None:
        yield (
            f"the model has a sliding window of {model.sliding_window}, for which SGLang's FlashInfer class keeps a "
            "second set of index buffers that does not hold the rows of folded prompts. Set kernels: triton"
        )
    if base == "flashinfer" and model.has_sinks:
        yield "the model has attention sinks of its own, which SGLang's FlashInfer class ignores. Set kernels: triton"
    if is_corrected(config):
        fix = "Set blocks.alpha and blocks.beta to 0"
        reasons = [*_unattended("alpha and beta", base, model)]
        if base == "flashinfer" and not set(model.head_dims) <= set(FLASHINFER_HEAD_DIMS):
            dims = ", ".join(map(str, FLASHINFER_HEAD_DIMS))
            reasons.append(
                f"FlashInfer adds alpha and beta for head dims {dims}, and the model's is {model.head_dims[0]} "
                "(kernels: triton takes it)"
            )
        yield from (f"{reason}. {fix}" for reason in reasons)


def is_corrected(config: Config) -> bool:
    """Whether attention adds terms to logits by slot tag."""
    return config.blocks.alpha != 0.0 or config.blocks.beta != 0.0


def _unattended(what: str, base: Base, model: Model) -> Iterator[str]:
    """Why the Triton kernels of rows do not serve a model; `what` needs them."""
    if max(model.head_dims) > MAX_HEAD_DIM:
        yield (
            f"{what} on CUDA takes head dims up to {MAX_HEAD_DIM}, and the model's are {model.head_dims[0]} for keys "
            f"and {model.head_dims[1]} for values"
        )
    group = model.num_q_heads // model.num_kv_heads
    if group > MAX_GROUP:
        yield f"{what} on CUDA takes up to {MAX_GROUP} query heads per KV head, and the model has {group}"
    if model.sliding_window is not None:
        yield f"{what} on CUDA is not computed within a sliding window ({model.sliding_window} tokens)"
    if model.has_sinks:
        yield f"{what} on CUDA is not computed beside a model's own attention sinks"
