"""The model's rotary embeddings: found, classified, and tested against our rotation at start-up."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..host import lone_forward
from ..kernels.reference import cached_cos_sin, rotate_keys

# Dims: T tokens, H key heads of this rank, D head dim

# Classes whose table is m * (cos, sin)(position * frequency), so that a rotation by a
# difference of positions follows from two of its rows.
SUPPORTED = frozenset(
    {
        "RotaryEmbedding",
        "LinearScalingRotaryEmbedding",
        "DynamicNTKScalingRotaryEmbedding",
        "DynamicNTKAlphaRotaryEmbedding",
        "Llama3RotaryEmbedding",
        "YaRNScalingRotaryEmbedding",
    }
)

NUM_PROBES = 16
# Float32 arithmetic of two rotations on keys of magnitude ~5.
TABLE_TOLERANCE = 2e-5
# Of the largest key, through a layer's own projections: float32 sums in another order, or a table,
# two rotations and a key rounded to 8 bits. A layer that encodes positions in another way differs by ~1.
LAYER_TOLERANCE = {torch.float32: 1e-4, torch.float16: 2**-7, torch.bfloat16: 2**-5}


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

    def cos_sin(
        self,
        old_T: Tensor,
        new_T: Tensor,
        angles: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]] = cached_cos_sin,
    ) -> tuple[Tensor, Tensor]:
        """float32 [T, rotary_dim / 2] tables that move keys from positions old to new. angles: who computes them."""
        if self.table is None:
            nothing = torch.empty(1, 0, device=old_T.device)
            return nothing, nothing
        return angles(self.table, old_T, new_T)


def find_ropes(model: torch.nn.Module, num_layers: int, *, attn_backend: Any = None) -> list[RopeGroup]:
    """Group the model's layers by how their keys depend on positions; each group and each layer is put to the test.

    Every attention layer must be accounted for, must run alone, and must move its keys as its rotary embedding says
    or not depend on positions at all, whether it owns a rotary embedding or not. Some layer must depend on them:
    otherwise positions enter elsewhere, say by learned embeddings, and a moved block would keep its old ones.

    attn_backend: the server's, whose pool a layer may read or write; None where no layer does.
    Raises UnsupportedRope with the name of what cannot be served.
    """
    modules = dict(_attention_modules(model))
    missing = sorted(set(range(num_layers)) - modules.keys())
    if missing:
        raise UnsupportedRope(
            f"layers {missing} of {type(model).__name__} have no attention module with a layer_id, so how they "
            "encode positions is unknown; document blocks cannot be moved for this model"
        )
    by_rope: dict[int, tuple[Any, list[int]]] = {}
    for layer_id, module in sorted(modules.items()):
        rope = getattr(module, "rotary_emb", None)
        by_rope.setdefault(id(rope), (rope, []))[1].append(layer_id)
    groups: list[RopeGroup] = []
    still: list[int] = []
    for rope, layers in by_rope.values():
        group = _group(rope, tuple(layers))
        if group.table is not None:
            _check_table(rope, group)
        turned = [at for at in layers if not _is_still(modules[at], at, group, attn_backend)]
        if turned:
            groups.append(replace(group, layers=tuple(turned)))
        still += [at for at in layers if at not in turned]
    if not groups:
        raise UnsupportedRope(
            f"{type(model).__name__} has no rotary embedding in any layer (attribute rotary_emb) that its keys are "
            "turned by, so positions enter elsewhere, and a block's keys and values cannot be moved to another position"
        )
    return [*groups, RopeGroup("none", tuple(sorted(still)), None, True)] if still else groups


def _attention_modules(model: torch.nn.Module) -> Iterator[tuple[int, torch.nn.Module]]:
    """(layer id, module that computes q, k and v) of every attention layer, in the model's order."""
    seen: set[int] = set()
    for module in model.modules():
        attention = getattr(module, "attn", None)
        layer_id = getattr(attention, "layer_id", None)
        # the number of key heads tells the host's attention operation from a wrapper that calls itself attn
        if layer_id is None or layer_id in seen or not hasattr(attention, "tp_k_head_num"):
            continue
        seen.add(layer_id)
        yield layer_id, module


