"""Attention on the CPU against SGLang's torch_native backend, on a synthetic pool with SmolLM2-135M's shapes.

    sglang-blockreuse bench attention [--dtype bfloat16] [--case NAME ...] [--repeats 15] [--json PATH]

Both sides run the same layers of the same pool in one process, turn by turn; a ratio is the median of the paired
ratios, so that a slow moment of the machine hits both. Times are per forward of 30 layers and include planning.
`model` adds the linear layers of the model, measured the same way: it estimates the ratio of whole forwards.
A case is timed only after its output passed the gate: its error against float64 (RMS) is at most 1.5 times stock's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor

from sglang_blockreuse.demo import environment
from sglang_blockreuse.kernels.cpu_attention import Workspace, plan_attention, run_attention
from sglang_blockreuse.kernels.reference import extend_attention

NUM_LAYERS, NUM_Q_HEADS, NUM_KV_HEADS, HEAD_DIM = 30, 9, 3, 64
HIDDEN_SIZE, MLP_SIZE, VOCAB_SIZE = 576, 1536, 49152
SCALE = HEAD_DIM**-0.5
MAX_ERROR_RATIO = 1.5


@dataclass(frozen=True, kw_only=True)
class Case:
    """Rows of a forward: (request, prefix length, extend length)."""

    name: str
    rows: list[tuple[int, int, int]]
    is_decode: bool = False
    # tokens at the end of every request that a batch decoded together, so that their slots interleave
    decoded_len: int = 0
    # layers that are run and scaled up to 30: stock takes minutes for many rows
    num_layers: int = NUM_LAYERS
    bar: float | None = None  # highest ratio of whole forwards that is accepted

    @property
    def num_tokens(self) -> int:
        return sum(extend_len for _, _, extend_len in self.rows)


def decode_case(
    num_requests: int, num_keys: int, *, decoded_len: int = 200, bar: float | None = None
) -> Case:
    return Case(
        name=f"decode-{num_requests}x{num_keys}",
        rows=[(r, num_keys - 1 - r, 1) for r in range(num_requests)],
        is_decode=True,
        decoded_len=decoded_len,
        bar=bar,
    )


def repair_case(num_keys: int) -> Case:
    """Two rows of 8-20 tokens at every eighth of the prompt, and a question of 30."""
    starts = [num_keys * i // 8 for i in range(1, 8)]
    rows = [(0, start - 14, 28) for start in starts]
    rows += [(0, start + 200, 8) for start in starts]
    rows.append((0, num_keys - 30, 30))
    return Case(name=f"repair-{num_keys}", rows=sorted(rows), num_layers=2)


CASES = [
    decode_case(1, 512),
    decode_case(1, 4096, bar=0.8),
    decode_case(1, 7500, bar=0.6),
    decode_case(8, 600),
    decode_case(8, 7500, bar=0.4),
    Case(name="prefill-256", rows=[(0, 0, 256)], bar=1.0),
    Case(name="prefill-1024", rows=[(0, 0, 1024)], num_layers=6, bar=1.0),
    Case(name="prefill-4096", rows=[(0, 0, 4096)], num_layers=2, bar=1.0),
    Case(name="chunk-1024-at-4096", rows=[(0, 4096, 1024)], num_layers=2, bar=1.0),
    Case(name="continue-32-at-4096", rows=[(0, 4096, 32)], num_layers=2, bar=1.0),
    repair_case(4096),
    Case(
        name="mixed-chunk",
        rows=[(0, 1024, 480)] + [(r, 2000 - r, 1) for r in range(1, 8)],
        decoded_len=0,
        num_layers=4,
        bar=1.0,
    ),
]


@dataclass(frozen=True, kw_only=True)
class Result:
    case: str
    dtype: str
    stock_ms: float
    ours_ms: float
    linear_ms: float
    attention_ratio: float
    model_ratio: float
    bar: float | None
    error_stock: float
    error_ours: float
    ratios: list[float] = field(repr=False)


class Workload:
    """One case on a filled pool: the operands, and a forward on either side."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        self.case = case
        ends: dict[int, int] = {}
        for request, prefix_len, extend_len in case.rows:
            ends[request] = max(ends.get(request, 0), prefix_len + extend_len)
        num_slots = sum(ends.values()) + 64
        self.table = torch.zeros(len(ends), max(ends.values()), dtype=torch.int32)
        self._assign_slots(ends)
        shape = (num_slots, NUM_KV_HEADS, HEAD_DIM)
        self.pools = [
            (torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)) for _ in range(case.num_layers)
        ]
        self.q = torch.randn(case.num_tokens, NUM_Q_HEADS, HEAD_DIM).to(dtype)
        requests, prefix_lens, extend_lens = zip(*case.rows, strict=True)
        self.requests, self.prefix_lens, self.extend_lens = map(list, (requests, prefix_lens, extend_lens))
        self.stock_rows = tuple(map(torch.tensor, (requests, prefix_lens, extend_lens)))
        self.workspace = Workspace()
        self.stock_backend = object.__new__(TorchNativeAttnBackend)

    def _assign_slots(self, ends: dict[int, int]) -> None:
        """Prompts are consecutive; the decoded tails interleave."""
        slot = 1
        prompts = {r: end - self.case.decoded_len for r, end in ends.items()}
        for r, prompt_len in prompts.items():
            self.table[r, :prompt_len] = torch.arange(slot, slot + prompt_len)
            slot += prompt_len
        for i in range(self.case.decoded_len):
            for r, prompt_len in prompts.items():
                self.table[r, prompt_len + i] = slot
                slot += 1

    def ours(self) -> Tensor:
        plan = plan_attention(self.table, self.requests, self.prefix_lens, self.extend_lens)
        for k, v in self.pools:
            out = torch.empty_like(self.q)
            run_attention(plan, self.q, k, v, out, scale=SCALE, workspace=self.workspace)
        return out

    def stock(self) -> Tensor:
        requests, prefix_lens, extend_lens = self.stock_rows
        for k, v in self.pools:
            out = torch.empty_like(self.q)
            shared = (self.q, out, k, v, self.table, requests, prefix_lens + extend_lens)
            if self.case.is_decode:
                self.stock_backend._run_sdpa_forward_decode(*shared, scaling=SCALE, enable_gqa=True)
            else:
                self.stock_backend._run_sdpa_forward_extend(
                    *shared, prefix_lens, extend_lens, scaling=SCALE, enable_gqa=True, causal=True
                )
        return out

    def exact(self) -> Tensor:
        """The last layer in float64."""
        k, v = self.pools[-1]
        ends = [a + n for a, n in zip(self.prefix_lens, self.extend_lens, strict=True)]
        slots = torch.cat([self.table[r, :end].long() for r, end in zip(self.requests, ends, strict=True)])
        kv_indptr, qo_indptr = (torch.tensor([0, *lens]).cumsum(0) for lens in (ends, self.extend_lens))
        operands = (self.q.double(), k.double(), v.double(), slots)
        return extend_attention(*operands, kv_indptr, qo_indptr, scale=SCALE)[0]


