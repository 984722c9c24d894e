"""Compiled CPU kernels are kept on disk: what one process compiled, the next one loads.

numba's own cache knows a function by pickles of what it closes over. Those of compiled functions differ from process to
process, and the kernels close over such, so it would never find them. Here a kernel is known by the sources of the
kernels, the names and values that it closes over, the types of its arguments, the processor with its features, and
the versions. Each has a file of its own, written whole: processes that compile the same do not disturb each other.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import os
import pickle
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

# what a kernel may close over besides functions; each says its value by repr
_PLAIN = (bool, int, float, str, type(None), np.generic, torch.dtype)
_DIGEST_LEN = 32  # bytes of a SHA-256
_UNUSABLE = OSError, RuntimeError  # the folder; pathlib says the second where a user has no home


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """`numba.njit` with a cache on disk."""
    import numba

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        dispatcher._cache = DiskCache(function)  # where `enable_caching` puts numba's own
        return dispatcher

    return decorate


def folder() -> Path:
    """`$XDG_CACHE_HOME/sglang-blockreuse/kernels`, below `~/.cache` where the variable is unset."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "sglang-blockreuse" / "kernels"


class DiskCache:
    """The cache of one function, as numba's dispatcher asks for it. A folder that cannot be used is no cache."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._name = f"{function.__module__.rpartition('.')[2]}.{function.__name__}"
        self._identity = identity(function)
        self._source = _digest_of_sources(Path(inspect.getfile(function)))

    @property
    def cache_path(self) -> str:
        return str(folder())

    def load_overload(self, signature: Any, context: Any) -> Any:
        """The compiled function, or None where no process has compiled it."""
        from numba.core.compiler import CompileResult

        context.refresh()
        try:
            content = self.path(signature, context.codegen()).read_bytes()
        except _UNUSABLE:
            return None
        digest, payload = content[:_DIGEST_LEN], content[_DIGEST_LEN:]
        if hashlib.sha256(payload).digest() != digest:
            return None
        return CompileResult._rebuild(context, *pickle.loads(payload))

    def save_overload(self, signature: Any, result: Any) -> None:
        from numba.core.serialize import dumps

        if result.lifted or result.library.has_dynamic_globals:
            return  # its code holds addresses of this process
        payload = dumps(result._reduce())
        with contextlib.suppress(*_UNUSABLE):
            path = self.path(signature, result.codegen)
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
                file.write(hashlib.sha256(payload).digest() + payload)
            os.replace(file.name, path)

    def flush(self) -> None:
        """numba forgets what it compiled of this function; files of equal keys hold the same and may stay."""

    def path(self, signature: Any, codegen: Any) -> Path:
        """Everything that the machine code depends on is in the name."""
        key = (self._source, self._identity, str(signature), codegen.magic_tuple(), *_versions())
        return folder() / f"{self._name}-{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}"


def identity(value: Any) -> Any:
    """Names and values that tell a function from others of the same source, and closures of it from each other.

    Raises:
        TypeError: it closes over something that is not known by its value.
    """
    function = getattr(value, "py_func", None) or getattr(value, "_defn", None) or value
    if inspect.isfunction(function):
        options = repr(sorted(getattr(value, "targetoptions", {}).items(), key=str))
        cells = tuple(identity(cell.cell_contents) for cell in function.__closure__ or ())
        return function.__module__.rpartition(".")[2], function.__qualname__, options, cells
    if inspect.ismodule(value):
        return value.__name__
    if isinstance(value, tuple):
        return tuple(identity(item) for item in value)
    if isinstance(value, _PLAIN):
        return repr(value)
    raise TypeError(f"a cached kernel closes over {value!r}, which is not known by its value")


@functools.cache
def _digest_of_sources(file: Path) -> str:
    """Of the file that defines a function and of all CPU kernels, any of which it may call."""
    digest = hashlib.sha256()
    for path in (file, *sorted(Path(__file__).parent.glob("cpu_*.py"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()


@functools.cache
def _versions() -> tuple[str, ...]:
    import llvmlite
    import numba

    return sys.version, numba.__version__, llvmlite.__version__, np.__version__