def _group(rope: Any, layers: tuple[int, ...]) -> RopeGroup:
    if rope is None:
        return RopeGroup("none", layers, None, True)
    name = type(rope).__name__
    if name not in SUPPORTED:
        raise UnsupportedRope(
            f"rotary embedding {name} (layers {layers[0]}..{layers[-1]}) is not supported; "
            f"supported: {', '.join(sorted(SUPPORTED))}"
        )
    return RopeGroup(name, layers, _float32_table(rope), bool(rope.is_neox_style))


def _float32_table(rope: Any) -> Tensor:
    """cos | sin by position, float32 [rows of the live table, rotary_dim].

    The live table is what the model reads, also beyond the rows that its configuration gives:
    the host lengthens it to the server's context. Where it was rounded to the model's dtype it
    is computed again, to the same length.
    """
    live: Tensor = rope.cos_sin_cache
    was_cast = rope.dtype != torch.float32 and torch.equal(live.to(rope.dtype).to(live.dtype), live)
    if live.dtype == torch.float32 and not was_cast:
        return live
    twin = copy.deepcopy(rope)
    with live.device:
        twin.cos_sin_cache = twin._compute_cos_sin_cache().float()
        twin._ensure_cos_sin_cache_length(live.shape[0] - 1)
    table: Tensor = twin.cos_sin_cache[: live.shape[0]]
    return table


def _check_table(rope: Any, group: RopeGroup) -> None:
    """The group's table is the live one, and with it random keys move as the model's code encodes them.

    Raises UnsupportedRope.
    """
    assert group.table is not None
    live = rope.cos_sin_cache
    off = (group.table - live).abs().max().item() if live.shape == group.table.shape else None
    if off is None or not off <= 2 * torch.finfo(rope.dtype).eps:
        raise UnsupportedRope(
            f"{group.name}: the table that the model reads {tuple(live.shape)} is not the one its class computes "
            f"{tuple(group.table.shape)} (largest difference {off}); it was changed after it was built"
        )
    # a twin in float32: the module itself casts its table to the type of what it last saw
    twin = copy.deepcopy(rope)
    twin.cos_sin_cache = group.table
    old_T, new_T = _probe_positions(group)
    k_TD = torch.randn(NUM_PROBES, rope.head_size, generator=torch.Generator().manual_seed(0))
    k_TD = k_TD.to(group.table.device)

    def at(positions_T: Tensor) -> Tensor:
        encoded: Tensor = twin.forward_native(positions_T, k_TD.clone(), k_TD.clone())[1]
        return encoded[:, None]

    moved = rotate_keys(at(old_T), *group.cos_sin(old_T, new_T), is_neox=group.is_neox)
    error = (moved - at(new_T)).abs().max().item()
    if not error <= TABLE_TOLERANCE:
        raise UnsupportedRope(
            f"{group.name}: moving a key by rotation differs from the model's own rotary embedding by "
            f"{error:.1e} (allowed {TABLE_TOLERANCE:.0e}); report this model's rope_scaling"
        )


