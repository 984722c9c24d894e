"""What the CUDA bases have in common: probes look on, alpha and beta are added where the server asks for them.

A base is a class of the host with `CudaRows` in front of it. A forward that is neither probed nor corrected runs the
host's own code and nothing else.
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
from .biased_rows import BiasedRows, Shape

# Index buffers are sized for this many rows per request slot: 8 bytes each, a few MB at most.
ROWS_PER_REQUEST = 256


class CudaRows:
    """Mixed in front of one of the host's attention backends, which writes K/V before it attends."""

    probe: Any | None = None  # looks on for the length of one forward, see blocks/probe.py
    tags: Tensor | None = None  # uint8, one per slot; where alpha or beta is not 0
    max_captured_rows = 0  # of a folded batch in a captured prefill; 0: such batches run without
    _rows: BiasedRows | None = None
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

    def _biased_rows(
        self, slot_table: Tensor, k_pool: Tensor, shape: Shape, *, alpha: float, beta: float
    ) -> BiasedRows:
        return BiasedRows(slot_table, k_pool, shape, alpha=alpha, beta=beta)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        if self._rows is not None and not forward_batch.forward_mode.is_idle():
            self._rows.plan(forward_batch)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        super().init_forward_metadata_in_graph(forward_batch)
        if self._rows is not None and forward_batch.forward_mode.is_decode():
            self._rows.plan(forward_batch)

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
        if self._rows is None:
            out: Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache, **kwargs)
            return out
        self._write(k, v, layer, forward_batch, save_kv_cache, kwargs)
        pools = self.token_to_kv_pool.get_kv_buffer(layer.layer_id)
        return self._rows.decode(_heads(q, layer), *pools).flatten(1)

    def shared_read_ends(self, fm: Any) -> SharedReadEnds:
        """Corrected rows read the host's page table in every layer, so it must stay as it is to the step's end."""
        if self._rows is not None and fm.is_decode():
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
                f"attention backend blockreuse: layer {layer.layer_id} passes {', '.join(unknown)}, which alpha and "
                "beta would ignore. Set blocks.alpha and blocks.beta to 0."
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
