"""The operations that `bench kernels` times: operands on a shuffled pool, the kernel and its law.

Dims as in kernels/reference.py: R rows, T tokens, Q query heads, H KV heads, D head dim, S pool slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_blockreuse.kernels import cpu_select, cpu_sparse, reference, reference_select
from sglang_blockreuse.kernels.cpu_attention import Workspace, plan_attention, run_attention
from sglang_blockreuse.kernels.cpu_numba import as_array
from sglang_blockreuse.kernels.dispatch import Dispatcher

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# RMS of the difference over the RMS of the law's float32 output: one rounding of the output and of the weights
OUT_BOUND = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
# share of chosen positions that may differ: scores that the dtype cannot tell apart
CHOICE_BOUND = 0.02
NUM_COPIED_LAYERS = 8
RUN_LEN = 16  # tokens of a repaired run
NUM_RUNS = 8  # of a row


@dataclass(frozen=True)
class Sizes:
    context: int
    batch: int
    q_heads: int
    kv_heads: int
    head_dim: int

    @property
    def scale(self) -> float:
        return self.head_dim**-0.5

    @property
    def final_k(self) -> int:
        return max(16, self.context // 16)

    @property
    def pool_size(self) -> int:
        return 4 * self.final_k


@dataclass(frozen=True)
class Operation:
    """`error(kernel(), reference())` must not exceed `bound`. Both may be called any number of times."""

    name: str
    kernel_name: str
    kernel: Callable[[], Any]
    reference: Callable[[], Any]
    error: Callable[[Any, Any], float]
    bound: float


class World:
    """Rows over one pool whose slots are shuffled."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        num_slots = sizes.batch * sizes.context
        shape = (num_slots, sizes.kv_heads, sizes.head_dim)
        self.k, self.v = self._normal(shape), self._normal(shape)
        self.q = self._normal((sizes.batch, sizes.q_heads, sizes.head_dim))
        self.slots = torch.randperm(num_slots).int().to(device)
        self.indptr = torch.arange(0, num_slots + 1, sizes.context).int().to(device)
        self.decode = (self.q, self.k, self.v, self.slots, self.indptr)

    def _normal(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape).to(self.device, self.dtype)

    def decode_law(self) -> Tensor:
        return reference.decode_attention(*self.decode, scale=self.sizes.scale)[0]

    def copies(self) -> tuple[list[Tensor], list[Tensor], tuple[Tensor, ...]]:
        """Pools of several layers and the slots, cosines and sines of half of them moved by one delta."""
        half = self.slots.numel() // 2
        pools = [[p.clone() for _ in range(NUM_COPIED_LAYERS)] for p in (self.k, self.v)]
        inv_freq = 10_000.0 ** -(torch.arange(0, self.sizes.head_dim, 2) / self.sizes.head_dim)
        cos, sin = reference.delta_cos_sin(inv_freq.to(self.device), torch.full((half,), 37).to(self.device))
        moved = (self.slots[:half].long(), self.slots[half : 2 * half].long(), cos, sin)
        return pools[0], pools[1], moved

    def runs(self) -> tuple[Tensor, list[int], list[int], list[int]]:
        """Queries, and request, prefix length and length of repaired runs, evenly spread over each row."""
        step = self.sizes.context // NUM_RUNS
        requests = [r for r in range(self.sizes.batch) for _ in range(NUM_RUNS)]
        prefixes = [i * step + step - RUN_LEN for _ in range(self.sizes.batch) for i in range(NUM_RUNS)]
        lens = [RUN_LEN] * len(requests)
        return self._normal((sum(lens), self.sizes.q_heads, self.sizes.head_dim)), requests, prefixes, lens

    def extend_operands(self) -> tuple[Any, ...]:
        """Runs as ragged virtual rows: what the kernels and the law take."""
        q, requests, prefixes, lens = self.runs()
        ends = [a + n for a, n in zip(prefixes, lens, strict=True)]
        slots = torch.cat(
            [self.slots[r * self.sizes.context :][:end] for r, end in zip(requests, ends, strict=True)]
        )
        kv, qo = (torch.tensor([0, *x]).cumsum(0).int().to(self.device) for x in (ends, lens))
        return q, self.k, self.v, slots, kv, qo


def operations(device: str, sizes: Sizes, dtype: torch.dtype) -> list[Operation]:
    """Every operation of the device."""
    world = World(sizes, dtype, device)
    made = (_cpu if device == "cpu" else _cuda)(world)
    return [rotate_copy(world), *made]


def rotate_copy(world: World) -> Operation:
    """Half the pool's slots moved onto the other half, in several layers."""
    ours_k, ours_v, moved = world.copies()
    law_k, law_v, _ = world.copies()
    dispatcher = Dispatcher("auto")

    def kernel() -> list[Tensor]:
        dispatcher.rotate_copy(ours_k, ours_v, *moved)
        return [*ours_k, *ours_v]

    def law() -> list[Tensor]:
        reference.rotate_copy(law_k, law_v, *moved)
        return [*law_k, *law_v]

    def error(got: list[Tensor], expected: list[Tensor]) -> float:
        return max(_rms(a, b) for a, b in zip(got, expected, strict=True))

    name = "CPU, compiled" if world.device == "cpu" else "Triton"
    return Operation("rotate_copy", name, kernel, law, error, OUT_BOUND[world.dtype])