def _is_still(module: torch.nn.Module, layer: int, group: RopeGroup, attn_backend: Any) -> bool:
    """Run the layer's own code on the same hidden states at two positions: True where its keys are the same, False
    where the rotation of `group` moves one result onto the other.

    A layer may own a rotary embedding and not use it, take another one from the model, or encode positions in another
    way; only its code knows. Raises UnsupportedRope for what is neither, and for a layer that cannot be run alone:
    nothing speaks for it.
    """
    device = next(module.parameters()).device
    old_T, new_T = (positions_T.to(device) for positions_T in _probe_positions(group))
    try:
        old_THD, new_THD = (_keys_at(module, at_T, attn_backend) for at_T in (old_T, new_T))
    except Exception as error:  # whatever a model's forward raises without a server around it
        raise UnsupportedRope(
            f"layer {layer} ({type(module).__name__}) could not be run alone ({error!r}), so how it encodes positions "
            "is unknown: what it takes from the model may be another rotary embedding than its own"
        ) from error
    dtypes = {new_THD.dtype, getattr(getattr(module, "rotary_emb", None), "dtype", torch.float32)}
    allowed = max(LAYER_TOLERANCE.get(dtype, LAYER_TOLERANCE[torch.bfloat16]) for dtype in dtypes)
    if _error_ratio(old_THD, new_THD) <= allowed:
        return True
    error_ratio = float("inf")
    if group.table is not None:
        moved_THD = rotate_keys(old_THD, *group.cos_sin(old_T, new_T), is_neox=group.is_neox)
        error_ratio = _error_ratio(moved_THD, new_THD)
    if not error_ratio <= allowed:
        raise UnsupportedRope(
            f"layer {layer} ({type(module).__name__}): a key moved by the rotation of {group.name} differs from the "
            f"key that the layer computes at the new position by {error_ratio:.1e} of the largest (allowed "
            f"{allowed:.0e}), so the layer encodes positions in another way"
        )
    return False


def _error_ratio(found_THD: Tensor, wanted_THD: Tensor) -> float:
    """Largest difference, of the largest number wanted."""
    scale = wanted_THD.float().abs().max().item()
    return (found_THD.float() - wanted_THD.float()).abs().max().item() / scale if scale else 0.0


class _Captured(Exception):
    """Ends a layer's forward where its keys are known."""


@torch.no_grad()
def _keys_at(module: torch.nn.Module, positions_T: Tensor, attn_backend: Any) -> Tensor:
    """Keys [T, H, D] that the pool gets from the module for fixed random hidden states at `positions_T`."""
    found: list[Tensor] = []

    def capture(q: Tensor, k: Tensor, *args: Any, save_kv_cache: bool = True, **kwargs: Any) -> Tensor:
        if not save_kv_cache:
            # the layer turned and wrote them in one kernel; what it hands on need not be what it wrote
            k = attn_backend.token_to_kv_pool.get_key_buffer(attention.layer_id)[forward_batch.out_cache_loc]
        found.append(k.reshape(len(positions_T), attention.tp_k_head_num, -1).clone())
        raise _Captured

    attention: Any = module.attn
    weight = next(p for p in module.parameters() if p.dim() == 2)
    hidden_TD = torch.randn(
        len(positions_T), _input_size(module, weight), generator=torch.Generator().manual_seed(1)
    )
    dtype = weight.dtype if weight.dtype in LAYER_TOLERANCE else torch.get_default_dtype()
    names = inspect.signature(module.forward).parameters
    attention.forward = capture
    try:
        with lone_forward(attn_backend, positions_T) as forward_batch:
            given = {
                "positions": positions_T,
                "position_ids": positions_T,
                "hidden_states": hidden_TD.to(device=positions_T.device, dtype=dtype),
                "forward_batch": forward_batch,
            }
            module(**{name: value for name, value in given.items() if name in names})
    except _Captured:
        pass
    finally:
        del attention.forward
    (k_THD,) = found
    return k_THD


def _input_size(module: torch.nn.Module, weight: Tensor) -> int:
    """Width of the hidden states that a module's first projection takes."""
    sizes: list[Any] = [child.input_size for child in module.modules() if hasattr(child, "input_size")]
    return int(sizes[0]) if sizes else weight.shape[1]


def _probe_positions(group: RopeGroup) -> tuple[Tensor, Tensor]:
    """Two lists of positions over the whole table, both ends and no move at all among them."""
    if group.table is None:
        return torch.arange(NUM_PROBES), torch.arange(NUM_PROBES) * 37
    limit = group.table.shape[0]
    generator = torch.Generator().manual_seed(0)
    old_T, new_T = (torch.randint(0, limit, (NUM_PROBES,), generator=generator) for _ in range(2))
    old_T[:3] = torch.tensor([0, limit - 1, limit // 2])
    new_T[:3] = torch.tensor([limit - 1, 0, limit // 2])
    return old_T.to(group.table.device), new_T.to(group.table.device)
