"""A CUDA device that is not there: tensors that say `cuda:0` over CPU data, and a log of what the device is asked.

A dispatch mode answers every operation: it holds that operands stand on one device, notes where the host waits for
the device, and counts launches. Triton kernels run in the interpreter on what lies below.

What waits on a real device, and is logged with the line that asked: a value read by the host, a copy to the host, a
copy to the device from memory that is not pinned, and operations whose result has a size only the device knows.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime.interpreter import GridExecutor

CUDA = torch.device("cuda:0")
INDEX = ("aten.index.Tensor", "aten.index_put", "aten._index_put_impl_")
SIZED_BY_DATA = (
    "aten.nonzero",
    "aten.unique",
    "aten._unique2",
    "aten.masked_select",
    "aten.repeat_interleave.Tensor",
)
# answered by the host alone
VIEWS = (
    "view", "slice", "select", "alias", "squeeze", "transpose", "permute", "expand", "as_strided", "aten.t.",
    "detach", "split", "unbind", "chunk", "reshape_alias", "diagonal", "unfold", "aten.empty",
)  # fmt: skip


@dataclass
class Log:
    """What the device was asked."""

    syncs: Counter[tuple[str, str]] = field(default_factory=Counter)  # (kind, place)
    uploads: Counter[str] = field(default_factory=Counter)  # file; from pinned memory, nobody waits
    launches: Counter[str] = field(default_factory=Counter)  # operation or kernel

    @property
    def num_launches(self) -> int:
        return self.launches.total()

    @property
    def num_uploads(self) -> int:
        return self.uploads.total()

    def clear(self) -> None:
        for counter in (self.syncs, self.uploads, self.launches):
            counter.clear()


class CudaLike(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> CudaLike:
        made: CudaLike = torch.Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            device=CUDA,
        )
        made.inner = inner
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CudaLike({self.inner!r})"

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} outside of a rehearsal")


def below(x: Any) -> Any:
    """The CPU's tensor of one that says it is on the device."""
    return x.inner if isinstance(x, CudaLike) else x


class _Device(TorchDispatchMode):
    def __init__(self, log: Log) -> None:
        super().__init__()
        self.log = log
        self.pinned: set[int] = set()  # addresses

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with _disable_current_modes():
            return self.answer(func, args, kwargs or {})

    def answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        name = str(func)
        tensors = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, torch.Tensor)]
        device = kwargs.get("device")
        to_device = device is not None and torch.device(device).type == "cuda"
        if name.startswith("aten.is_pinned"):
            return self._is_pinned(args[0])
        if name.startswith("aten._pin_memory"):
            return self._pin(args[0].clone())
        if kwargs.get("pin_memory"):
            return self._pin(func(*args, **{**kwargs, "pin_memory": False}))
        if not to_device and not any(isinstance(x, CudaLike) for x in tensors):
            return func(*args, **kwargs)
        if name == "aten._local_scalar_dense.default":
            self._wait("a value is read")
            return func(*tree_map(below, args))
        if name in ("aten._to_copy.default", "aten.copy_.default"):
            return self._copy(func, name, args, kwargs, to_device, device)
        if name.startswith(SIZED_BY_DATA):
            self._wait(name)
        self._check_devices(name, args, tensors)
        if not any(view in name for view in VIEWS):
            self.log.launches[name] += 1
        found = func(*tree_map(below, args), **tree_map(below, _on_cpu(kwargs)))
        # what was written in place is its own argument
        known = {id(below(x)): x for x in tensors}
        return tree_map(lambda x: known.get(id(x), CudaLike(x)) if isinstance(x, torch.Tensor) else x, found)

    def _copy(
        self, func: Any, name: str, args: Any, kwargs: dict[str, Any], to_device: bool, device: Any
    ) -> Any:
        in_place = name == "aten.copy_.default"
        source = args[1] if in_place else args[0]
        from_cuda = isinstance(source, CudaLike)
        to_cuda = isinstance(args[0], CudaLike) if in_place else to_device or (device is None and from_cuda)
        at_once = kwargs.get("non_blocking") or (in_place and len(args) > 2 and args[2])
        if from_cuda and not to_cuda:
            self._wait("copied to the host")
        elif to_cuda and not from_cuda:
            if at_once and self._is_pinned(source):
                self.log.uploads[_place(skip="blocks/upload.py").split(":")[0]] += 1
            else:
                self._wait("copied from memory that is not pinned" if at_once else "copied to the device")
        self.log.launches["copy"] += 1
        found = func(*tree_map(below, args), **_on_cpu(kwargs))
        if in_place:
            return args[0]
        return CudaLike(found) if to_cuda else found

    def _check_devices(self, name: str, args: Any, tensors: list[torch.Tensor]) -> None:
        if name.startswith(INDEX):
            for index in args[1]:
                if index is None:
                    continue
                if index.dtype in (torch.bool, torch.uint8):
                    self._wait("indexed by a mask")
                if isinstance(args[0], CudaLike) and not isinstance(index, CudaLike):
                    self._wait("indexed by the host's numbers")
                if not isinstance(args[0], CudaLike) and isinstance(index, CudaLike):
                    raise RuntimeError(f"{name}: a tensor of the host is indexed by the device's, {_place()}")
            return
        strays = [x for x in tensors if not isinstance(x, CudaLike) and x.dim() > 0]
        if strays:
            raise RuntimeError(f"{name}: operands stand on two devices, {_place()}")

    def _wait(self, kind: str) -> None:
        self.log.syncs[kind, _place()] += 1

    def _pin(self, tensor: torch.Tensor) -> torch.Tensor:
        self.pinned.add(tensor.untyped_storage().data_ptr())
        return tensor

    def _is_pinned(self, tensor: torch.Tensor) -> bool:
        return not isinstance(tensor, CudaLike) and tensor.untyped_storage().data_ptr() in self.pinned


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "cuda":
        return kwargs
    return {**kwargs, "device": torch.device("cpu")}


def _place(skip: str = "tests/") -> str:
    """The innermost lines of the package or of the host, outermost last, without those of a file."""
    found = []
    for frame in reversed(traceback.extract_stack()):
        for root in ("sglang_blockreuse/", "sglang/srt/"):
            if root in frame.filename and skip not in frame.filename:
                found.append(f"{frame.filename.rsplit(root, 1)[1]}:{frame.lineno}")
                break
        if len(found) == 2:
            break
    return " < ".join(found) or "the test"


@contextmanager
def rehearsed_device(patch: pytest.MonkeyPatch) -> Iterator[Log]:
    """Operations on `cuda` are answered, and logged, until the block ends."""
    log = Log()
    run = GridExecutor.__call__

    def launch(executor: Any, *args: Any, **kwargs: Any) -> Any:
        log.launches[executor.fn.__name__] += 1
        with _disable_current_modes():
            return run(executor, *map(below, args), **{name: below(x) for name, x in kwargs.items()})

    with patch.context() as patched:
        patched.setattr(GridExecutor, "__call__", launch)
        # a fake mode below keeps torch from looking for a driver; the mode above answers everything
        with FakeTensorMode(allow_non_fake_inputs=True), _Device(log):
            yield log