class LinearLayers:
    """The model's matrix products, which both sides share."""

    def __init__(self, dtype: torch.dtype) -> None:
        q, kv = NUM_Q_HEADS * HEAD_DIM, NUM_KV_HEADS * HEAD_DIM
        shapes = [
            (q + 2 * kv, HIDDEN_SIZE),
            (HIDDEN_SIZE, q),
            (2 * MLP_SIZE, HIDDEN_SIZE),
            (HIDDEN_SIZE, MLP_SIZE),
        ]
        self.layers = [[torch.randn(shape).to(dtype) for shape in shapes] for _ in range(NUM_LAYERS)]
        self.head = torch.randn(VOCAB_SIZE, HIDDEN_SIZE).to(dtype)

    def run(self, num_tokens: int, num_sampled: int) -> None:
        inputs = {
            size: torch.zeros(num_tokens, size, dtype=self.head.dtype) for size in (HIDDEN_SIZE, MLP_SIZE)
        }
        for weights in self.layers:
            for weight in weights:
                torch.nn.functional.linear(inputs[weight.shape[1]], weight)
        torch.nn.functional.linear(inputs[HIDDEN_SIZE][:num_sampled], self.head)


def measure(case: Case, dtype: torch.dtype, linear: LinearLayers, repeats: int) -> Result:
    work = Workload(case, dtype)
    exact = work.exact()
    error_stock, error_ours = (
        (out.double() - exact).square().mean().sqrt().item() for out in (work.stock(), work.ours())
    )
    if not error_ours <= MAX_ERROR_RATIO * error_stock:
        raise SystemExit(
            f"{case.name}: error {error_ours:.2e} against float64, stock {error_stock:.2e}: not timed"
        )
    num_sampled = len(set(work.requests))
    scale = NUM_LAYERS / case.num_layers
    stock_ms, ours_ms, linear_ms = [], [], []
    for _ in range(repeats):
        stock_ms.append(scale * _time_ms(work.stock))
        ours_ms.append(scale * _time_ms(work.ours))
        linear_ms.append(_time_ms(lambda: linear.run(case.num_tokens, num_sampled)))
    rest_ms = statistics.median(linear_ms)
    pairs = list(zip(stock_ms, ours_ms, strict=True))
    return Result(
        case=case.name,
        dtype=str(dtype).removeprefix("torch."),
        stock_ms=statistics.median(stock_ms),
        ours_ms=statistics.median(ours_ms),
        linear_ms=rest_ms,
        attention_ratio=statistics.median(ours / stock for stock, ours in pairs),
        model_ratio=statistics.median((ours + rest_ms) / (stock + rest_ms) for stock, ours in pairs),
        bar=case.bar,
        error_stock=error_stock,
        error_ours=error_ours,
        ratios=[ours / stock for stock, ours in pairs],
    )


def _time_ms(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return (time.perf_counter() - start) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench attention", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float32"])
    parser.add_argument("--case", action="append", help=f"default: all of {', '.join(c.name for c in CASES)}")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    torch.manual_seed(0)
    print(
        f"{'case':22}{'dtype':10}{'stock ms':>10}{'ours ms':>10}{'linear ms':>10}{'attention':>10}{'model':>8}  bar"
    )
    results = []
    for name in args.dtype or ["bfloat16", "float32"]:
        dtype = getattr(torch, name)
        linear = LinearLayers(dtype)
        for case in CASES:
            if args.case and case.name not in args.case:
                continue
            r = measure(case, dtype, linear, args.repeats)
            verdict = "" if r.bar is None else f"{r.bar} {'met' if r.model_ratio <= r.bar else 'MISSED'}"
            print(
                f"{r.case:22}{r.dtype:10}{r.stock_ms:10.1f}{r.ours_ms:10.1f}{r.linear_ms:10.1f}"
                f"{r.attention_ratio:10.3f}{r.model_ratio:8.3f}  {verdict}",
                flush=True,
            )
            results.append(r)
    if args.json:
        setting = {"threads": torch.get_num_threads(), "amx": torch.cpu._is_amx_tile_supported()}
        record = {"environment": environment.describe(), "setting": setting}
        args.json.write_text(json.dumps({**record, "results": [asdict(r) for r in results]}, indent=1))


if __name__ == "__main__":
    main()
