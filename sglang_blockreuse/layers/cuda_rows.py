"""What the CUDA bases have in common: probes look on, alpha and beta are added and layers follow a plan where the
server asks for it.

A base is a class of the host with `CudaRows` in front of it. A forward that is neither probed nor corrected, and a
layer that is dense, runs the host's own code and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from ..blocks.rows import fold_of
from ..config import ConfigError
from ..kernels.choose import decode_ops
from ..kernels.cpu_rows import KeyBias
from .biased_rows import BiasedRows, Shape
from .cuda_decode import CudaDecode
from .index_weights import served_identity
from .plan import BoundPlan
from .row_modes import RowModes
from .sparse_decode import SparseDecoder

# Index buffers are sized for this many rows per request slot: 8 bytes each, a few MB at most.
ROWS_PER_REQUEST = 256


class CudaRows:
    """Mixed in front of one of the host's attention backends, which writes K/V before it attends."""

    probe: Any | None = None  # looks on for the length of one forward, see blocks/probe.py
    tags: Tensor | None = None  # uint8, one per slot; where alpha or beta is not 0
    # of a layer plan that is not dense
    layer_plan: BoundPlan | None = None
    row_modes: RowModes | None = None
    sparse: SparseDecoder | None = None
    repair: None = None  # `prefill: sparse` is served on the CPU
    max_captured_rows = 0  # of a folded batch in a captured prefill; 0: such batches run without
    _rows: BiasedRows | None = None
    _decode: CudaDecode | None = None
    token_to_kv_pool: Any

    def correct(self, runner: Any, *, alpha: float, beta: float) -> None:
        """Add alpha to local keys and beta to false sinks from here on. Raises ConfigError, by the layers' names."""
        layers = attention_layers(runner.model)
        reasons = sorted({reason for layer in layers for reason in _uncorrected(layer)})
        if reasons:
            raise ConfigError(
                f"attention backend blockreuse on CUDA: blocks.alpha is {alpha} and blocks.beta is {beta}, but "
                f"{'; '.join(reasons)}. Set both to 0."
            )
        shape = Shape(
            num_q_heads=layers[0].tp_q_head_num,
            scale=layers[0].scaling,
            max_len=runner.model_config.context_len,
            max_rows=runner.req_to_token_pool.size,
        )
        k_pool, v_pool = self.token_to_kv_pool.get_kv_buffer(layers[0].layer_id)
        slot_table = runner.req_to_token_pool.req_to_token
        self._rows = self._biased_rows(slot_table, k_pool, shape, alpha=alpha, beta=beta)
        self._rows.warm_up(k_pool, v_pool, runner.dtype)
        self.tags = self._rows.tags_S

    def follow(self, runner: Any, plan: BoundPlan, *, kernels: str) -> None:
        """Decode under a plan from here on. `correct` comes first, where it comes at all. Raises ConfigError, by the
        layers' names."""
        layers = attention_layers(runner.model)
        reasons = sorted({reason for layer in layers for reason in _uncorrected(layer)})
        if reasons:
            raise ConfigError(
                f"attention backend blockreuse on CUDA: layer plan {plan.name} ({plan.source}), but "
                f"{'; '.join(reasons)}. Choose the plan full."
            )
        k_pools = self.token_to_kv_pool.k_buffer
        slot_table = runner.req_to_token_pool.req_to_token
        ops = decode_ops(
            kernels,
            "cuda",
            num_lists=max(plan.scorer.list_counts(k_pools[0].shape[1])),
            max_len=slot_table.shape[1],
            pool=k_pools[0],
        )
        self.layer_plan, self.row_modes = plan, RowModes(runner.req_to_token_pool.req_generation.numpy())
        self.sparse = SparseDecoder(
            plan,
            num_requests=slot_table.shape[0],
            num_q_heads=layers[0].tp_q_head_num,
            k_pools=k_pools,
            model_identity=served_identity(plan, runner.model_config.model_path),
            ops=ops,
            captured=True,
            unsupported=(),  # refused before weights were loaded, see bases.py
        )
        self._decode = CudaDecode(self.sparse, self.row_modes, slot_table, self._key_bias())
        self._decode.warm_up(layers[0].tp_q_head_num, runner.dtype, runner.req_to_token_pool.size)

    def _key_bias(self) -> KeyBias | None:
        return None if self._rows is None else self._rows.key_bias

    def _biased_rows(
        self, slot_table: Tensor, k_pool: Tensor, shape: Shape, *, alpha: float, beta: float
    ) -> BiasedRows:
        return BiasedRows(slot_table, k_pool, shape, alpha=alpha, beta=beta)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if self._rows is not None and not forward_batch.forward_mode.is_idle():
            self._rows.plan(forward_batch)
        if self._decode is not None:
            self._prepare(forward_batch)
            self._begin(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        if self._decode is not None:
            self._prepare(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if self._rows is not None and forward_batch.forward_mode.is_decode():
            self._rows.plan(forward_batch)
        if self._decode is not None:
            self._begin(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int, *args: Any, **kwargs: Any) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens, *args, **kwargs)
        if self._decode is not None:
            self._decode.reserve(max_bs)

    def _prepare(self, forward_batch: Any) -> None:
        """Outside of what is captured."""
        assert self._decode is not None
        if forward_batch.forward_mode.is_decode():
            self._decode.prepare()

    def _begin(self, forward_batch: Any) -> None:
        """Recorded where a step is captured."""
        assert self._decode is not None
        if not forward_batch.forward_mode.is_idle() and forward_batch.out_cache_loc is not None:
            self._decode.decoder.written(forward_batch.out_cache_loc)
        if forward_batch.forward_mode.is_decode():
            self._decode.begin(forward_batch)

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
        """Attention of [T, Q * D] queries; k and v [T, H, D] are written first. Raises ProbeDone for a probe."""
        if self._rows is None:
            out: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
        else:
            self._write(k, v, layer, forward_batch, save_kv_cache, kwargs)
            pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            out = self._rows.extend(forward_batch, _heads(q, layer), *pools).flatten(1)
        if self.probe is not None:
            pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
            self.probe.after_write(layer, _heads(q, layer), *pools)
        return out

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
        """As `forward_extend`, for rows of one token."""
        selects = self._decode is not None and self._decode.selects(layer.layer_id)
        if self._rows is None and not selects:
            out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return out
        self._write(k, v, layer, forward_batch, save_kv_cache, kwargs)
        pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        if selects:
            assert self._decode is not None
            return self._decode.run(layer.layer_id, _heads(q, layer), *pools, scale=layer.scaling).flatten(1)
        assert self._rows is not None
        return self._rows.decode(_heads(q, layer), *pools).flatten(1)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Rows that are corrected or select read the host's page table in every layer, so it must stay to the end."""
        if (self._rows is not None or self._decode is not None) and fm.is_decode():
            return SharedReadEnds.POST_REPLAY
        ends: SharedReadEnds = super().shared_read_ends(fm)
        return ends

    def can_run_prefill_cuda_graph(self, forward_batch: Any) -> bool:
        """A captured prefill shows no layer, knows no tags, and has static buffers for a number of rows."""
        if self._rows is not None or self.probe is not None:
            return False
        return fold_of(forward_batch) is None or forward_batch.batch_size <= self.max_captured_rows

    def _write(
        self,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool,
        kwargs: dict[str, Any],
    ) -> None:
        unknown = sorted(name for name, value in kwargs.items() if value is not None)
        if unknown:
            raise NotImplementedError(
                f"attention backend blockreuse: layer {layer.layer_id} passes {', '.join(unknown)}, which alpha, beta "
                "and layer plans would ignore. Set blocks.alpha and blocks.beta to 0, and choose the plan full."
            )
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_batch(forward_batch), k, v)


def attention_layers(model: torch.nn.Module) -> list[Any]:
    """The host's attention operations of a model, in its order."""
    return [module for module in model.modules() if isinstance(module, RadixAttention)]


def _uncorrected(layer: Any) -> list[str]:
    from .cpu_backend import unsupported_layer  # the same sum, so the same layers

    return list(unsupported_layer(layer))


def _heads(q: Tensor, layer: Any) -> Tensor:
    return q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
