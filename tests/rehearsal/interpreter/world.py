"""The host's pools, page table, layers and batches on CPU tensors, with drawn rows over a poisoned pool.

Dims: S pool slots, R rows, T computed tokens, N positions of a request, Q query heads, H KV heads, D head dim
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import strategies as st
from tiny_models import TinyModel
from torch import Tensor, nn

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.types import Interval

HEAD_DIM, NUM_Q_HEADS, NUM_KV_HEADS = 16, 4, 2
MAX_REQUESTS, CONTEXT, NUM_SLOTS = 3, 96, 400
NUM_LAYERS = 3
TINY = TinyModel(
    "llama",
    {
        "num_hidden_layers": 2,
        "head_dim": HEAD_DIM,
        "hidden_size": HEAD_DIM * NUM_Q_HEADS,
        "intermediate_size": 96,
    },
)
SCALE = HEAD_DIM**-0.5


@dataclass(frozen=True, repr=False)
class Host:
    """SGLang's settings of a server, and what it reads of the model."""

    server_args: Any
    model_config: Any


def publish_settings(model: Path) -> Host:
    import sglang  # noqa: F401
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    flags = ("--skip-tokenizer-init", "--dtype", "float32", "--max-total-tokens", str(NUM_SLOTS))
    server_args = prepare_server_args(["--model-path", str(model), *flags, "--context-length", str(CONTEXT)])
    publish(server_args, role="scheduler")
    return Host(server_args, ModelConfig.from_server_args(server_args))


@dataclass(frozen=True)
class Drawn:
    """Requests by the length of their context and the runs that a step computes of it, the last up to its end."""

    requests: tuple[tuple[int, tuple[Interval, ...]], ...]
    seed: int

    @property
    def rows(self) -> list[tuple[int, Interval]]:
        return [(i, run) for i, (_, runs) in enumerate(self.requests) for run in runs]


@st.composite
def folds(draw: st.DrawFn, max_requests: int = MAX_REQUESTS) -> Drawn:
    requests = []
    for _ in range(draw(st.integers(1, max_requests))):
        length = draw(st.integers(1, CONTEXT - 1))
        cuts = draw(st.lists(st.integers(0, length - 1), min_size=1, max_size=7, unique=True).map(sorted))
        if len(cuts) % 2 == 0:
            cuts = cuts[1:]
        ends = [*cuts[1:], length]
        requests.append((length, tuple(Interval(a, b) for a, b in zip(cuts[::2], ends[::2], strict=True))))
    return Drawn(tuple(requests), draw(st.integers(0, 2**20)))


