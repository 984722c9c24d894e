"""Decode under a layer plan on the CPU: what each part of a layer costs, beside dense decode of the same pool.

    python bench/sparse_decode.py [--dtype bfloat16] [--batch 8] [--context 7500] [--plan NAME|PATH] [--stock]
                                  [--json PATH]

Synthetic pool with SmolLM2-135M's shapes; the last 200 tokens of the rows interleave, as rows that decode together
do. The parts take turns and a figure is the median over turns, in ms per layer; the last lines sum them over the
plan's layers. A part is timed only after its output passed the gate: selections equal those of the float64 law, but
for borders that are closer than float32 resolves, and attention is within tolerance of it.

--stock adds one layer of SGLang's torch_native decode on the same pool, and the model's linear layers. Their sums
estimate the ratio of whole token steps; a server adds its scheduler to each side.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from sglang_blockreuse.demo import environment
from sglang_blockreuse.kernels import cpu_select, cpu_sparse, reference, reference_select
from sglang_blockreuse.kernels.cpu_attention import Workspace, plan_attention, run_attention
from sglang_blockreuse.kernels.cpu_numba import as_array
from sglang_blockreuse.layers.decode_step import Batch
from sglang_blockreuse.layers.plan_explain import KVShape, explain
from sglang_blockreuse.layers.plan_loader import load_plan
from sglang_blockreuse.layers.sparse_decode import SparseDecoder

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
SCALE = HEAD_DIM**-0.5
DECODED_LEN = 200
ROLES = ("full", "reindex", "reuse")
MAX_BORDER = 2  # positions of a list that may differ: scores that float32 cannot tell apart
OUT_TOLERANCE = 1e-5  # float32 sums; the law sees the same rounded operands


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float32"))
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--context", type=int, default=7500)
    parser.add_argument("--plan", default="smollm2-135m-three-role")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--stock", action="store_true", help="beside torch_native, with linear layers")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    bench = Bench(options)
    bench.gate()
    times = bench.times(options.repeats)
    if bench.decoder.state.counts:
        raise SystemExit(f"gate: layers scanned for want of fresh state: {dict(bench.decoder.state.counts)}")
    report = {"environment": environment.describe(), "options": {k: str(v) for k, v in vars(options).items()}}
    report |= {"ms_per_layer": times, **bench.totals(times)}
    for name, value in times.items():
        print(f"{name:>12} {value:8.3f} ms per layer")
    for name, value in bench.totals(times).items():
        print(f"{name:>24} {value:8.2f}")
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


class Bench:
    """One layer's pool, a batch of rows on it, and the parts of a layer as functions."""

    def __init__(self, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        dtype = getattr(torch, options.dtype)
        self.plan = load_plan(options.plan).bind(NUM_LAYERS, "LlamaForCausalLM")
        self.batch, self.context = options.batch, options.context
        lens = [options.context - r for r in range(options.batch)]
        table = _slot_table(lens)
        shape = (int(table.max()) + 1, NUM_KV_HEADS, HEAD_DIM)
        self.k, self.v = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
        self.q = torch.randn(len(lens), NUM_Q_HEADS, HEAD_DIM).to(dtype)
        self.out = torch.empty_like(self.q)
        self.decoder = SparseDecoder(
            self.plan, num_requests=len(lens), num_q_heads=NUM_Q_HEADS, k_pools=[self.k] * NUM_LAYERS
        )
        requests = list(range(len(lens)))
        none = np.zeros(len(lens), np.uint8)
        step = self.decoder.begin(Batch(table, requests, lens, np.arange(len(lens)), none, None))
        assert step is not None
        self.step, self.rows, self.lens, self.table = step, step.rows.arrays, lens, table
        self.geometry = cpu_select.Geometry(dtype, NUM_KV_HEADS, NUM_Q_HEADS // NUM_KV_HEADS, HEAD_DIM)
        self.dense = plan_attention(table, requests, [n - 1 for n in lens], [1] * len(lens))
        selection = self.decoder.selection
        self.pool = cpu_select.Table.empty(len(lens), 1, selection.pool_size or selection.final_k)
        self.indices = cpu_select.Table.empty(len(lens), 1, selection.final_k)
        self.history, self.pooled = none, np.ones(len(lens), np.uint8)
        self.work = np.empty((len(lens), NUM_Q_HEADS, max(lens)), np.float32)
        self.sparse_out = np.empty(self.q.shape, np.float32)
        self.workspace = Workspace()
        self.stock = options.stock
        # every layer once, so that each finds what its anchor leaves for it and none scans for want of it
        for layer in range(NUM_LAYERS):
            self.decoder.run(step, layer, self.q, self.k, self.v, self.out, scale=SCALE)

    def parts(self) -> dict[str, Callable[[], None]]:
        selection, geometry = self.decoder.selection, self.geometry
        q = (self.q.float() * SCALE).numpy()
        keys, values = as_array(self.k), as_array(self.v)
        out = self.sparse_out
        forced = (selection.sink, selection.window)

        def score(pooled: np.ndarray) -> None:
            cpu_select.score(geometry, q, keys, self.rows, self.pool, pooled, self.work)

        def keep(pooled: np.ndarray, table: cpu_select.Table) -> None:
            cpu_select.keep(self.rows, self.pool, pooled, self.work, *forced, table)

        # in an order in which each finds what it needs
        return {
            "scan": lambda: score(self.history),
            "pool": lambda: keep(self.history, self.pool),
            "top-k": lambda: keep(self.history, self.indices),
            "rerank": lambda: score(self.pooled),
            "pool top-k": lambda: keep(self.pooled, self.indices),
            "attention": lambda: cpu_sparse.attend(geometry, q, keys, values, self.rows, self.indices, out),
            "dense": lambda: run_attention(
                self.dense, self.q, self.k, self.v, self.out, scale=SCALE, workspace=self.workspace
            ),
            **(self._stock() if self.stock else {}),
            **{role: self._layer(role) for role in ROLES if any(x.role == role for x in self.plan.layers)},
        }

    def _stock(self) -> dict[str, Callable[[], None]]:
        from cpu_attention import LinearLayers
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        backend, linear = object.__new__(TorchNativeAttnBackend), LinearLayers(self.k.dtype)
        shared = (self.q, self.out, self.k, self.v, self.table, torch.arange(self.batch))

        def attention() -> None:
            lens = torch.tensor(self.lens)
            backend._run_sdpa_forward_decode(*shared, lens, scaling=SCALE, enable_gqa=True)

        # all layers at once, so that no weight is found in a cache
        return {"stock": attention, "linear, all": lambda: linear.run(self.batch, self.batch)}

    def _layer(self, role: str) -> Callable[[], None]:
        """A whole layer of the decoder, checks and copies included."""
        layer = next(x.layer for x in self.plan.layers if x.role == role)
        return lambda: self.decoder.run(self.step, layer, self.q, self.k, self.v, self.out, scale=SCALE)

    def gate(self) -> None:
        """Raise SystemExit unless scan, rerank and attention compute what the law says."""
        parts = self.parts()
        history = torch.cat([self.table[r, :n] for r, n in enumerate(self.lens)])
        indptr = torch.tensor([0, *np.cumsum(self.lens)])
        selection = self.decoder.selection
        words = {"scale": SCALE, "num_sinks": selection.sink, "window": selection.window}
        for name in ("scan", "pool", "top-k", "rerank", "pool top-k", "attention"):
            parts[name]()
        pool, counts = reference_select.scan(
            self.q.double(), self.k.double(), history, indptr, size=self.pool.positions.shape[2], **words
        )
        chosen, _ = reference_select.rerank(
            self.q.double(), self.k.double(), pool, counts, history, indptr, k=selection.final_k, **words
        )
        for found, law in ((self.pool, pool), (self.indices, chosen)):
            wrong = max(
                len(set(found.positions[r, 0].tolist()) ^ set(law[r, 0].tolist())) for r in range(self.batch)
            )
            if wrong > 2 * MAX_BORDER:
                raise SystemExit(f"gate: {wrong} positions of a list differ from the law")
        slots = torch.from_numpy(self.indices.slots[:, 0]).flatten()
        indptr = torch.arange(self.batch + 1) * self.indices.slots.shape[2]
        out, _ = reference.decode_attention(
            self.q.double(), self.k.double(), self.v.double(), slots, indptr, scale=SCALE
        )
        error = float((torch.from_numpy(self.sparse_out) - out).abs().max())
        if error > OUT_TOLERANCE:
            raise SystemExit(f"gate: attention over the selection is {error} from the law")

    def times(self, repeats: int) -> dict[str, float]:
        parts = self.parts()
        samples: dict[str, list[float]] = {name: [] for name in parts}
        for turn in range(repeats + 1):
            for name, part in parts.items():
                started = time.perf_counter()
                part()
                if turn:
                    samples[name].append((time.perf_counter() - started) * 1e3)
        return {name: statistics.median(values) for name, values in samples.items()}

    def totals(self, times: dict[str, float]) -> dict[str, float]:
        """ms of a step's attention under the plan and dense, and the ratio of their bytes."""
        sparse = sum(times[layer.role] for layer in self.plan.layers)
        dense = times["dense"] * NUM_LAYERS
        shape = KVShape(num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, kv_element_bytes=self.k.element_size())
        cost = explain(self.plan, shape, num_tokens=self.context, batch=self.batch)
        whole = {}
        if self.stock:
            stock, linear = times["stock"] * NUM_LAYERS, times["linear, all"]
            whole = {
                "stock ms per step": stock,
                "plan / stock": sparse / stock,
                "linear layers ms": linear,
                "plan / dense, whole step": (sparse + linear) / (dense + linear),
                "plan / stock, whole step": (sparse + linear) / (stock + linear),
            }
        return whole | {
            "plan ms per step": sparse,
            "dense ms per step": dense,
            "time ratio": sparse / dense,
            "byte ratio": cost.total_bytes / cost.dense_bytes,
            "plan GB/s": cost.total_bytes / sparse / 1e6,
            "dense GB/s": cost.dense_bytes / dense / 1e6,
        }


def _slot_table(lens: list[int]) -> Tensor:
    """Prompts in one stretch each, the last tokens interleaved."""
    table = torch.zeros(len(lens), max(lens), dtype=torch.int32)
    start = 1
    for r, n in enumerate(lens):
        table[r, : n - DECODED_LEN] = torch.arange(start, start + n - DECODED_LEN)
        start += n - DECODED_LEN
    for i in range(DECODED_LEN):
        for r, n in enumerate(lens):
            table[r, n - DECODED_LEN + i] = start
            start += 1
    return table


if __name__ == "__main__":
    sys.exit(main())
