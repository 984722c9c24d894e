"""Checks every kernel on the device, then times it against the bytes that it must move. Needs no SGLang.

    python bench/gpu_check.py [--json FILE] [--no-flashinfer]     # a CUDA device, under four minutes
    python bench/gpu_check.py --interpret                         # no device: tiny sizes, correctness only

The gate comes first: with one failed check nothing is timed and the exit status is 1. The floor of an operation is
its bytes over the copy bandwidth measured in the same run; FlashInfer's dense decode stands beside ours. Nothing is
estimated: a time that was not measured is not printed.
"""

from __future__ import annotations

import os
import sys

if "--interpret" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace

import gpu_prefill
import torch
import triton
from torch import Tensor

from sglang_blockreuse.kernels import reference, reference_select
from sglang_blockreuse.kernels.decode_attention import decode_attention
from sglang_blockreuse.kernels.extend_attention import extend_attention
from sglang_blockreuse.kernels.rotate_copy import PoolTable, rotate_copy
from sglang_blockreuse.kernels.scan import pooled_scores
from sglang_blockreuse.kernels.top_k import top_k
from sglang_blockreuse.layers.biased_rows import BiasedRows, Shape

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from tolerances import KERNEL_OUT

BIAS = {"alpha": 0.5, "beta": -0.5}


@dataclass(frozen=True)
class Sizes:
    num_rows: int
    context: int
    num_heads: int
    group: int
    head_dim: int
    num_layers: int
    run_len: int  # queries of an extend row
    final_k: int
    pool_size: int


DEVICE_SIZES = Sizes(8, 32768, 8, 4, 128, 8, 512, 2048, 8192)  # Llama-3.1-8B heads; 8 of its layers
CHECK_SIZES = Sizes(3, 1500, 8, 4, 128, 3, 100, 128, 512)
TINY_SIZES = Sizes(2, 70, 2, 3, 64, 2, 9, 16, 32)


@dataclass(frozen=True)
class Check:
    name: str
    dtype: str
    error: float  # largest |got - expected|; 1 for a wrong id
    passed: bool


@dataclass(frozen=True)
class Timing:
    name: str
    microseconds: float  # median
    megabytes: float  # that must move
    floor_microseconds: float  # at the copy bandwidth of this run
    times_floor: float


