"""SGLang's KV pool where layers of a plan read another layer's main KV (`kv_from`): one buffer, several names.

The door is `SRTPlatform.get_kv_pool_cls`: the host builds the class that it is given with its own arguments. What is
allocated is the host's own layout for fewer layers; every layer keeps its place in `k_buffer` and `v_buffer`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from .share_state import NotTheWriterError


class SharedKvPool(MHATokenToKVPool):
    """`k_buffer[l]` is `k_buffer[kv_layers[l]]`, the same tensor; only layers with KV of their own write."""

    layer_num: int
    k_buffer: list[Tensor]
    v_buffer: list[Tensor]
    kv_layers: ClassVar[tuple[int, ...]]  # the layer whose KV each layer reads; layer ids from 0

    @property
    def owners(self) -> tuple[int, ...]:
        return tuple(layer for layer, source in enumerate(self.kv_layers) if layer == source)

    def _create_buffers(self) -> None:
        num_layers, owners = self.layer_num, self.owners
        if num_layers != len(self.kv_layers) or self.start_layer != 0:
            raise ValueError(
                f"the layer plan names {len(self.kv_layers)} layers and this pool holds layers {self.start_layer} to "
                f"{self.start_layer + num_layers - 1}. Serve the model without pipeline stages."
            )
        self.layer_num = len(owners)
        super()._create_buffers()
        self.layer_num = num_layers
        at = [owners.index(source) for source in self.kv_layers]
        self.k_buffer = [self.k_buffer[i] for i in at]
        self.v_buffer = [self.v_buffer[i] for i in at]
        self._kv_buffer_descs = self._build_kv_buffer_descs()
        self._init_data_ptrs_and_strides()

    def _slot_move_pointer_buffers(self) -> list[Tensor]:
        """Each buffer once: a move of slots must not be made twice."""
        return [*_once(self.k_buffer), *_once(self.v_buffer)]

    def get_kv_size_bytes(self) -> tuple[int, int]:
        """Bytes of K and of V, each buffer counted once."""
        k, v = (sum(x.nbytes for x in _once(buffers)) for buffers in (self.k_buffer, self.v_buffer))
        return k, v

    def set_kv_buffer(self, layer: Any, *args: Any, **kwargs: Any) -> None:
        """As the host's. Raises NotTheWriterError for a layer that keeps no KV of its own."""
        if self.kv_layers[layer.layer_id] != layer.layer_id:
            raise NotTheWriterError(
                f"layer {layer.layer_id} reads the KV of layer {self.kv_layers[layer.layer_id]} and has none of its "
                f"own to write; writers are {list(self.owners)}."
            )
        super().set_kv_buffer(layer, *args, **kwargs)

    def get_cpu_copy(self, *args: Any, **kwargs: Any) -> Any:
        with self._each_buffer_once():
            return super().get_cpu_copy(*args, **kwargs)

    def load_cpu_copy(self, *args: Any, **kwargs: Any) -> None:
        with self._each_buffer_once():
            super().load_cpu_copy(*args, **kwargs)

    def move_kv_cache(self, *args: Any, **kwargs: Any) -> None:
        # a second move would read slots that the first one has filled
        with self._each_buffer_once():
            super().move_kv_cache(*args, **kwargs)

    @contextmanager
    def _each_buffer_once(self) -> Iterator[None]:
        """For the host's loops over layers: only those that keep KV of their own."""
        whole = self.layer_num, self.k_buffer, self.v_buffer
        self.layer_num, self.k_buffer, self.v_buffer = (len(self.owners), *map(_once, whole[1:]))
        try:
            yield
        finally:
            self.layer_num, self.k_buffer, self.v_buffer = whole


def _once(buffers: Sequence[Tensor]) -> list[Tensor]:
    """Each buffer once, in the order of the layers that own them."""
    return list({buffer.data_ptr(): buffer for buffer in buffers}.values())


@functools.cache
def pool_class(kv_layers: tuple[int, ...]) -> type[SharedKvPool]:
    """The pool of a plan, by the layer whose KV each layer reads."""
    return type("PlanKvPool", (SharedKvPool,), {"kv_layers": kv_layers})


def sizing(kv_layers: Sequence[int]) -> Callable[..., Any]:
    """A hook around the host's sizing, which counts KV of every layer: its tokens take fewer bytes here."""

    def sized(original: Callable[..., Any], configurator: Any, available_bytes: int, page_size: int) -> Any:
        return original(configurator, available_bytes * len(kv_layers) // len(set(kv_layers)), page_size)

    return sized
