"""The model's rotary embeddings: found, classified, and tested against our rotation at start-up."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..kernels.reference import cached_cos_sin, rotate_keys

# Classes whose table is m * (cos, sin)(position * frequency), so that a rotation by a
# difference of positions follows from two of its rows.
SUPPORTED = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)
# Float32 arithmetic of two rotations on keys of magnitude ~5.
SELF_TEST_TOLERANCE = 2e-5


class UnsupportedRope(ValueError):
    """The model's position encoding cannot be moved by a rotation, or was not shown to be."""


@dataclass(frozen=True, slots=True)
class RopeGroup:
    """Layers that share one rotary embedding."""

    name: str  # class of the host's rotary embedding, "none" for layers without one
    layers: tuple[int, ...]  # layer ids
    table: (
        Tensor | None
    )  # float32 [max_position, rotary_dim]: cos | sin; None: keys do not depend on position
    is_neox: bool

    def cos_sin(self, old_T: Tensor, new_T: Tensor) -> tuple[Tensor, Tensor]:
        """float32 [T, rotary_dim / 2] tables that move keys from positions old to new."""
        if self.table is None:
            return torch.ones(1, 0, device=old_T.device), torch.zeros(1, 0, device=old_T.device)
        return cached_cos_sin(self.table, old_T, new_T)


def find_ropes(model: torch.nn.Module, num_layers: int) -> list[RopeGroup]:
    """Group the model's layers by rotary embedding and test each group.

    Every attention layer must be accounted for. Raises UnsupportedRope with the class
    name of what cannot be served.
    """
    by_rope: dict[int, tuple[Any, list[int]]] = {}
    seen: set[int] = set()
    for module in model.modules():
        attention = getattr(module, "attn", None)
        layer_id = getattr(attention, "layer_id", None)
        if layer_id is None or layer_id in seen:
            continue
        seen.add(layer_id)
        rope = getattr(module, "rotary_emb", None)
        by_rope.setdefault(id(rope), (rope, []))[1].append(layer_id)
    missing = sorted(set(range(num_layers)) - seen)
    if missing:
        raise UnsupportedRope(
            f"layers {missing} of {type(model).__name__} have no attention module with a layer_id, so how they "
            "encode positions is unknown; document blocks cannot be moved for this model"
        )
    return [_group(rope, tuple(sorted(layers))) for rope, layers in by_rope.values()]


def _group(rope: Any, layers: tuple[int, ...]) -> RopeGroup:
    if rope is None:
        return RopeGroup("none", layers, None, True)
    name = type(rope).__name__
    if name not in SUPPORTED:
        raise UnsupportedRope(
            f"rotary embedding {name} (layers {layers[0]}..{layers[-1]}) is not supported; "
            f"supported: {', '.join(sorted(SUPPORTED))}"
        )
    # the live buffer may have been cast to the model's dtype
    table = rope._compute_cos_sin_cache().to(device=rope.cos_sin_cache.device, dtype=torch.float32)
    group = RopeGroup(name, layers, table, bool(rope.is_neox_style))
    _self_test(rope, group)
    return group


def _self_test(rope: Any, group: RopeGroup) -> None:
    """Encode random keys at two positions with the model's own code and move one onto the other."""
    assert group.table is not None
    device, limit, num = group.table.device, group.table.shape[0], 16
    # a twin in float32: the module itself casts its table to the type of what it last saw
    twin = copy.deepcopy(rope)
    twin.cos_sin_cache = group.table
    generator = torch.Generator().manual_seed(0)
    old_T, new_T = (torch.randint(0, limit, (num,), generator=generator).to(device) for _ in range(2))
    k_TD = torch.randn(num, rope.head_size, generator=generator).to(device)

    def at(positions_T: Tensor) -> Tensor:
        encoded: Tensor = twin.forward_native(positions_T, k_TD.clone(), k_TD.clone())[1]
        return encoded[:, None]

    moved = rotate_keys(at(old_T), *group.cos_sin(old_T, new_T), is_neox=group.is_neox)
    error = (moved - at(new_T)).abs().max().item()
    if not error <= SELF_TEST_TOLERANCE:
        raise UnsupportedRope(
            f"{group.name}: moving a key by rotation differs from the model's own rotary embedding by "
            f"{error:.1e} (allowed {SELF_TEST_TOLERANCE:.0e}); report this model's rope_scaling"
        )
