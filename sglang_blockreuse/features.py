"""Host features that read a batch request by request, and what becomes of each where requests are folded into rows.

A folded batch has several rows per request, or fewer computed tokens than the host asked for. Every place where
the host counts one by the other stands here: it is *carried* through the fold, or the server is *refused* at its
start by name. How each field of the host's batches fares stands in blocks/fields.py. Tests read both again from the
installed host, so that a new reader fails a test and not a client.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .features_tiers import TIERS


class UnsupportedServer(ValueError):
    """A server setting that block reuse does not work with; what, why and what to do."""


@dataclass(frozen=True, slots=True)
class Carried:
    """A feature whose users may share a step with folded requests."""

    name: str
    reads: str  # where the host reads the batch per request
    how: str


@dataclass(frozen=True, slots=True)
class Refused:
    """A feature that a server with block reuse does not start with.

    found: what is wrong with this server in words, or None; takes the host's TreeCacheBuildContext.
    """

    name: str  # as users know it: a flag, or a kind of model
    found: Callable[[Any], str | None]
    fix: str


CARRIED = (
    Carried(
        "hidden states (--enable-return-hidden-states)",
        "BatchResultProcessor._append_prefill_hidden_states slices by computed tokens of each request",
        "the result counts what was computed; a request that asks for them is not folded itself",
    ),
    Carried(
        "log-probabilities of the prompt",
        "LogitsProcessor._get_pruned_states and BatchResultProcessor._apply_prefill_logprobs",
        "every position with a wanted one is computed, and both count what was computed",
    ),
    Carried(
        "answers: sampling, grammars, penalties, custom logit processors, token-id log-probabilities, /v1/score",
        "ModelRunner.sample and compute_logprobs_only, one row of logits per request",
        "logits are of the last row of each request, and the batch is unfolded before sampling",
    ),
    Carried(
        "scores at positions (--enable-mis, token_indices_to_pool)",
        "ForwardBatch._maybe_init_non_generation_fields",
        "the host never mixes them with other requests, and a request that asks for them is not folded",
    ),
    Carried(
        "watermarks (--enable-watermark)",
        "ModelRunner.sample: watermark_prompt_tail_ids and watermark_context_hash_history, one per row",
        "given back one per request",
    ),
    Carried(
        "routed experts and index top-k (--enable-return-routed-experts)",
        "BaseTopkCapturer.on_forward_end stores by slot",
        "computed tokens are stored at their own slots; a request that asks for them is not folded",
    ),
    Carried(
        "LoRA adapters of attention and MLP", "LoRAManager.prepare_lora_batch", "each row names its adapter"
    ),
    Carried(
        "images, video and audio",
        "general_mm_embed_routine by prefix and length",
        "each row is a row of them",
    ),
    Carried(
        "embedding overrides at positions (positional_embed_overrides)",
        "the model's embedding of replace_positions, counted in the batch's tokens",
        "positions are counted anew among the computed tokens",
    ),
    Carried(
        "decode rows of mixed chunks",
        "ScheduleBatch.mix_with_running puts them last",
        "each stays one row of one token",
    ),
    Carried(
        "beam search",
        "capture_pre_sample_logits takes the leaders' logits by request",
        "runs on the unfolded batch; a beam request is not folded",
    ),
    Carried(
        "single-batch overlap (--enable-single-batch-overlap)",
        "splits work by tokens inside a layer",
        "nothing is counted per request",
    ),
)


def _backends(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_exec

    kernel = get_exec().kernel
    attention, prefill = kernel.attention_backend, kernel.prefill_attention_backend
    decode = kernel.decode_attention_backend
    if {attention, prefill, decode} - {None} == {"blockreuse"}:
        return None
    return (
        f"the attention backend is {attention} (prefill: {prefill}, decode: {decode}), but only blockreuse "
        "computes several stretches of one prompt in one step"
    )


def _page_size(ctx: Any) -> str | None:
    size = ctx.params.page_size
    return None if size == 1 else f"--page-size is {size}, but blocks are cut at single tokens"


def _speculation(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_spec

    algorithm = get_spec().speculative_algorithm
    return algorithm and (
        f"speculative decoding ({algorithm}) needs hidden states of every prompt token, which a copied token "
        "does not have"
    )


def _pipeline(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_parallel

    size = get_parallel().pp_size
    return f"--pp-size is {size}, but pipelines are not supported" if size > 1 else None


def _counts_of_ranks(ctx: Any) -> str | None:
    from sglang.srt.utils.common import require_mlp_sync

    if not require_mlp_sync():
        return None
    return "DP attention, and MoE layers that gather tokens of ranks, count tokens per rank before rows are folded"


def _context_parallel(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_parallel

    sizes = {name: getattr(get_parallel(), f"{name}_size", 1) for name in ("attn_cp", "attn_dcp")}
    above = [f"{name} {size}" for name, size in sizes.items() if size > 1]
    return f"context parallelism ({', '.join(above)}) splits rows in its own way" if above else None


def _disaggregation(ctx: Any) -> str | None:
    from sglang.srt.runtime_context import get_disagg

    mode = get_disagg().disaggregation_mode
    if mode in (None, "null"):
        return None
    return f"--disaggregation-mode is {mode}; KV that is local must not leave the server"


def _lm_head_adapters(ctx: Any) -> str | None:
    manager = getattr(ctx.tp_worker.model_runner, "lora_manager", None)
    if manager is None or "lm_head" not in manager.target_modules:
        return None
    return (
        "LoRA adapters of lm_head (--lora-target-modules) are applied by rows of the batch where the logits have "
        "one row per request"
    )


def _token_history(ctx: Any) -> str | None:
    manager = getattr(ctx.tp_worker.model_runner, "ngram_embedding_manager", None)
    if manager is None or not manager.enabled:
        return None
    return "the model embeds each token with those before it (n-gram embedding), kept per request by computed tokens"


def _flag(name: str, because: str) -> Callable[[Any], str | None]:
    """A refusal of a switch of the server's own arguments."""

    def found(ctx: Any) -> str | None:
        value = getattr(ctx.server_args, name, None)
        return f"--{name.replace('_', '-')} {because}" if value else None

    return found


