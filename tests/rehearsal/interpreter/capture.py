"""Capture and replay of a forward without a graph: what is recorded runs again on the recorded tensors.

As a graph does it: inputs are read where they were, outputs are written where they were, numbers that Python passed
stay what they were, and Python between the launches does not run again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only
from triton.runtime.interpreter import GridExecutor

WAITS = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::masked_select",
    "aten::equal",
    "aten::is_nonzero",
)


class Recording(TorchDispatchMode):
    """Records while it is entered. `replay` runs it again; `lines` tell one recording from another."""

    def __init__(self) -> None:
        super().__init__()
        self._steps: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._launching = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if not self._launching:
            name = func._schema.name
            assert name not in WAITS, f"{name} waits for the device"
            self._steps.append((func, args, kwargs, out))
        return out

    def launch(self, executor: GridExecutor, original: Any, args: Any, kwargs: Any) -> None:
        self._launching = True
        original(executor, *args, **kwargs)
        self._launching = False
        self._steps.append((executor, args, kwargs, original))

    def replay(self) -> None:
        for step, args, kwargs, out in self._steps:
            if isinstance(step, GridExecutor):
                out(step, *args, **kwargs)
                continue
            if _is_free(step):
                continue  # a view is where it was, and what was allocated is filled by others
            again = step(*args, **kwargs)
            for held, new in zip(tree_flatten(out)[0], tree_flatten(again)[0], strict=True):
                if isinstance(held, Tensor) and held is not new:
                    held.copy_(new)

    @property
    def lines(self) -> list[str]:
        """Everything that a graph would keep: operations, launches, grids, shapes and numbers."""
        return [_line(step, args, kwargs) for step, args, kwargs, _ in self._steps]

    @property
    def launched(self) -> list[str]:
        """Lines of what launches a kernel on a device: no views, no allocations."""
        kept = [step for step in self._steps if isinstance(step[0], GridExecutor) or not _is_free(step[0])]
        return [_line(step, args, kwargs) for step, args, kwargs, _ in kept]


def _is_free(func: Any) -> bool:
    """Views and allocations."""
    returns = func._schema.returns
    is_view = any(found.alias_info is not None and not found.alias_info.is_write for found in returns)
    return is_view or func._schema.name in (
        "aten::empty",
        "aten::empty_like",
        "aten::new_empty",
        "aten::empty_strided",
    )


def _line(step: Any, args: Any, kwargs: Any) -> str:
    shown = tree_map_only(Tensor, lambda x: (tuple(x.shape), x.stride(), x.dtype), (args, kwargs))
    if isinstance(step, GridExecutor):
        return f"{step.fn.__name__} {step.grid} {shown}"
    return f"{step._schema.name} {shown}"


@contextmanager
def recording() -> Iterator[Recording]:
    made, original = Recording(), GridExecutor.__call__

    def launched(executor: GridExecutor, *args: Any, **kwargs: Any) -> None:
        made.launch(executor, original, args, kwargs)

    GridExecutor.__call__ = launched
    try:
        with torch.no_grad(), made:
            yield made
    finally:
        GridExecutor.__call__ = original
