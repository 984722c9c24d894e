"""Compiles every kernel configuration for sm_80, sm_90 and sm_100 without a GPU and tables what it takes.

    python bench/kernel_aot.py             # compiles and writes kernels/aot_table.json
    python bench/kernel_aot.py --check N   # recompiles every N-th launch and compares, writes nothing

A configuration is an ordinary call of a public kernel function on CPU tensors. The launches that it makes are
caught, compiled for the target instead of run, and read back with cuobjdump: registers, shared memory, stack
(spills live there) and local memory. The table also keeps the constants of every launch and a digest of every
kernel's code, so that a test notices a table that no longer describes the kernels without compiling anything.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import multiprocessing
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from sglang_blockreuse.kernels import (
    decode_attention,
    extend_attention,
    index_codes,
    int4_keys,
    ops_triton,
    rotate_copy,
)
from sglang_blockreuse.kernels.cpu_rows import KeyBias
from sglang_blockreuse.kernels.ops import Chosen, Expected, IndexCodes, Lent, Queries, Rows, Table
from sglang_blockreuse.kernels.reference_index import IndexMap
from sglang_blockreuse.kernels.reference_select import Int4Keys

KERNELS = Path(__file__).parents[1] / "kernels"
TABLE = KERNELS / "aot_table.json"
TARGETS = (80, 90, 100)


@dataclass(frozen=True)
class Config:
    name: str
    call: Callable[[], object]  # makes the launches to compile
    min_target: int = 80  # fp8 e4m3 is no type of sm_80: those operands go to the reference there


@dataclass(frozen=True)
class Geometry:
    num_heads: int
    group: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"h{self.num_heads}g{self.group}d{self.head_dim}"

    def queries(self, num_tokens: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_tokens, self.num_heads * self.group, self.head_dim, dtype=dtype)

    def pool(self, dtype: torch.dtype, page_size: int = 1) -> Tensor:
        return torch.empty(64 * page_size, self.num_heads, self.head_dim, dtype=dtype)


SMALL, QWEN_SMALL = Geometry(3, 3, 64), Geometry(2, 7, 64)  # SmolLM2-135M, Qwen2.5-0.5B
LLAMA, WIDE_GROUP = Geometry(8, 4, 128), Geometry(8, 8, 128)  # Llama-3.1-8B and Qwen3-8B, Llama-3.1-70B
WIDE_HEAD = Geometry(4, 2, 256)  # Gemma-2-2B
ALL_GEOMETRIES = (SMALL, QWEN_SMALL, LLAMA, WIDE_GROUP, WIDE_HEAD, Geometry(32, 1, 80), Geometry(32, 1, 96))
ROWS = torch.arange(5, dtype=torch.int32) * 16
INDICES = torch.arange(64, dtype=torch.int32)
LENS = torch.full((4,), 16, dtype=torch.int32)
SHORT = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float8_e4m3fn: "fp8"}


def attention_configs() -> Iterator[Config]:
    bf16, fp8 = torch.bfloat16, torch.float8_e4m3fn
    variants = [(geometry, bf16, bf16, 1, True) for geometry in ALL_GEOMETRIES]
    variants += [(LLAMA, bf16, bf16, 1, False), (LLAMA, bf16, bf16, 16, True), (LLAMA, bf16, fp8, 1, True)]
    variants += [
        (g, dtype, dtype, 1, True) for g in (SMALL, LLAMA) for dtype in (torch.float16, torch.float32)
    ]
    for geometry, q_dtype, kv_dtype, page_size, tagged in variants:
        kind = SHORT[q_dtype] if q_dtype == kv_dtype else f"{SHORT[q_dtype]}/{SHORT[kv_dtype]}"
        tail = f"{geometry.name} {kind} page{page_size} {'tags' if tagged else 'plain'}"
        pool = geometry.pool(kv_dtype, page_size)
        options: dict[str, Any] = {"scale": 1.0, "page_size": page_size}
        if tagged:
            options |= {"tags_S": torch.zeros(pool.shape[0], dtype=torch.uint8), "alpha": 0.5, "beta": -0.5}
        if page_size > 1 or tagged:  # rows are read where the host's page table names them, by their lengths
            options["kv_lens_R"] = LENS
        min_target = 90 if kv_dtype == fp8 else 80
        for num_splits in (1, 8):
            yield Config(
                f"decode {tail} splits{num_splits}",
                lambda g=geometry, d=q_dtype, p=pool, o=options, n=num_splits: (
                    decode_attention.decode_attention(g.queries(4, d), p, p, INDICES, ROWS, num_splits=n, **o)
                ),
                min_target,
            )
        yield Config(
            f"extend {tail}",
            lambda g=geometry, d=q_dtype, p=pool, o=options: extend_attention.extend_attention(
                g.queries(64, d), p, p, INDICES, ROWS, ROWS, max_q_len=16, **o
            ),
            min_target,
        )


def plan_configs() -> Iterator[Config]:
    """What a decode step under a layer plan launches, by verb."""
    for geometry, num_lists in ((SMALL, 1), (LLAMA, 1), (LLAMA, LLAMA.num_heads), (WIDE_HEAD, 1)):
        for verb, call in _verbs(geometry, num_lists).items():
            yield Config(f"plan {geometry.name} lists{num_lists} {verb}", call)


def _verbs(geometry: Geometry, num_lists: int) -> dict[str, Callable[[], object]]:
    ops, pool = ops_triton.TritonOps(num_lists, 32768, "cpu"), geometry.pool(torch.bfloat16)
    requests = torch.arange(4, dtype=torch.int32)
    bias = KeyBias(torch.zeros(64, dtype=torch.uint8), 0.5, -0.5)
    rows = Rows(requests, LENS, torch.zeros((8, 32768), dtype=torch.int32), bias, LENS)
    table, candidates = Table.empty(8, num_lists, 256), Table.empty(8, num_lists, 2048)
    flags = torch.zeros(4, dtype=torch.uint8)
    expected = Expected(requests, LENS, torch.zeros((4, 3), dtype=torch.int64))
    lent, stale = Lent(table, torch.zeros((8, 6), dtype=torch.int64)), torch.zeros(7, dtype=torch.int64)
    q, work = ops.queries(geometry.queries(4, torch.bfloat16), 1.0), ops.scratch(4, 1, 32768)
    int4 = Int4Keys.empty(64, geometry.num_heads, geometry.head_dim, "cpu")
    heads, dim, channels = geometry.num_heads, geometry.head_dim, 16
    index = IndexMap(
        torch.zeros(heads, channels, heads * dim), torch.zeros(1), *torch.ones(2, heads, channels).unbind()
    )
    codes = IndexCodes(torch.zeros((64, heads, channels // 2), dtype=torch.uint8))
    codes_q = Queries(torch.zeros(4, heads * geometry.group, channels), 1.0)
    step, current = torch.zeros(1, dtype=torch.int64), torch.zeros(64, dtype=torch.uint8)
    every = {"period": 512, "is_last": True, "max_len": 32768}
    return {
        "score": lambda: ops.score(q, pool, rows, candidates, flags, work, None),
        "score int4": lambda: ops.score(q, int4, rows, candidates, flags, work, None),
        "keep": lambda: ops.keep(rows, candidates, flags, work, 4, 64, table),
        "keep of a pool": lambda: ops.keep(rows, candidates, flags, work[..., :2048], 4, 64, table),
        "attend": lambda: ops.attend(
            q, pool, pool, rows, Chosen(table, table, flags), torch.empty_like(q.values)
        ),
        "seal": lambda: ops.seal(expected, lent, (0, 0)),
        "check": lambda: ops.check(expected, lent, (0, 0), stale),
        "score codes": lambda: ops.score(codes_q, codes, rows, candidates, flags, work, None),
        "refresh codes": lambda: index_codes.refresh_codes(
            index, codes.codes, rows, pool, current, step, step, **every
        ),
        "refresh int4": lambda: int4_keys.refresh_int4(int4, rows, pool, current, step, step, **every),
    }


def other_configs() -> Iterator[Config]:
    for rotary_dim in (64, 80, 128, 256):
        yield Config(f"angles rotary{rotary_dim}", lambda r=rotary_dim: _angles(r))
    bf16 = torch.bfloat16
    cases = [(geometry, bf16, 1, True, geometry.head_dim) for geometry in ALL_GEOMETRIES]
    cases += [(LLAMA, dtype, 1, True, 128) for dtype in (torch.float16, torch.float32, torch.float8_e4m3fn)]
    cases += [
        (LLAMA, bf16, 16, True, 128),
        (LLAMA, bf16, 1, False, 128),
        (Geometry(32, 1, 80), bf16, 1, True, 32),
    ]
    for geometry, dtype, page_size, is_neox, rotary_dim in cases:
        layout = "neox" if is_neox else "gptj"
        yield Config(
            f"rotate-copy {geometry.name} {SHORT[dtype]} page{page_size} {layout} rotary{rotary_dim}",
            lambda g=geometry, d=dtype, p=page_size, n=is_neox, r=rotary_dim: _rotate(g, d, p, n, r),
            90 if dtype == torch.float8_e4m3fn else 80,
        )


def _angles(rotary_dim: int) -> None:
    table, positions = torch.zeros((4096, rotary_dim)), torch.arange(17)
    rotate_copy.cached_cos_sin(table, positions, positions)


def _rotate(geometry: Geometry, dtype: torch.dtype, page_size: int, is_neox: bool, rotary_dim: int) -> None:
    pool = geometry.pool(dtype, page_size)
    if page_size > 1:
        pool = pool.unflatten(0, (-1, page_size))
    angles = torch.zeros((16, rotary_dim // 2))
    slots = torch.arange(16)
    rotate_copy.rotate_copy([pool, pool], [pool, pool], slots, slots + 16, angles, angles, is_neox=is_neox)


def configs() -> list[Config]:
    return [*attention_configs(), *plan_configs(), *other_configs()]


class _TargetOnly:
    """A driver that has a target and no device."""

    def __init__(self, target: int) -> None:
        self._target = GPUTarget("cuda", target, 32)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


@contextmanager
def caught_launches(target: int | None) -> Iterator[list[tuple[str, dict[str, Any], Any]]]:
    """Collects (kernel name, constants, compiled kernel) instead of launching; compiles only with a target.

    The target stays the process's driver.
    """
    launches: list[tuple[str, dict[str, Any], Any]] = []
    run = JITFunction.run

    def caught(kernel: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        compiled = run(kernel, *args, grid=grid, warmup=True, **constants) if target is not None else None
        launches.append(
            (kernel.fn.__name__, {name: _plain(value) for name, value in constants.items()}, compiled)
        )

    JITFunction.run = caught
    if target is not None:
        triton.runtime.driver.set_active(_TargetOnly(target))
    try:
        yield launches
    finally:
        JITFunction.run = run


def _plain(value: Any) -> Any:
    return value if isinstance(value, bool | int | str) else str(value)


def resources(compiled: Any) -> dict[str, int]:
    """Registers per thread, bytes of shared memory per block, bytes of stack and local memory per thread."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        report = subprocess.run(
            [tool, "-res-usage", cubin.name], capture_output=True, text=True, check=True
        ).stdout
    usage = dict(
        item.split(":") for item in report.split("Function", 1)[1].split() if ":" in item and item[-1] != ":"
    )
    return {
        "registers": int(usage["REG"]),
        # what the launch asks for; cuobjdump only sees what is static
        "shared_bytes": int(compiled.metadata.shared),
        "stack_bytes": int(usage["STACK"]),
        "local_bytes": int(usage["LOCAL"]),
    }