def _cpu(world: World) -> Iterator[Operation]:
    sizes, bound = world.sizes, OUT_BOUND[world.dtype]
    table = world.slots.view(sizes.batch, sizes.context)
    workspace = Workspace()

    def attention(q: Tensor, requests: list[int], prefixes: list[int], lens: list[int]) -> Tensor:
        out = torch.empty_like(q)
        plan = plan_attention(table, requests, prefixes, lens)
        run_attention(plan, q, world.k, world.v, out, scale=sizes.scale, workspace=workspace)
        return out

    rows = list(range(sizes.batch))
    before = [sizes.context - 1] * sizes.batch
    yield Operation(
        "decode_attention",
        "CPU, torch",
        lambda: attention(world.q, rows, before, [1] * sizes.batch),
        world.decode_law,
        _rms,
        bound,
    )
    extend = world.extend_operands()
    _, requests, prefixes, lens = world.runs()
    yield Operation(
        "extend_attention",
        "CPU, torch",
        lambda: attention(extend[0], requests, prefixes, lens),
        lambda: reference.extend_attention(*extend, scale=sizes.scale)[0],
        _rms,
        bound,
    )
    yield from _cpu_sparse(world)


def _cpu_sparse(world: World) -> Iterator[Operation]:
    """Scan and attention over its choice; one list per row."""
    sizes = world.sizes
    geometry = cpu_select.Geometry(
        world.dtype, sizes.kv_heads, sizes.q_heads // sizes.kv_heads, sizes.head_dim
    )
    lens = np.full(sizes.batch, sizes.context, np.int32)
    rows = cpu_select.Rows(
        np.arange(sizes.batch, dtype=np.int32),
        lens,
        world.slots.view(sizes.batch, -1).numpy(),
        np.empty(0, np.uint8),
        np.zeros(4, np.float32),
    )
    unused, chosen = (cpu_select.Table.empty(sizes.batch, 1, n) for n in (1, sizes.final_k))
    history = np.zeros(sizes.batch, np.uint8)
    work = np.empty((sizes.batch, sizes.q_heads, sizes.context), np.float32)
    q = (world.q.float() * sizes.scale).numpy()
    keys, values = as_array(world.k), as_array(world.v)
    out = np.empty(q.shape, np.float32)

    def scan() -> Tensor:
        cpu_select.score(geometry, q, keys, rows, unused, history, work)
        cpu_select.keep(rows, unused, history, work, 0, 0, chosen)
        return torch.from_numpy(chosen.positions.copy())

    def scan_law() -> Tensor:
        options = {"size": sizes.final_k, "scale": sizes.scale}
        return reference_select.scan(world.q, world.k, world.slots, world.indptr, **options)[0]

    yield Operation("scan", "CPU, compiled", scan, scan_law, _differing, CHOICE_BOUND)
    scan()
    slots = torch.from_numpy(chosen.slots[:, 0].copy()).reshape(-1)
    indptr = torch.arange(0, slots.numel() + 1, sizes.final_k).int()

    def attend() -> Tensor:
        cpu_sparse.attend(geometry, q, keys, values, rows, chosen, out)
        return torch.from_numpy(out)

    def attend_law() -> Tensor:
        return reference.decode_attention(world.q, world.k, world.v, slots, indptr, scale=sizes.scale)[0]

    yield Operation("sparse attention", "CPU, compiled", attend, attend_law, _rms, OUT_BOUND[world.dtype])


def _cuda(world: World) -> Iterator[Operation]:
    sizes, bound = world.sizes, OUT_BOUND[world.dtype]
    from sglang_blockreuse.kernels import decode_attention, extend_attention, scan, top_k

    extend = world.extend_operands()
    selection = (world.q, world.k, world.slots, world.indptr)
    scale = {"scale": sizes.scale}
    pool, pool_lens = reference_select.scan(*selection, size=sizes.pool_size, **scale)
    pooled = {"pool_RXM": pool, "pool_lens_R": pool_lens, **scale}
    lens = torch.full((sizes.batch,), sizes.context, device=world.device).int()
    kept = {"positions_RXW": pool, "row_lens_R": lens}

    def best(scores: Any, top: Any) -> Callable[[], Tensor]:
        return lambda: top(scores(*selection, **scale), lens, sizes.pool_size)[0]

    def best_of_pool(scores: Any, top: Any) -> Callable[[], Tensor]:
        return lambda: top(scores(*selection, **pooled), pool_lens, sizes.final_k, **kept)[0]

    def first(call: Any, *operands: Tensor) -> Callable[[], Tensor]:
        return lambda: call(*operands, **scale)[0]

    attend, attend_law = decode_attention.decode_attention, reference.decode_attention
    run, run_law = extend_attention.extend_attention, reference.extend_attention
    decode = world.decode
    yield Operation(
        "decode_attention", "Triton", first(attend, *decode), first(attend_law, *decode), _rms, bound
    )
    yield Operation("extend_attention", "Triton", first(run, *extend), first(run_law, *extend), _rms, bound)
    fast, law = (scan.pooled_scores, top_k.top_k), (reference_select.pooled_scores, reference_select.top_k)
    yield Operation("scan", "Triton", best(*fast), best(*law), _differing, CHOICE_BOUND)
    yield Operation("rerank", "Triton", best_of_pool(*fast), best_of_pool(*law), _differing, CHOICE_BOUND)


def _rms(got: Tensor, expected: Tensor) -> float:
    """Relative to the law's output; NaN counts as infinite."""
    difference = (got.double() - expected.double()).square().mean().sqrt()
    value = float(difference / expected.double().square().mean().sqrt())
    return value if value == value else float("inf")


def _differing(got: Tensor, expected: Tensor) -> float:
    """Largest share, over the lists, of positions that only one of the two has."""
    worst = 0.0
    for a, b in zip(got.flatten(0, 1).tolist(), expected.flatten(0, 1).tolist(), strict=True):
        worst = max(worst, len(set(a) ^ set(b)) / (2 * len(b)))
    return worst