class Batch:
    """Random rows over a shuffled pool, at one set of sizes."""

    def __init__(self, sizes: Sizes, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        self.sizes, self.dtype, self.device = sizes, dtype, device
        num_slots = sizes.num_rows * sizes.context + 64
        shape = (num_slots, sizes.num_heads, sizes.head_dim)
        self.k, self.v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(2))
        order = torch.randperm(num_slots, device=device)
        self.indices = order[: sizes.num_rows * sizes.context].int()
        self.spare = order[sizes.num_rows * sizes.context :]
        self.tags = torch.randint(0, 4, (num_slots,), device=device).to(torch.uint8)
        self.indptr = torch.arange(sizes.num_rows + 1, device=device, dtype=torch.int32) * sizes.context
        # ragged: full, short, ..., the last row empty
        lens = [sizes.context] + [sizes.context // (r + 1) for r in range(1, sizes.num_rows - 1)] + [0]
        self.lens = torch.tensor(lens, device=device, dtype=torch.int32)
        self.scale = sizes.head_dim**-0.5

    def queries(self, num_tokens: int) -> Tensor:
        shape = (num_tokens, self.sizes.num_heads * self.sizes.group, self.sizes.head_dim)
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def int4(self) -> reference_select.Int4Keys:
        keys = reference_select.Int4Keys.empty(*self.k.shape, self.device)
        reference_select.write_int4(keys, torch.arange(self.k.shape[0], device=self.device), self.k)
        return keys

    def run_bounds(self, run_len: int) -> Tensor:
        runs = self.lens.clamp(max=run_len)
        return torch.cat((runs.new_zeros(1), runs.cumsum(0))).int()


def compare(name: str, dtype: torch.dtype, got: Tensor, expected: Tensor) -> Check:
    got, expected = got.double(), expected.double()
    finite = expected.isfinite()
    error = (got - expected)[finite].abs()
    absolute, relative = KERNEL_OUT[name, dtype]
    passed = torch.equal(got.isfinite(), finite)
    passed = passed and bool((error <= absolute + relative * expected[finite].abs()).all())
    return Check(
        name, str(dtype).removeprefix("torch."), error.max().item() if error.numel() else 0.0, passed
    )


def same(name: str, dtype: torch.dtype, got: Tensor, expected: Tensor) -> Check:
    equal = torch.equal(got, expected)
    return Check(name, str(dtype).removeprefix("torch."), 0.0 if equal else 1.0, equal)


def run_checks(sizes: Sizes, device: str) -> Iterator[Check]:
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        batch = Batch(sizes, dtype, device)
        yield from check_rotate_copy(batch)
        for got, want in gpu_prefill.loaded(dtype, device):
            yield compare("rotate_copy", dtype, got, want)
        yield from check_attention(batch)
        yield from check_served_rows(batch)
        yield from check_selection(batch)
    if device == "cuda":
        yield check_graph(Batch(sizes, torch.bfloat16, device))


def check_rotate_copy(batch: Batch) -> Iterator[Check]:
    half, spare = batch.sizes.head_dim // 2, batch.spare
    num_tokens = spare.numel() // 2
    deltas = torch.arange(num_tokens, device=batch.device) * 37 - 200
    inv_freq = 10000.0 ** (-torch.arange(half, device=batch.device) / half)
    angles = reference.delta_cos_sin(inv_freq, deltas)
    k_layers = [torch.randn_like(batch.k) for _ in range(batch.sizes.num_layers)]
    v_layers = [torch.randn_like(batch.v) for _ in range(batch.sizes.num_layers)]
    slots = spare[:num_tokens], spare[num_tokens : 2 * num_tokens]
    expected = [x.double() for x in k_layers]
    reference.rotate_copy(expected, [x.double() for x in v_layers], *slots, *angles)
    rotate_copy(PoolTable.of(k_layers), PoolTable.of(v_layers), *slots, *angles)
    for got, want in zip(k_layers, expected, strict=True):
        yield compare("rotate_copy", batch.dtype, got[slots[1]], want[slots[1]])
    yield same("values moved", batch.dtype, v_layers[-1][slots[1]], v_layers[-1][slots[0]])


def check_attention(batch: Batch) -> Iterator[Check]:
    pools, wide_pools = (batch.k, batch.v), (batch.k.double(), batch.v.double())
    rows = {"kv_lens_R": batch.lens, "scale": batch.scale, "tags_S": batch.tags, **BIAS}
    q = batch.queries(batch.sizes.num_rows)
    expected = reference.decode_attention(q.double(), *wide_pools, batch.indices, batch.indptr, **rows)
    for num_splits in (1, 8):
        got = decode_attention(q, *pools, batch.indices, batch.indptr, num_splits=num_splits, **rows)
        yield compare("decode_attention", batch.dtype, got[0], expected[0])
        yield compare("lse", batch.dtype, got[1], expected[1])
    bounds = batch.run_bounds(batch.sizes.run_len)
    q = batch.queries(int(bounds[-1]))
    got = extend_attention(q, *pools, batch.indices, batch.indptr, bounds, **rows)
    expected = reference.extend_attention(
        q.double(), *wide_pools, batch.indices, batch.indptr, bounds, **rows
    )
    yield compare("extend_attention", batch.dtype, got[0], expected[0])
    yield compare("lse", batch.dtype, got[1], expected[1])


def check_selection(batch: Batch) -> Iterator[Check]:
    sizes, dtype = batch.sizes, batch.dtype
    call, rows = (batch.indices, batch.indptr), {"kv_lens_R": batch.lens}
    options = {"scale": batch.scale, "tags_S": batch.tags, **BIAS}
    q, keys = batch.queries(sizes.num_rows), batch.int4()
    law = reference_select.quantise_int4(batch.k)
    yield same("int4 codes", dtype, keys.codes, law.codes)
    yield same("int4 ranges", dtype, keys.ranges, law.ranges)
    for kind in (batch.k, keys):
        wide = kind.double() if isinstance(kind, Tensor) else kind
        got = pooled_scores(q, kind, *call, **rows, **options)
        expected = reference_select.pooled_scores(q.double(), wide, *call, **rows, **options)
        for r, length in enumerate(batch.lens.tolist()):
            yield compare("scores", dtype, got[r, :, :length], expected[r, :, :length])
        # the ids are compared on one and the same score row: scores may differ in the last place
        forced = {"num_sinks": 4, "window": 16}
        pool = top_k(got, batch.lens, sizes.pool_size, **forced)
        yield same(
            "top-k ids", dtype, pool[0], reference_select.top_k(got, batch.lens, sizes.pool_size, **forced)[0]
        )
        later = batch.queries(sizes.num_rows)
        in_pool = pooled_scores(later, kind, *call, pool_RXM=pool[0], pool_lens_R=pool[1], **options)
        listed = {"positions_RXW": pool[0], "row_lens_R": batch.lens}
        chosen = top_k(in_pool, pool[1], sizes.final_k, **listed, **forced)
        expected_ids, _ = reference_select.top_k(
            in_pool, pool[1], sizes.final_k, positions_RXW=pool[0], row_lens_R=batch.lens, **forced
        )
        yield same("rerank ids", dtype, chosen[0], expected_ids)


class ServedRows:
    """Rows as a server attends them with alpha and beta: in the host's page table, in any order of request slots."""

    def __init__(self, batch: Batch) -> None:
        sizes = batch.sizes
        self.batch, self.lens = batch, batch.lens.clamp(min=1).long()
        order = torch.randperm(sizes.num_rows, device=batch.device)
        self.table = torch.zeros((sizes.num_rows + 1, sizes.context), dtype=torch.int32, device=batch.device)
        self.requests = order + 1
        self.table[self.requests] = batch.indices.view(sizes.num_rows, -1)
        shape = Shape(sizes.num_heads * sizes.group, batch.scale, sizes.context, sizes.num_rows)
        self.rows = BiasedRows(self.table, batch.k, shape, **BIAS)
        self.rows.tags_S.copy_(batch.tags)
        self.rows.warm_up(batch.k, batch.v, batch.dtype)

    def forward_batch(self, runs: list[int] | None = None) -> SimpleNamespace:
        """What of the host's batch such rows read; `runs` are the queries of each row, None a decode step."""
        return SimpleNamespace(
            forward_mode=SimpleNamespace(is_decode=lambda: runs is None),
            req_pool_indices=self.requests,
            seq_lens=self.lens,
            extend_seq_lens=torch.tensor(runs, device=self.batch.device) if runs else None,
            extend_seq_lens_cpu=runs,
        )

    def expected(self, q: Tensor, runs: list[int]) -> Tensor:
        batch = self.batch
        lists = [self.table[r, :n] for r, n in zip(self.requests.tolist(), self.lens.tolist(), strict=True)]
        bounds = [
            torch.tensor([0, *lens], device=batch.device).cumsum(0) for lens in (self.lens.tolist(), runs)
        ]
        wide = (q.double(), batch.k.double(), batch.v.double())
        options = {"scale": batch.scale, "tags_S": batch.tags, **BIAS}
        return reference.extend_attention(*wide, torch.cat(lists), *bounds, **options)[0]


def check_served_rows(batch: Batch) -> Iterator[Check]:
    served = ServedRows(batch)
    runs = [min(batch.sizes.run_len, n) for n in served.lens.tolist()]
    for name, run_lens in (("extend_attention", runs), ("decode_attention", None)):
        forward_batch = served.forward_batch(run_lens)
        served.rows.plan(forward_batch)
        q = batch.queries(sum(run_lens or [1] * len(runs)))
        operands = (q, batch.k, batch.v)
        got = served.rows.extend(forward_batch, *operands) if run_lens else served.rows.decode(*operands)
        yield compare(name, batch.dtype, got, served.expected(q, run_lens or [1] * len(runs)))


def check_graph(batch: Batch) -> Check:
    """A captured decode step replays with rows of other requests, lengths, slots and tags."""
    served = ServedRows(batch)
    q, forward_batch = batch.queries(batch.sizes.num_rows), served.forward_batch()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        served.rows.plan(forward_batch)
        out = served.rows.decode(q, batch.k, batch.v)
    served.lens.copy_(served.lens.flip(0))
    served.requests.copy_(served.requests.roll(1))
    served.table.copy_(served.table.flip(1))
    batch.tags.copy_(batch.tags.flip(0))
    served.rows.tags_S.copy_(batch.tags)
    graph.replay()
    return compare("decode_attention", batch.dtype, out, served.expected(q, [1] * batch.sizes.num_rows))


def copy_bandwidth() -> float:
    """Bytes per second of a device copy, read and write counted."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (milliseconds(lambda: target.copy_(source)) * 1e-3)


def milliseconds(call: Callable[[], object]) -> float:
    """Median; the L2 cache is flushed before every call."""
    return float(triton.testing.do_bench(call, warmup=10, rep=60, return_mode="median"))


def run_timings(sizes: Sizes, bandwidth: float, with_flashinfer: bool) -> Iterator[Timing]:
    batch = Batch(sizes, torch.bfloat16, "cuda")
    num_keys, token = sizes.num_rows * sizes.context, sizes.num_heads * sizes.head_dim * 2
    int4_token = sizes.num_heads * (sizes.head_dim // 2 + 8)

    def timing(name: str, num_bytes: float, call: Callable[[], object]) -> Timing:
        measured, floor = milliseconds(call) * 1e3, num_bytes / bandwidth * 1e6
        return Timing(name, measured, num_bytes / 1e6, floor, measured / floor)

    rows = (batch.indices, batch.indptr)
    q, pools = batch.queries(sizes.num_rows), (batch.k, batch.v)
    tagged = {"scale": batch.scale, "tags_S": batch.tags, **BIAS, "max_len": sizes.context}
    plain = {"scale": batch.scale, "max_len": sizes.context}
    yield timing("decode, dense", num_keys * 2 * token, lambda: decode_attention(q, *pools, *rows, **plain))
    yield timing(
        "decode, dense, tags", num_keys * 2 * token, lambda: decode_attention(q, *pools, *rows, **tagged)
    )
    chosen = batch.indices.view(sizes.num_rows, -1)[:, : sizes.final_k].contiguous().flatten()
    bounds = torch.arange(sizes.num_rows + 1, device="cuda", dtype=torch.int32) * sizes.final_k
    short = {"scale": batch.scale, "max_len": sizes.final_k}
    yield timing(
        f"decode, {sizes.final_k} selected",
        chosen.numel() * 2 * token,
        lambda: decode_attention(q, *pools, chosen, bounds, **short),
    )
    lens = torch.full((sizes.num_rows,), sizes.context, device="cuda", dtype=torch.int32)
    for name, keys, key_bytes in (("exact", batch.k, token), ("int4", batch.int4(), int4_token)):
        options = {"scale": batch.scale}
        # the scan reads its keys twice: once to normalise, once to score
        yield timing(
            f"scan, {name} keys",
            2 * num_keys * key_bytes,
            lambda keys=keys, o=options: pooled_scores(q, keys, *rows, width=sizes.context, **o),
        )
        scores = pooled_scores(q, keys, *rows, width=sizes.context, **options)
        pool, pool_lens = top_k(scores, lens, sizes.pool_size)
        yield timing(
            f"rerank in {sizes.pool_size}, {name} keys",
            2 * pool.numel() * key_bytes,
            lambda keys=keys, p=pool, n=pool_lens, o=options: top_k(
                pooled_scores(q, keys, *rows, pool_RXM=p, pool_lens_R=n, **o),
                n,
                sizes.final_k,
                positions_RXW=p,
            ),
        )
    yield timing(f"top-{sizes.pool_size}", scores.numel() * 4, lambda: top_k(scores, lens, sizes.pool_size))
    k_layers, v_layers = ([torch.randn_like(batch.k) for _ in range(sizes.num_layers)] for _ in range(2))
    slots = batch.indices.long().view(2, -1)
    angles = reference.delta_cos_sin(torch.ones(sizes.head_dim // 2, device="cuda"), slots[0] % 977)
    tables = PoolTable.of(k_layers), PoolTable.of(v_layers)
    moved = 2 * slots.shape[1] * sizes.num_layers * 2 * token
    yield timing(
        f"rotate-copy, {sizes.num_layers} layers", moved, lambda: rotate_copy(*tables, *slots, *angles)
    )
    if with_flashinfer:
        yield timing("FlashInfer decode, dense", num_keys * 2 * token, flashinfer_decode(batch, q))


def flashinfer_decode(batch: Batch, q: Tensor) -> Callable[[], object]:
    import flashinfer

    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=True)
    sizes = batch.sizes
    wrapper.plan(
        indptr=batch.indptr,
        indices=batch.indices,
        last_page_len=torch.ones(sizes.num_rows, dtype=torch.int32, device="cuda"),
        num_qo_heads=sizes.num_heads * sizes.group,
        num_kv_heads=sizes.num_heads,
        head_dim=sizes.head_dim,
        page_size=1,
        q_data_type=batch.dtype,
        kv_data_type=batch.dtype,
    )
    pools = batch.k.unsqueeze(1), batch.v.unsqueeze(1)
    return lambda: wrapper.run(q, pools)


def check_flashinfer(batch: Batch) -> Iterator[Check]:
    """The class plans on FlashInfer itself, against the reference."""
    from sglang_blockreuse.kernels import flashinfer_attention as fi

    sizes = batch.sizes
    bounds = batch.run_bounds(sizes.run_len)
    q, rows = batch.queries(int(bounds[-1])), {"kv_lens_R": batch.lens}
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    attention = fi.ClassAttention(lambda: fi.FlashInferExecutor(workspace))
    parts = fi.plan_classes(batch.indices, batch.indptr, bounds, batch.tags, **BIAS, **rows)
    num_q_heads = sizes.num_heads * sizes.group
    dims = (num_q_heads, sizes.num_heads, sizes.head_dim, sizes.head_dim)
    attention.plan(parts, fi.Geometry(*dims, batch.scale, batch.dtype, batch.dtype))
    out, lse = attention.run(q, batch.k, batch.v)
    expected = reference.extend_attention(
        q.double(),
        batch.k.double(),
        batch.v.double(),
        batch.indices,
        batch.indptr,
        bounds,
        scale=batch.scale,
        tags_S=batch.tags,
        **BIAS,
        **rows,
    )
    yield compare("flashinfer", batch.dtype, out, expected[0])
    yield compare("flashinfer lse", batch.dtype, lse, expected[1])


def print_checks(checks: list[Check]) -> None:
    worst: dict[tuple[str, str], Check] = {}
    for check in checks:
        key = (check.name, check.dtype)
        if key not in worst or (not check.passed, check.error) > (not worst[key].passed, worst[key].error):
            worst[key] = check
    print(f"{'check':24}{'dtype':12}{'max error':>12}")
    for check in worst.values():
        print(f"{check.name:24}{check.dtype:12}{check.error:12.2e}  {'ok' if check.passed else 'FAILED'}")


def print_timings(timings: list[Timing], bandwidth: float) -> None:
    print(f"\ncopy bandwidth {bandwidth / 1e9:.0f} GB/s (read and write)")
    print(f"{'operation':34}{'us':>10}{'MB':>10}{'floor us':>10}{'x floor':>9}")
    for t in timings:
        row = f"{t.microseconds:10.1f}{t.megabytes:10.1f}{t.floor_microseconds:10.1f}{t.times_floor:9.2f}"
        print(f"{t.name:34}{row}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--interpret", action="store_true", help="no device: tiny sizes in Triton's interpreter"
    )
    parser.add_argument(
        "--no-flashinfer", action="store_true", help="skip it; its first use compiles for minutes"
    )
    parser.add_argument("--json", type=Path, help="writes every check and timing")
    args = parser.parse_args()
    if not args.interpret and not torch.cuda.is_available():
        print("no CUDA device; `--interpret` checks the kernels without one", file=sys.stderr)
        return 2
    started = time.monotonic()
    device, sizes = ("cpu", TINY_SIZES) if args.interpret else ("cuda", CHECK_SIZES)
    checks = list(run_checks(sizes, device))
    with_flashinfer = device == "cuda" and not args.no_flashinfer
    if with_flashinfer:
        checks += check_flashinfer(Batch(sizes, torch.bfloat16, device))
    print_checks(checks)
    passed = all(check.passed for check in checks)
    timings, bandwidth = [], 0.0
    if passed and device == "cuda":
        bandwidth = copy_bandwidth()
        timings = list(run_timings(DEVICE_SIZES, bandwidth, with_flashinfer))
        print_timings(timings, bandwidth)
    print(f"\n{len(checks)} checks, {'all passed' if passed else 'FAILED: nothing was timed'}")
    if args.json:
        report = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "triton interpreter",
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "triton": triton.__version__,
            },
            "passed": passed,
            "seconds": round(time.monotonic() - started, 1),
            "checks": [asdict(check) for check in checks],
            "copy_bytes_per_second": bandwidth or None,
            "timings": [asdict(timing) for timing in timings],
        }
        args.json.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
