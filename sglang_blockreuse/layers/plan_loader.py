"""From a name or a file to a checked plan, and from a plan to a model.

    plan = load_plan("full")                       # or a path to a .yaml, .yml or .json file
    bound = plan.bind(num_layers=30, architecture="LlamaForCausalLM")

Every failure is a `PlanError` that names file, place, value, rule and fix.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from importlib.resources import files
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import msgspec
import yaml

from sglang_blockreuse.layers.plan import BoundLayer, BoundPlan, LayerEntry, PlanError, PlanSpec, entry_tail
from sglang_blockreuse.layers.plan_rules import resolve, span
from sglang_blockreuse.layers.plan_schema import read_spec

FINGERPRINT_DOMAIN = b"sglang-blockreuse/plan/1"
SUFFIXES = (".yaml", ".yml", ".json")


@dataclass(frozen=True)
class LayerPlan:
    """A valid plan, not yet tied to a model. Constructing one checks it and raises `PlanError`."""

    spec: PlanSpec
    source: str  # file or preset, the first word of every error
    folder: str | None = None  # where the plan's weights file is looked for

    def __post_init__(self) -> None:
        resolve(self.spec, self.source, None)

    @property
    def name(self) -> str:
        return self.spec.name

    @cached_property
    def fingerprint(self) -> str:
        """sha256 (hex) of what the plan means. Spelling, order, names of plan and files, evidence are no part of it."""
        meaning = json.dumps(_canonical(self.spec), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(FINGERPRINT_DOMAIN + b"\0" + meaning.encode()).hexdigest()

    def bind(self, num_layers: int, architecture: str | None) -> BoundPlan:
        """Resolve the plan for a model; `architecture` is not checked where it is not known (None)."""
        model = self.spec.model
        if model.num_layers not in (None, num_layers):
            rule = f"the model has {num_layers} layers"
            raise PlanError(
                self.source, "model.num_layers", model.num_layers, rule, "Choose a plan of this model"
            )
        if architecture is not None and model.architecture not in (None, architecture):
            rule = f"the model is a {architecture}"
            raise PlanError(
                self.source, "model.architecture", model.architecture, rule, "Choose a plan of this model"
            )
        layers = resolve(self.spec, self.source, num_layers)
        return BoundPlan(
            name=self.name,
            source=self.source,
            fingerprint=self.fingerprint,
            selection=self.spec.selection,
            scorer=self.spec.scorer,
            layers=layers,
            prefill=self.spec.prefill,
            weights_file=self._weights_file(),
            trained_sharing=self.spec.model.trained_sharing,
            warnings=tuple(_unproved_promises(self.spec, layers)),
        )

    def _weights_file(self) -> str | None:
        weights = self.spec.scorer.weights
        return None if weights is None else str(Path(self.folder or ".") / weights)

    def to_yaml(self) -> str:
        """The plan as a file, ranges merged; loading it gives the same fingerprint."""
        content = {"version": self.spec.version, "name": self.name, **_canonical(self.spec)}
        if self.spec.scorer.weights is not None:
            content["scorer"]["weights"] = self.spec.scorer.weights
        if self.spec.evidence:
            content["evidence"] = self.spec.evidence
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None, allow_unicode=True)


def load_plan(name_or_path: str | Path) -> LayerPlan:
    """Load a shipped plan by name, or a file by path. A shipped name wins over a file of the same name."""
    shipped = _shipped_files()
    if str(name_or_path) in shipped:
        file = shipped[str(name_or_path)]
        source = f"layer_plans/{file.name}"
        return parse_plan(_read(file, source), source, folder=Path(str(file)).parent)
    path = Path(name_or_path)
    if not path.is_file():
        raise _unknown(str(name_or_path), sorted(shipped))
    if path.suffix not in SUFFIXES:
        rule = "a plan file is YAML or JSON"
        raise PlanError(str(path), "", path.suffix, rule, f"Rename it to end in one of {', '.join(SUFFIXES)}")
    return parse_plan(_read(path, str(path)), str(path), folder=path.parent)


def parse_plan(text: str, source: str, *, folder: Path | None = None) -> LayerPlan:
    """A plan from the text of a file; `source` names the file in errors and decides between YAML and JSON."""
    return LayerPlan(read_spec(text, source), source, None if folder is None else str(folder))


def shipped_plans() -> tuple[str, ...]:
    """Names of the plans that come with the package, sorted."""
    return tuple(sorted(_shipped_files()))


def _shipped_files() -> dict[str, Traversable]:
    folder = files("sglang_blockreuse") / "layer_plans"
    return {file.name.removesuffix(".yaml"): file for file in folder.iterdir() if file.name.endswith(".yaml")}


def _unknown(name: str, known: list[str]) -> PlanError:
    close = get_close_matches(Path(name).stem, known, n=1)
    hint = f"Did you mean {close[0]}" if close else "Give one of these names or the path of a plan file"
    rule = f"it is neither a file nor one of the plans that ship: {', '.join(known)}"
    return PlanError("layer plan", "", name, rule, hint)


def _read(file: Traversable, source: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(
            source, "", file.name, f"the file is not UTF-8 ({error.reason})", "Save it as UTF-8"
        ) from error
    except OSError as error:
        raise PlanError(
            source, "", file.name, f"the file cannot be read ({error.strerror})", "Check it"
        ) from error


def _canonical(spec: PlanSpec) -> dict[str, Any]:
    """What the plan means, without defaults: equal plans give equal dicts, however their ranges are cut."""
    content: dict[str, Any] = msgspec.to_builtins(spec)
    if scorer := content.get("scorer"):
        scorer.pop("weights", None)  # its digest says what is in it
        if spec.scorer.lends == spec.scorer.heads:
            scorer.pop("lend_heads", None)
    # layers say it one by one
    content.get("selection", {}).pop("tail", None)
    kept = {key: content[key] for key in ("model", "selection", "scorer", "prefill") if content.get(key)}
    return {**kept, "layers": list(_merged(spec))}


def _merged(spec: PlanSpec) -> Iterator[dict[str, Any]]:
    """The entries in layer order with equal neighbours joined into one range."""
    count = spec.model.num_layers
    spans: list[tuple[int, int, LayerEntry]] = []
    for entry in spec.layers:
        bounds = span(entry) or ((0, count - 1) if count else None)
        if bounds is None:
            yield {"layers": "all", **_words(entry, spec)}
            return
        spans.append((*bounds, entry))
    joined: list[tuple[int, int, dict[str, Any]]] = []
    for first, last, entry in sorted(spans, key=lambda item: item[0]):
        words = _words(entry, spec)
        if joined and joined[-1][2] == words:
            first = joined.pop()[0]
        joined.append((first, last, words))
    for first, last, words in joined:
        yield {"layers": first if first == last else f"{first}-{last}", **words}


def _words(entry: LayerEntry, spec: PlanSpec) -> dict[str, Any]:
    words: dict[str, Any] = msgspec.to_builtins(entry)
    del words["layers"]
    words.pop("tail", None)
    if (tail := entry_tail(entry, spec.selection)) != "none":
        words["tail"] = tail
    return words


def _unproved_promises(spec: PlanSpec, layers: tuple[BoundLayer, ...]) -> Iterator[str]:
    """Sharing that changes what a layer reads is lossless only for a checkpoint trained that way."""
    if spec.model.trained_sharing:
        return
    for field, what in (("kv_from", "main KV"), ("key_from", "indexer keys")):
        sharing = [layer.layer for layer in layers if getattr(layer, field) is not None]
        if sharing:
            yield (
                f"{field}: layers {sharing} read another layer's {what}; that is exact only for a checkpoint "
                f"trained for it. Set model.trained_sharing: true if this one was, or measure the loss first."
            )
