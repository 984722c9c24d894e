"""Repair of reused blocks on the CPU, under a layer plan with `prefill: sparse` and dense.

    sglang-blockreuse bench repair [--dtype bfloat16] [--context 7000] [--tokens 200] [--plan NAME|PATH ...]
                                   [--json PATH]

One prompt of SmolLM2-135M's shapes whose repair tokens stand in runs at equal distances, all 30 layers with pools of
their own. Dense and sparse take turns; a ratio is the median of the paired ratios, planning included. `whole` adds the
model's linear layers, measured the same way. Timed only after the gate: every repair token has the output of a decode
row at its position under the same plan, and no layer scanned for want of fresh state.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_attention import HEAD_DIM, NUM_KV_HEADS, NUM_LAYERS, NUM_Q_HEADS, SCALE, LinearLayers

from sglang_blockreuse.demo import environment
from sglang_blockreuse.kernels.cpu_attention import Workspace, plan_attention, run_attention
from sglang_blockreuse.layers.decode_step import Batch
from sglang_blockreuse.layers.plan_loader import load_plan
from sglang_blockreuse.layers.repair_step import ExtendBatch
from sglang_blockreuse.layers.sparse_decode import SparseDecoder
from sglang_blockreuse.layers.sparse_repair import SparseRepair

RUN_LEN = 20  # below the window of the shipped plans, so that a decode row forces the same positions
OUT_TOLERANCE = {"float32": 1e-5, "bfloat16": 2**-7}  # one rounding of the result


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench repair", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16", choices=sorted(OUT_TOLERANCE))
    parser.add_argument("--context", type=int, default=7000)
    parser.add_argument("--tokens", type=int, default=200, help="repair tokens")
    parser.add_argument("--plan", nargs="+", default=["smollm2-135m-three-role", "smollm2-135m-reuse"])
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    found = []
    for plan in options.plan:
        bench = Bench(options, plan)
        bench.gate()
        found.append({"plan": plan, **bench.times(options.repeats)})
        print("  ".join(f"{name} {_shown(value)}" for name, value in found[-1].items()))
    if options.json:
        words = {name: str(value) for name, value in vars(options).items()}
        report = {"environment": environment.describe(), "options": words, "results": found}
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0


def _shown(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


class Bench:
    def __init__(self, options: argparse.Namespace, plan: str) -> None:
        torch.manual_seed(0)
        self.dtype_name, self.context = options.dtype, options.context
        dtype = getattr(torch, options.dtype)
        num_runs = max(1, options.tokens // RUN_LEN)
        self.starts = [options.context * (i + 1) // (num_runs + 1) for i in range(num_runs)]
        self.table = torch.arange(1, options.context + 1, dtype=torch.int32)[None]
        shape = (options.context + 1, NUM_KV_HEADS, HEAD_DIM)
        self.pools = [(torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(NUM_LAYERS)]
        self.num_tokens = num_runs * RUN_LEN
        self.q = torch.randn(self.num_tokens, NUM_Q_HEADS, HEAD_DIM).to(dtype)
        self.plan = load_plan(plan).bind(NUM_LAYERS, "LlamaForCausalLM")
        self.decoder = SparseDecoder(
            self.plan,
            num_requests=self.num_tokens,
            num_q_heads=NUM_Q_HEADS,
            k_pools=[k for k, _ in self.pools],
        )
        self.repair = SparseRepair(self.decoder)
        self.workspace = Workspace()
        self.linear = LinearLayers(dtype)

    def dense(self) -> list[torch.Tensor]:
        num_rows = len(self.starts)
        plan = plan_attention(self.table, [0] * num_rows, self.starts, [RUN_LEN] * num_rows)
        outs = []
        for k, v in self.pools:
            out = torch.empty_like(self.q)
            run_attention(plan, self.q, k, v, out, scale=SCALE, workspace=self.workspace)
            outs.append(out)
        return outs

    def sparse(self) -> list[torch.Tensor]:
        num_rows = len(self.starts)
        step = self.repair.begin(
            ExtendBatch(
                slot_table=self.table,
                requests=[0] * num_rows,
                prefix_lens=self.starts,
                extend_lens=[RUN_LEN] * num_rows,
                repair_T=np.ones(self.num_tokens, bool),
                row_ids=np.ones(num_rows, np.int64),
                bias=None,
            )
        )
        assert step is not None
        return self._layers(self.repair.run, step)

    def decode(self) -> list[torch.Tensor]:
        """The same tokens as decode rows of as many requests."""
        lens = [start + i + 1 for start in self.starts for i in range(RUN_LEN)]
        table = self.table.expand(self.num_tokens, -1).contiguous()
        ids, none = np.arange(self.num_tokens), np.zeros(self.num_tokens, np.uint8)
        step = self.decoder.begin(Batch(table, list(range(self.num_tokens)), lens, ids, none, None))
        assert step is not None
        return self._layers(self.decoder.run, step)

    def _layers(self, run: Callable[..., None], step: Any) -> list[torch.Tensor]:
        outs = []
        for layer, (k, v) in enumerate(self.pools):
            out = torch.empty_like(self.q)
            run(step, layer, self.q, k, v, out, scale=SCALE)
            outs.append(out)
        return outs

    def gate(self) -> None:
        """Raise SystemExit unless repair computes what decode does at the same positions."""
        for layer, (got, expected) in enumerate(zip(self.sparse(), self.decode(), strict=True)):
            error = float((got.float() - expected.float()).abs().max())
            if error > OUT_TOLERANCE[self.dtype_name]:
                raise SystemExit(f"gate: layer {layer} is {error} from decode at the same positions")
        scans = {k: n for k, n in self.decoder.metrics.counts.items() if k.startswith("decode_own_scans")}
        if scans:
            raise SystemExit(f"gate: layers scanned for want of fresh state: {scans}")

    def times(self, repeats: int) -> dict[str, float | str]:
        """Medians in ms per forward of 30 layers, and of the paired ratios sparse / dense."""
        parts = {
            "dense ms": self.dense,
            "sparse ms": self.sparse,
            "linear ms": lambda: self.linear.run(self.num_tokens, 1),
        }
        turns = []
        for turn in range(repeats + 1):
            seconds = {}
            for name, part in parts.items():
                started = time.perf_counter()
                part()
                seconds[name] = (time.perf_counter() - started) * 1e3
            if turn:
                turns.append(seconds)
        ratios = sorted(t["sparse ms"] / t["dense ms"] for t in turns)
        whole = [(t["sparse ms"] + t["linear ms"]) / (t["dense ms"] + t["linear ms"]) for t in turns]
        medians: dict[str, float | str] = {n: statistics.median(t[n] for t in turns) for n in parts}
        return medians | {
            "sparse / dense": statistics.median(ratios),
            "range": f"{ratios[0]:.2f} to {ratios[-1]:.2f}",
            "whole": statistics.median(whole),
        }


if __name__ == "__main__":
    sys.exit(main())
