"""Compiled kernels on disk: another process finds what was compiled, and nothing that is not exactly what it wants."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from sglang_blockreuse.kernels import cpu_cache
from sglang_blockreuse.kernels.cpu_cache import DiskCache, identity

# A kernel with compiled functions in its closure, two parallel ones; what was compiled and what came out.
SCRIPT = """
import json, sys
import numpy as np
import torch
from numba.core import event
from sglang_blockreuse.kernels import cpu_rotate_copy, cpu_select, cpu_sparse
from sglang_blockreuse.kernels.cpu_numba import as_array
from sglang_blockreuse.kernels.cpu_select import Geometry, Rows, Table

geometry = Geometry(getattr(torch, sys.argv[1]), 2, 2, 8)
rng = np.random.default_rng(0)
k, v = (torch.tensor(rng.standard_normal((16, 2, 8), np.float32)).to(geometry.dtype) for _ in "kv")
rows = Rows(np.zeros(1, np.int32), np.array([9], np.int32), np.arange(9, dtype=np.int32)[None],
            np.zeros(0, np.uint8), np.zeros(4, np.float32))
table = Table.empty(1, 1, 5)
with event.install_recorder("numba:compile") as recorder:
    out = np.zeros((1, 4, 8), np.float32)
    if "parallel" in sys.argv:
        work = rng.random((1, 4, 9), np.float32)
        cpu_select.keep(rows, Table.empty(1, 1, 9), np.zeros(1, np.uint8), work, 1, 2, table)
        q = rng.standard_normal((1, 4, 8), np.float32)
        cpu_sparse.attend(geometry, q, as_array(k), as_array(v), rows, table, out)
    slots = torch.tensor([1, 2]), torch.tensor([9, 11])
    angle = torch.tensor(rng.random((2, 4), np.float32))
    cpu_rotate_copy.rotate_copy([k], [v], *slots, angle.cos(), angle.sin(), is_neox=True)
compiled = sorted({found.data["dispatcher"].py_func.__name__ for _, found in recorder.buffer})
print(json.dumps([compiled, out.tolist(), k.float().tolist(), table.positions.tolist()]))
"""
KERNELS = {"attend", "keep", "rotate_copy_layer"}


def run(cache, *words, dtype="float32", **env):
    """(names of the functions that were compiled, results) of a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, dtype, *words],
        env={**os.environ, "XDG_CACHE_HOME": str(cache), **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, *results = json.loads(done.stdout)
    return set(compiled), results


def files(cache):
    return sorted((cache / "sglang-blockreuse" / "kernels").iterdir())


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """A cache that one process has filled, and what it computed."""
    cache = tmp_path_factory.mktemp("cache")
    compiled, results = run(cache, "parallel")
    assert compiled >= KERNELS
    return cache, results


def test_a_second_process_compiles_nothing_and_computes_the_same_bits(filled):
    cache, results = filled
    before = files(cache)
    assert run(cache, "parallel") == (set(), results)
    assert files(cache) == before


def test_kernels_of_another_type_are_others(filled):
    cache, _ = filled
    compiled, _ = run(cache, "parallel", dtype="bfloat16")
    assert compiled >= {"attend", "rotate_copy_layer"}
    assert "keep" not in compiled, "which knows no type of the pool"


def test_another_processor_finds_nothing(filled):
    """A folder that travels, or that machines share."""
    cache, _ = filled
    compiled, _ = run(cache, NUMBA_CPU_NAME="generic", NUMBA_CPU_FEATURES="")
    assert "rotate_copy_layer" in compiled


def cut(content):
    return content[:-1]


def changed(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize("damage", [cut, changed])
def test_a_damaged_file_is_compiled_anew(filled, tmp_path, damage):
    cache, _ = filled
    _, results = run(cache)
    whole = files(cache)
    folder = tmp_path / "sglang-blockreuse" / "kernels"
    folder.mkdir(parents=True)
    for file in whole:
        (folder / file.name).write_bytes(damage(file.read_bytes()))
    compiled, again = run(tmp_path)
    assert "rotate_copy_layer" in compiled
    assert again == results
    assert run(tmp_path) == (set(), results), "and mended"


def test_a_folder_that_cannot_be_made_is_no_cache_and_no_error(tmp_path):
    (tmp_path / "file").touch()
    compiled, _ = run(tmp_path / "file")
    assert "rotate_copy_layer" in compiled


def adder(n):
    def add(x):
        return x + n

    return add


class TestKey:
    """Everything that machine code depends on and that one process can show."""

    @pytest.fixture
    def codegen(self):
        from numba.core.registry import cpu_target

        return cpu_target.target_context.codegen()

    def test_closures_are_told_apart_by_what_they_close_over(self):
        import numba

        assert identity(adder(1)) == identity(adder(1)) != identity(adder(2))
        assert identity(adder(np.float32(1))) != identity(adder(1))
        inner, same, other = (numba.njit(adder(n)) for n in (1, 1, 2))
        assert identity(adder(inner)) == identity(adder(same)) != identity(adder(other))
        assert identity(adder(inner)) != identity(adder(numba.njit(fastmath=True)(adder(1))))

    def test_what_is_not_known_by_its_value_is_refused(self):
        with pytest.raises(TypeError, match="closes over array"):
            identity(adder(np.zeros(2)))

    def test_another_source_another_version_and_other_types_are_other_files(self, codegen, monkeypatch):
        cache = DiskCache(adder(1))
        path = cache.path("(int64,)", codegen)
        assert DiskCache(adder(1)).path("(int64,)", codegen) == path
        assert cache.path("(float32,)", codegen) != path
        assert DiskCache(adder(2)).path("(int64,)", codegen) != path
        with monkeypatch.context() as patch:
            patch.setattr(cpu_cache, "_versions", lambda: ("another numba",))
            assert cache.path("(int64,)", codegen) != path
        monkeypatch.setattr(cpu_cache, "_digest_of_sources", lambda file: "another source")
        assert DiskCache(adder(1)).path("(int64,)", codegen) != path