def compile_all(target: int, step: int = 1) -> dict[str, dict[str, int]]:
    """Resources of every launch by its key `config · kernel · index`."""
    table = {}
    for config in configs()[::step]:
        if target < config.min_target:
            continue
        with caught_launches(target) as launches:
            config.call()
        for i, (kernel, _, compiled) in enumerate(launches):
            table[f"{config.name} · {kernel} · {i}"] = resources(compiled)
        print(f"sm_{target}: {config.name}", file=sys.stderr, flush=True)
    return table


def launch_constants() -> dict[str, dict[str, Any]]:
    """Constants of every launch by its key; compiles nothing."""
    constants = {}
    for config in configs():
        with caught_launches(None) as launches:
            config.call()
        for i, (kernel, values, _) in enumerate(launches):
            constants[f"{config.name} · {kernel} · {i}"] = values
    return constants


def code_digests() -> dict[str, str]:
    """Digest of the jitted functions of each kernel file: comments, docstrings and host code do not count."""
    digests = {}
    for path in sorted(KERNELS.glob("*.py")):
        functions = [node for node in ast.parse(path.read_text()).body if _is_jitted(node)]
        for function in functions:
            if ast.get_docstring(function) is not None:
                function.body = function.body[1:]
        if functions:
            text = "\n".join(ast.dump(function) for function in functions)
            digests[path.name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return digests


def _is_jitted(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any(
        ast.unparse(d).startswith("triton.jit") for d in node.decorator_list
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--check", type=int, metavar="N", help="recompile every N-th configuration and compare"
    )
    parser.add_argument("--jobs", type=int, default=2, help="targets compiled at the same time")
    parser.add_argument(
        "--targets", type=int, nargs="+", default=TARGETS, choices=TARGETS, help="with --check"
    )
    args = parser.parse_args()
    step = args.check or 1
    targets = args.targets if args.check else TARGETS
    digests, constants = code_digests(), launch_constants()  # before the compilers read the files
    # a kernel remembers the first target of its process, so every target gets a process of its own
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(args.jobs, mp_context=spawn, max_tasks_per_child=1) as pool:
        compiled = dict(zip(targets, pool.map(compile_all, targets, [step] * len(targets)), strict=True))
    if args.check:
        kept = json.loads(TABLE.read_text())["launches"]
        wrong = [
            f"sm_{target} {key}: table {kept.get(key, {}).get(f'sm_{target}')}, compiled {found}"
            for target, table in compiled.items()
            for key, found in table.items()
            if kept.get(key, {}).get(f"sm_{target}") != found
        ]
        print("\n".join(wrong) or "the table holds")
        return bool(wrong)
    launches = {
        key: {"constants": values, **{f"sm_{t}": table[key] for t, table in compiled.items() if key in table}}
        for key, values in constants.items()
    }
    content = {"triton": triton.__version__, "code": digests, "launches": launches}
    TABLE.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    print(f"wrote {len(launches)} launches to {TABLE.name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