class World:
    """Pools in which only what a drawn fold may read has numbers, and the batch that computes the rest."""

    def __init__(self, host: Host, drawn: Drawn, *, dtype: torch.dtype = torch.float32) -> None:
        from sglang.srt.layers.radix_attention import RadixAttention
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, ReqToTokenPool
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.drawn, self.dtype = drawn, dtype
        self.random = torch.Generator().manual_seed(drawn.seed)
        pool_options = {"device": "cpu", "enable_memory_saver": False}
        self.pool = MHATokenToKVPool(NUM_SLOTS, 1, dtype, NUM_KV_HEADS, HEAD_DIM, NUM_LAYERS, **pool_options)
        self.requests = ReqToTokenPool(size=MAX_REQUESTS, max_context_len=CONTEXT, **pool_options)
        allocator = TokenToKVPoolAllocator(NUM_SLOTS, dtype, "cpu", self.pool, need_sort=False)
        self.layers = nn.ModuleList(
            RadixAttention(NUM_Q_HEADS, HEAD_DIM, SCALE, NUM_KV_HEADS, layer_id=i) for i in range(NUM_LAYERS)
        )
        translator = KVIndexTranslator(
            req_to_token=self.requests.req_to_token,
            token_to_kv_pool_allocator=allocator,
            token_to_kv_pool=self.pool,
            page_size=1,
            device="cpu",
        )
        self.translator = translator
        self.runner = SimpleNamespace(
            device="cpu",
            gpu_id=0,
            dtype=dtype,
            kv_cache_dtype=dtype,
            kv_cache_dtype_str="auto",
            page_size=1,
            is_draft_worker=False,
            init_new_workspace=False,
            sliding_window_size=None,
            server_args=host.server_args,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            prefill_attention_backend_str="blockreuse",
            decode_attention_backend_str="blockreuse",
            decode_num_tokens_per_req=lambda: 1,
            model=self.layers,
            model_config=host.model_config,
            req_to_token_pool=self.requests,
            token_to_kv_pool=self.pool,
            token_to_kv_pool_allocator=allocator,
            kv_index_translator=translator,
        )
        self._fill()

    def _fill(self) -> None:
        """Give every position a slot; KV of positions that are not computed is there, everything else is NaN."""
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            buffer.fill_(torch.nan)
        order = torch.randperm(NUM_SLOTS - 1, generator=self.random) + 1  # slot 0 is the host's padding
        # request slots are handed out in any order, and the page table is poisoned beyond each request's end
        self.request_slots = (torch.randperm(MAX_REQUESTS, generator=self.random) + 1)[
            : len(self.drawn.requests)
        ]
        self.requests.req_to_token.fill_(NUM_SLOTS)
        self.slots: list[Tensor] = []
        for row, (length, runs) in zip(self.request_slots, self.drawn.requests, strict=True):
            slots, order = order[:length], order[length:]
            self.slots.append(slots)
            self.requests.req_to_token[row, :length] = slots.int()
            loaded = torch.ones(length, dtype=torch.bool)
            for run in runs:
                loaded[run.start : run.end] = False
            for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
                buffer[slots[loaded]] = self.normal(int(loaded.sum()), NUM_KV_HEADS)

    def compute_all(self) -> None:
        """KV of every position is there, as after the prefill."""
        for buffer in (*self.pool.k_buffer, *self.pool.v_buffer):
            for slots in self.slots:
                buffer[slots] = self.normal(len(slots), NUM_KV_HEADS)

    def normal(self, num_tokens: int, num_heads: int) -> Tensor:
        return torch.randn((num_tokens, num_heads, HEAD_DIM), generator=self.random).to(self.dtype)

    def tags(self, backend: Any) -> Tensor:
        """Draw tags for all slots, of kinds that the server never writes too."""
        backend.tags.copy_(torch.randint(0, 4, backend.tags.shape, generator=self.random))
        return backend.tags

    def batch(self) -> Any:
        """The host's batch of the drawn fold: one row per run."""
        rows = self.drawn.rows
        starts, ends = [run.start for _, run in rows], [run.end for _, run in rows]
        out = torch.cat([self.slots[i][run.start : run.end] for i, run in rows])
        positions = torch.cat([torch.arange(run.start, run.end) for _, run in rows])
        return self._batch("EXTEND", [i for i, _ in rows], starts, ends, out, positions)

    def decode_batch(self) -> Any:
        """The next step: each request's last position is computed."""
        ends = [length for length, _ in self.drawn.requests]
        out = torch.stack([slots[-1] for slots in self.slots])
        starts = [end - 1 for end in ends]
        return self._batch("DECODE", range(len(ends)), starts, ends, out, torch.tensor(starts))

    def _batch(
        self,
        mode: str,
        requests: Sequence[int],
        starts: Sequence[int],
        ends: Sequence[int],
        out: Tensor,
        at: Tensor,
    ) -> Any:
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        batch = ForwardBatch(
            forward_mode=ForwardMode[mode],
            batch_size=len(ends),
            input_ids=torch.zeros(len(out), dtype=torch.int64),
            req_pool_indices=self.request_slots[list(requests)],
            seq_lens=torch.tensor(ends),
            out_cache_loc=out,
            seq_lens_sum=sum(ends),
            seq_lens_cpu=torch.tensor(ends),
            positions=at,
            out_cache_loc_is_physical=True,
        )
        if mode == "EXTEND":
            lens = [b - a for a, b in zip(starts, ends, strict=True)]
            batch.extend_num_tokens = len(out)
            batch.extend_seq_lens = torch.tensor(lens, dtype=torch.int32)
            batch.extend_seq_lens_cpu = lens
            batch.extend_prefix_lens = torch.tensor(starts, dtype=torch.int32)
            batch.extend_prefix_lens_cpu = list(starts)
            batch.extend_start_loc = (batch.extend_seq_lens.cumsum(0) - batch.extend_seq_lens).int()
        return batch

    def law(self, batch: Any, layer: int, q: Tensor, *, tags: Tensor | None = None, **bias: float) -> Tensor:
        """`reference.extend_attention` in float64 over explicit lists of slots; K and V are in the pool by now."""
        ends = batch.seq_lens.tolist()
        table = self.requests.req_to_token
        lists = [table[row, :end] for row, end in zip(batch.req_pool_indices, ends, strict=True)]
        lens = (
            batch.extend_seq_lens
            if batch.extend_seq_lens is not None
            else torch.ones(len(ends), dtype=torch.int32)
        )
        out, _ = reference.extend_attention(
            q.double(),
            self.pool.k_buffer[layer].double(),
            self.pool.v_buffer[layer].double(),
            torch.cat(lists),
            torch.tensor([0, *ends]).cumsum(0),
            torch.tensor([0, *lens.tolist()]).cumsum(0),
            scale=SCALE,
            tags_S=tags,
            **bias,
        )
        return out