def _when(holds: Callable[[Any], bool], problem: str) -> Callable[[Any], str | None]:
    return lambda ctx: problem if holds(ctx) else None


REFUSED = (
    Refused(
        "other attention backends",
        _backends,
        "Use --attention-backend blockreuse, without --prefill- or --decode-attention-backend.",
    ),
    Refused(
        "--disable-radix-cache",
        _when(
            lambda ctx: ctx.disable_radix_cache,
            "--disable-radix-cache takes away the tree that holds the blocks",
        ),
        "Drop one of the two flags.",
    ),
    Refused("page size above 1", _page_size, "Use --page-size 1."),
    Refused(
        "embedding, reward and classification models (--is-embedding)",
        _when(
            lambda ctx: not ctx.model_config.is_generation,
            "the model pools the hidden states of whole prompts (embedding, reward or classification), which "
            "copied tokens do not have",
        ),
        "Serve it without --radix-cache-backend blockreuse.",
    ),
    Refused("speculative decoding", _speculation, "Drop --speculative-algorithm."),
    Refused("pipeline parallelism", _pipeline, "Use --pp-size 1."),
    Refused(
        "DP attention, MoE all-to-all",
        _counts_of_ranks,
        "Drop --enable-dp-attention, --moe-a2a-backend and --moe-dense-tp-size.",
    ),
    Refused("context parallelism", _context_parallel, "Use a context-parallel size of 1."),
    Refused("PD disaggregation", _disaggregation, "Serve prefill and decode in one server."),
    Refused(
        "--enable-pdmux",
        _flag(
            "enable_pdmux", "runs a prefill layer by layer in several forwards, which a fold does not outlive"
        ),
        "Drop the flag.",
    ),
    Refused(
        "--enable-two-batch-overlap",
        _flag(
            "enable_two_batch_overlap",
            "splits a batch between requests before rows are folded, and rows of one request must run together",
        ),
        "Drop the flag.",
    ),
    *(Refused(*of_tiers) for of_tiers in TIERS),
    Refused(
        "--enable-unified-cache-external-linker",
        _flag(
            "enable_unified_cache_external_linker",
            "takes KV out of the server, and KV that is local must not leave it",
        ),
        "Drop the flag.",
    ),
    Refused(
        "--enable-hisparse",
        _flag("enable_hisparse", "moves KV of running requests to host memory, where a home cannot be read"),
        "Drop the flag.",
    ),
    Refused(
        "sliding-window and state-space hybrids",
        _when(
            lambda ctx: ctx.is_hybrid_swa or ctx.is_hybrid_ssm,
            "the model mixes attention with sliding windows or state layers, whose state is not per token",
        ),
        "Serve it without block reuse.",
    ),
    Refused(
        "encoder-decoder models",
        _when(
            lambda ctx: ctx.model_config.is_encoder_decoder,
            "the model is an encoder-decoder, whose prompts have a part of their own before each row",
        ),
        "Serve it without block reuse.",
    ),
    Refused(
        "diffusion language models (--dllm-algorithm)",
        _flag("dllm_algorithm", "rewrites blocks of the answer in place, which rows do not follow"),
        "Drop the flag.",
    ),
    Refused("n-gram embeddings", _token_history, "Serve the model without block reuse."),
    Refused(
        "LoRA adapters of lm_head",
        _lm_head_adapters,
        "Leave lm_head (and all) out of --lora-target-modules.",
    ),
    Refused(
        "--enable-session-radix-cache",
        _flag("enable_session_radix_cache", "keeps rows across requests"),
        "Drop the flag.",
    ),
)


def check_server(ctx: Any) -> None:
    """Refuse what is not supported. ctx: the host's TreeCacheBuildContext. Raises UnsupportedServer."""
    for feature in REFUSED:
        problem = feature.found(ctx)
        if problem is not None:
            raise UnsupportedServer(
                f"--radix-cache-backend blockreuse cannot work here: {problem}. {feature.fix}"
            )
