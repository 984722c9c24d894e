"""SGLang's attention backend on the CPU: dense attention over the token pool, virtual rows included, and decode
steps under a layer plan.

Only pure decode batches are sparse, and under a plan with `prefill: sparse` the repair tokens of prefill batches.
Decode rows that the host mixes into a prefill batch run dense, as the rest of a prefill does; the host does not say
which rows they are.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import torch
from sglang.srt.configs.model_config import AttentionArch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from sglang.srt.runtime_context import get_parallel
from torch import Tensor

from ..blocks.rows import fold_of
from ..host import sum_over_ranks
from ..kernels.choose import decode_ops
from ..kernels.cpu_attention import AttentionPlan, KeyBias, Workspace, plan_attention, run_attention
from .decode_step import Batch, Step
from .index_weights import served_identity
from .plan import BoundPlan
from .plan_support import unsupported_sharing
from .ranks import Ranks
from .repair_step import ExtendBatch, RepairStep
from .row_modes import RowModes
from .sparse_decode import SparseDecoder, warm_up
from .sparse_repair import SparseRepair

logger = logging.getLogger(__name__)


class CpuAttnBackend(AttentionBackend):
    """Causal grouped attention of decoder layers, planned once per forward.

    A folded extend passes several rows of one request, next to each other and in position order. K and V are
    written before attention, so such rows see each other. Construction raises NotImplementedError for a model
    whose attention this does not compute, and names every reason.
    """

    # Where both are set, logits get alpha on local keys and beta on false sinks; see design rule 6.
    tags: Tensor | None = None  # uint8, one per slot
    alpha: float = 0.0
    beta: float = 0.0

    def __init__(
        self, runner: Any, layer_plan: BoundPlan | None = None, *, kernels: str = "auto", timing: bool = False
    ) -> None:
        super().__init__()
        reasons = list(_unsupported(runner))
        if layer_plan is not None:
            reasons += _unshared(layer_plan, runner.token_to_kv_pool)
        if reasons:
            raise NotImplementedError(
                "attention backend blockreuse on the CPU computes causal decoder attention over a plain K/V pool, "
                f"but {'; '.join(reasons)}. Choose --attention-backend torch_native, which reuses no blocks."
            )
        self.device = runner.device
        self.req_to_token_pool = runner.req_to_token_pool
        self.token_to_kv_pool = runner.token_to_kv_pool
        self.probe: Any | None = None  # looks on for the length of one forward, see blocks/probe.py
        self.forward_metadata: AttentionPlan | Step | RepairStep | None = None
        self.workspace = Workspace()
        # what KV of decode steps is valid for: None or a dense plan writes what a full prefill would
        self.layer_plan = layer_plan
        self.readers = frozenset(layer_plan.shared_layers) if layer_plan is not None else frozenset[int]()
        self.row_modes = RowModes(self.req_to_token_pool.req_generation.numpy())
        self.sparse = _sparse_decoder(runner, layer_plan, kernels, timing)
        self.repair: SparseRepair | None = None
        if self.sparse is not None and self.sparse.plan.prefill == "sparse":
            self.repair = SparseRepair(self.sparse)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Plan the forward for all layers. Raises NotImplementedError for speculative modes."""
        mode = forward_batch.forward_mode
        if mode.is_idle():
            self.forward_metadata = None
            return
        if self.sparse is not None and forward_batch.out_cache_loc is not None:
            self.sparse.written(forward_batch.out_cache_loc)
        requests = forward_batch.req_pool_indices.tolist()
        if mode.is_decode():
            lens = forward_batch.seq_lens.tolist()
            if self.sparse is not None:
                self.forward_metadata = self.sparse.begin(self._decode_batch(requests, lens))
                if self.forward_metadata is not None:
                    return
            extend_lens = [1] * len(requests)
            prefix_lens = [n - 1 for n in lens]
        elif mode.is_extend_without_speculative() and not mode.is_dllm_extend():
            extend_lens = forward_batch.extend_seq_lens.tolist()
            prefix_lens = forward_batch.extend_prefix_lens.tolist()
            if self.repair is not None and (fold := fold_of(forward_batch)) and fold.repair_T is not None:
                batch = self._extend_batch(requests, prefix_lens, extend_lens, fold.repair_T)
                self.forward_metadata = self.repair.begin(batch)
                if self.forward_metadata is not None:
                    return
        else:
            raise NotImplementedError(
                f"attention backend blockreuse on the CPU: forward mode {mode.name} is not supported; "
                "start the server without speculative decoding and without diffusion decoding."
            )
        self.forward_metadata = plan_attention(
            self.req_to_token_pool.req_to_token, requests, prefix_lens, extend_lens, bias=self._bias()
        )

    def _bias(self) -> KeyBias | None:
        return KeyBias(self.tags, self.alpha, self.beta) if self.tags is not None else None

    def _decode_batch(self, requests: list[int], lens: list[int]) -> Batch:
        pool = self.req_to_token_pool
        return Batch(
            slot_table=pool.req_to_token,
            requests=requests,
            lens=lens,
            row_ids=pool.req_generation.numpy()[requests],
            dense=self.row_modes.dense(requests),
            bias=self._bias(),
        )

    def _extend_batch(
        self, requests: list[int], prefix_lens: list[int], extend_lens: list[int], repair_T: Tensor
    ) -> ExtendBatch:
        pool = self.req_to_token_pool
        return ExtendBatch(
            slot_table=pool.req_to_token,
            requests=requests,
            prefix_lens=prefix_lens,
            extend_lens=extend_lens,
            repair_T=repair_T.numpy(),
            row_ids=pool.req_generation.numpy()[requests],
            bias=self._bias(),
        )

    def forward_decode(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """Attention of [T, Q * D] queries in their dtype; writes k and v [T, H, D] to their slots first."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """As `forward_decode`, for rows of any number of tokens."""
        return self._forward(q, k, v, layer, forward_batch, save_kv_cache, kwargs)

    def _forward(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> Tensor:
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise NotImplementedError(
                f"attention backend blockreuse on the CPU: layer {layer.layer_id} passes {', '.join(unknown)}, "
                "which would be ignored. Choose --attention-backend torch_native."
            )
        probe, keys = self.probe, self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        if save_kv_cache and k is not None and v is not None and layer.layer_id not in self.readers:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        plan = self.forward_metadata
        if plan is None:
            raise RuntimeError(
                "attention backend blockreuse: init_forward_metadata was not called for this batch"
            )
        q = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        if probe is not None:
            probe.after_write(layer, q, keys, values)
        out = torch.empty_like(q)
        if isinstance(plan, Step):
            assert self.sparse is not None
            self.sparse.run(plan, layer.layer_id, q, keys, values, out, scale=layer.scaling)
        elif isinstance(plan, RepairStep):
            assert self.repair is not None
            self.repair.run(plan, layer.layer_id, q, keys, values, out, scale=layer.scaling)
        else:
            run_attention(plan, q, keys, values, out, scale=layer.scaling, workspace=self.workspace)
        return out.view(out.shape[0], -1)

    def support_triton(self) -> bool:
        return False


def _sparse_decoder(runner: Any, plan: BoundPlan | None, kernels: str, timing: bool) -> SparseDecoder | None:
    """The decoder of a plan whose layers select, compiled. Raises NotImplementedError, see SparseDecoder."""
    if plan is None or not plan.is_sparse:
        return None
    keys = runner.token_to_kv_pool.k_buffer[0]
    layer = next(module for module in runner.model.modules() if isinstance(module, RadixAttention))
    decoder = SparseDecoder(
        plan,
        num_requests=runner.req_to_token_pool.req_to_token.shape[0],
        num_q_heads=layer.tp_q_head_num,
        k_pools=runner.token_to_kv_pool.k_buffer,
        model_identity=served_identity(plan, runner.model_config.model_path),
        ranks=_ranks(runner.model_config),
        timing=timing,
        ops=decode_ops(kernels, "cpu"),
    )
    if decoder.keys is not None:
        logger.info("blockreuse: index keys take %.1f MB beside the pool", decoder.keys.num_bytes / 1e6)
    warm_up(decoder, keys, layer.tp_q_head_num)
    return decoder


def _ranks(model_config: Any) -> Ranks | None:
    """The tensor-parallel ranks, whose heads score together; None for one rank."""
    num_ranks = get_parallel().tp_size
    if num_ranks == 1:
        return None
    return Ranks(num_ranks, model_config.get_total_num_kv_heads(), sum_over_ranks)


def _unsupported(runner: Any) -> Iterator[str]:
    """What in the model, the pool or the server's settings this backend would compute wrongly."""
    config, pool = runner.model_config, runner.token_to_kv_pool
    if config.attention_arch != AttentionArch.MHA:
        yield f"the model's attention is {config.attention_arch.name}"
    if config.is_encoder_decoder:
        yield "the model is an encoder-decoder"
    if config.is_hybrid_swa:
        yield "the model has a pool of its own for sliding windows"
    if config.has_attention_sinks:
        yield "the model has attention sinks"
    pool_dtype, key_buffer = getattr(pool, "store_dtype", None), getattr(pool, "k_buffer", None)
    if not key_buffer:
        yield f"the pool is a {type(pool).__name__} without k_buffer"
    elif pool_dtype != config.dtype:
        yield f"the pool holds {pool_dtype} and the model computes in {config.dtype} (set --kv-cache-dtype auto)"
    elif key_buffer[0].dim() != 3:
        yield f"the pool's layout is {tuple(key_buffer[0].shape)}, not [slots, heads, head dim]"
    layers = [module for module in runner.model.modules() if isinstance(module, RadixAttention)]
    yield from sorted({reason for layer in layers for reason in unsupported_layer(layer)})


def _unshared(plan: BoundPlan, pool: Any) -> Iterator[str]:
    """What in a plan's sharing of main KV is not computed, or not what the pool holds."""
    yield from (f"layer plan {plan.name} ({plan.source}): {reason}" for reason in unsupported_sharing(plan))
    if plan.shared_layers and getattr(pool, "kv_layers", None) != plan.kv_layers:
        yield (
            f"layer plan {plan.name} shares KV on layers {list(plan.shared_layers)} and the pool is a "
            f"{type(pool).__name__} with KV of every layer (only the CPU platform of this package makes the other)"
        )


def unsupported_layer(layer: Any) -> Iterator[str]:
    """What this backend would compute wrongly in one of the host's attention layers."""
    if layer.is_cross_attention:
        yield "a layer is cross attention"
    if layer.attn_type != AttentionType.DECODER:
        yield f"a layer's attention type is {layer.attn_type.value}"
    if layer.sliding_window_size > -1:
        yield f"a layer has a sliding window of {layer.sliding_window_size}"
    if layer.logit_cap > 0:
        yield f"a layer caps its logits at {layer.logit_cap}"
    if layer.qk_head_dim != layer.v_head_dim:
        yield f"a layer's head dims differ: {layer.qk_head_dim} for keys, {layer.v_head_dim} for values"
    if layer.xai_temperature_len > 0:
        yield f"a layer scales its logits from position {layer.xai_temperature_len}"
    if layer.pos_encoding_mode != "NONE":
        yield f"a layer encodes positions in attention ({layer.pos_encoding_mode})"
