"""The file beside a plan that holds what a scorer learned: written by calibration, checked when it is served.

A safetensors file with, for every scoring layer l, the tensors of `reference_index.IndexMap`

    l.key float32 [E, C, H * D]   l.query float32 [Q, C, D]   l.low, l.step float32 [E, C]

and, as metadata, the format, the scorer's kind and the identity of the model it was made for. A plan names the file
and its SHA-256, so the plan's fingerprint covers it.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..kernels.reference_index import IndexMap
from .plan import BoundPlan

FORMAT = "sglang-blockreuse/index/1"
IDENTITY_DOMAIN = b"sglang-blockreuse/model/1"
# enough of every key projection to tell one training state from another, little enough to read at start-up
_IDENTITY_BYTES = 4096
_FIELDS = {"key": "key_ECM", "query": "query_QCD", "low": "low_EC", "step": "step_EC"}


class WeightsError(ValueError):
    """A file of scorer weights that cannot be used: what, which value, what is wanted and what to do."""


@dataclass(frozen=True)
class IndexWeights:
    """The maps of a plan's scoring layers."""

    kind: str  # label_channels or learned
    model: str  # identity, see `model_identity`
    layers: dict[int, IndexMap]
    source: str = "weights"

    def save(self, path: Path) -> str:
        """Write the file; returns its SHA-256, for the plan."""
        from safetensors.torch import save

        tensors = {
            f"{layer}.{word}": getattr(index, field).float().contiguous()
            for layer, index in sorted(self.layers.items())
            for word, field in _FIELDS.items()
        }
        content = save(tensors, {"format": FORMAT, "kind": self.kind, "model": self.model})
        path.write_bytes(content)
        return hashlib.sha256(content).hexdigest()

    def check_shapes(self, num_channels: int, num_q_heads: int, num_kv_heads: int, head_dim: int) -> None:
        """Raises WeightsError unless every map makes these channels of keys of this pool and queries of these heads."""
        num_heads = 1 if self.kind == "learned" else num_kv_heads
        for layer, index in self.layers.items():
            wanted = {
                "key": (num_heads, num_channels, num_kv_heads * head_dim),
                "query": (num_q_heads, num_channels, head_dim),
                "low": (num_heads, num_channels),
                "step": (num_heads, num_channels),
            }
            found = {word: tuple(getattr(index, field).shape) for word, field in _FIELDS.items()}
            if found != wanted or num_channels % 2:
                raise WeightsError(
                    f"{self.source}: layer {layer}: tensors are {found}, but {num_q_heads} query heads and "
                    f"{num_kv_heads} KV heads of {head_dim} with an even num_channels ({num_channels}) take {wanted}. "
                    "Distil for this model and this plan, and serve it without splitting its heads over ranks."
                )


def read_weights(plan: BoundPlan, model: str | None) -> IndexWeights:
    """The weights that a plan names, for the model of this identity (None: unknown, and not checked).

    Raises WeightsError.
    """
    path, scorer = Path(plan.weights_file or ""), plan.scorer
    try:
        content = path.read_bytes()
    except OSError as error:
        raise WeightsError(
            f"{plan.source}: scorer.weights: {path} cannot be read ({error.strerror}). Put the file that "
            "`calibrate --distil` wrote beside the plan."
        ) from None
    digest = hashlib.sha256(content).hexdigest()
    if digest != scorer.weights_sha256:
        raise WeightsError(
            f"{path}: its SHA-256 is {digest}, but {plan.source} was made with {scorer.weights_sha256}. Put the "
            "plan's own file there, or write the digest of this one into the plan."
        )
    weights = _parse(content, str(path))
    if weights.kind != scorer.kind:
        raise WeightsError(
            f"{path}: holds weights of {weights.kind}, but scorer.kind is {scorer.kind}. Change one."
        )
    if model is not None and weights.model != model:
        raise WeightsError(
            f"{path}: was made for model {weights.model[:12]}, but the model served is {model[:12]}. Distil anew "
            "for this model: sglang-blockreuse calibrate MODEL --distil."
        )
    absent = [layer.layer for layer in plan.layers if layer.scores and layer.layer not in weights.layers]
    if absent:
        raise WeightsError(
            f"{path}: has no weights for layers {absent}, which score in {plan.source}. Distil for this plan."
        )
    return weights


def _parse(content: bytes, source: str) -> IndexWeights:
    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(content)
        length = int.from_bytes(content[:8], "little")
        metadata: dict[str, Any] = json.loads(content[8 : 8 + length]).get("__metadata__", {})
        if metadata["format"] != FORMAT:
            raise ValueError(f"format {metadata['format']!r}, not {FORMAT!r}")
        kind, model = str(metadata["kind"]), str(metadata["model"])
        numbers = sorted({int(name.split(".")[0]) for name in tensors})
        layers = {
            layer: IndexMap(**{field: tensors[f"{layer}.{word}"] for word, field in _FIELDS.items()})
            for layer in numbers
        }
    except (SafetensorError, KeyError, ValueError) as error:
        raise WeightsError(
            f"{source}: is no file of scorer weights ({error!r}). Write it with `calibrate --distil`."
        ) from error
    for layer, index in layers.items():
        if not all(bool(torch.isfinite(x).all()) for x in index) or bool((index.step_EC <= 0).any()):
            raise WeightsError(
                f"{source}: layer {layer} holds values that are not finite, or steps not above 0."
            )
    return IndexWeights(kind, model, layers, source)


def served_identity(plan: BoundPlan, model_path: str) -> str | None:
    """The identity of a served model, where a plan has weights that must be its own. Raises WeightsError."""
    if plan.weights_file is None:
        return None
    folder = Path(model_path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(model_path, local_files_only=True))
    return model_identity(folder)


def model_identity(folder: Path) -> str:
    """sha256 (hex) over the first bytes of every key projection in a folder of safetensors files.

    Raises WeightsError for a folder without any.
    """
    from safetensors import safe_open

    found: dict[str, bytes] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(str(file), framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - not a mapping
                if "k_proj.weight" in name or "qkv_proj.weight" in name:
                    rows = tensors.get_slice(name)[:8].contiguous().flatten()
                    found[name] = rows.view(torch.uint8).numpy().tobytes()[:_IDENTITY_BYTES]
    if not found:
        raise WeightsError(
            f"{folder}: holds no safetensors file with key projections, so it cannot be told which model a file of "
            "scorer weights is for. Give --model-path a local folder of safetensors files."
        )
    digest = hashlib.sha256(IDENTITY_DOMAIN)
    for name, content in sorted(found.items()):
        digest.update(name.encode() + b"\0" + content)
    return digest.hexdigest()
