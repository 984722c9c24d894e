"""The strict reading of a plan file: from YAML or JSON text to `PlanSpec`, with errors a user can act on.

PyYAML, json and msgspec decide what is accepted; this file turns their words into file, path, value, rule and fix.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from difflib import get_close_matches
from typing import Any, get_args

import msgspec
import yaml
from msgspec import UNSET, Struct

from sglang_blockreuse.layers import plan
from sglang_blockreuse.layers.plan import PlanError, PlanSpec, entry_fields

_MESSAGE = re.compile(r"(?P<what>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>[^`]*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+)\]")

_RECORDS: dict[str, type[Struct]] = {
    "": PlanSpec,
    "model": plan.ModelSpec,
    "selection": plan.Selection,
    "scorer": plan.Scorer,
    "layers": plan.LayerEntry,
}
_WORDS: dict[str, tuple[object, ...]] = {
    "version": (1,),
    "role": get_args(plan.Role),
    "attend": get_args(plan.Attend),
    "tail": get_args(plan.Tail),
    "prefill": get_args(plan.Prefill),
    "kind": get_args(plan.ScorerKind),
    "heads": get_args(plan.ListHeads),
    "lend_heads": get_args(plan.ListHeads),
    "scan_heads": get_args(plan.ScanHeads),
    "rerank_heads": get_args(plan.ScanHeads),
}
_KINDS = {
    "int": "an integer",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "object": "a mapping (key: value)",
    "array": "a list",
    "null": "no value",
}


def read_spec(text: str, source: str) -> PlanSpec:
    """Read a plan from text: JSON if `source` ends in .json, else YAML. Nothing is coerced, no key is ignored.

    Raises `PlanError`. Relations between the values are not checked here.
    """
    raw = _parse_json(text, source) if source.endswith(".json") else _parse_yaml(text, source)
    try:
        return msgspec.convert(raw, PlanSpec, strict=True)
    except msgspec.ValidationError as error:
        raise _explained(raw, source, str(error)) from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """PyYAML keeps the last of two equal keys without a word; here the second is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                break  # PyYAML has its own error for this
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} stands twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


def _parse_yaml(text: str, source: str) -> object:
    try:
        # _UniqueKeyLoader is a SafeLoader
        return yaml.load(text, Loader=_UniqueKeyLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        place = f"line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise PlanError(
            source, place, _line(text, mark.line if mark else 0), str(error.problem), "Correct it"
        ) from None
    except (yaml.YAMLError, ValueError) as error:
        raise PlanError(source, "", text, f"it is not YAML ({error})", "Correct it") from None


def _parse_json(text: str, source: str) -> object:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        twice = next((key for key in keys if keys.count(key) > 1), None)
        if twice is not None:
            raise PlanError(source, "", twice, f"key {twice!r} stands twice", "Keep one of them")
        return dict(pairs)

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise PlanError(
            source, place, _line(text, error.lineno - 1), f"it is not JSON ({error.msg})", "Correct it"
        ) from None


def _line(text: str, number: int) -> str:
    lines = text.splitlines()
    return lines[number].strip() if number < len(lines) else ""


def _explained(raw: object, source: str, message: str) -> PlanError:
    match = _MESSAGE.fullmatch(message)
    assert match is not None  # the pattern accepts every string
    what, path = match["what"], (match["path"] or "").removeprefix(".")
    for kind, explain in (("unknown field", _unknown_key), ("missing required field", _missing_key)):
        if kind in what:
            return explain(raw, source, path, what.split("`")[1])
    value = _value_at(raw, path)
    if match["key"] and isinstance(value, dict):
        stray = next(key for key in value if not isinstance(key, str))
        return PlanError(source, path, stray, "every key is text", "Remove it")
    allowed = _WORDS.get(path.rsplit(".", 1)[-1])
    if allowed:
        words = ", ".join(str(word) for word in allowed)
        fix = _did_you_mean(value, allowed, otherwise="Use one of these")
        return PlanError(source, path, value, f"only {words} can stand here", fix)
    wanted = _plain(what)
    return PlanError(source, path, value, f"{wanted} is expected", f"Write it as {wanted}")


def _plain(what: str) -> str:
    """msgspec's "Expected `int` >= 1, got `str`" in a user's words."""
    wanted = re.sub(r", got `.*?`$", "", what).removeprefix("Expected ")
    bound = re.sub(r"`[^`]*` ?", "", wanted, count=1)
    for sign, words in ((">= ", " of at least "), ("> ", " above "), ("< ", " below ")):
        bound = bound.replace(sign, words)
    kinds = re.match(r"`([^`]*)`", wanted)
    if kinds is None:
        return wanted
    return " or ".join(_KINDS.get(kind, kind) for kind in kinds[1].split(" | ")) + bound


def _unknown_key(raw: object, source: str, path: str, key: str) -> PlanError:
    known = entry_fields(_record_at(path))
    full = f"{path}.{key}" if path else key
    rule = f"there is no such key here; known are {', '.join(known)}"
    homes = [name for name, record in _RECORDS.items() if key in entry_fields(record)]
    fix = f"It belongs to {homes[0] or 'the top of the file'}" if homes else "Remove it or use one of these"
    return PlanError(source, full, _value_at(raw, full), rule, _did_you_mean(key, known, otherwise=fix))


def _missing_key(raw: object, source: str, path: str, key: str) -> PlanError:
    full = f"{path}.{key}" if path else key
    allowed = _WORDS.get(key)
    fix = f"Add {key}: {' | '.join(str(word) for word in allowed)}" if allowed else f"Add {key}"
    return PlanError(source, full, UNSET, f"{key} is required", fix)


def _did_you_mean(value: object, allowed: tuple[Any, ...], *, otherwise: str) -> str:
    close = get_close_matches(str(value), [str(word) for word in allowed], n=1)
    return f"Did you mean {close[0]}" if close else otherwise


def _record_at(path: str) -> type[Struct]:
    return _RECORDS.get(re.split(r"[.\[]", path)[0], PlanSpec)


def _value_at(raw: object, path: str) -> object:
    """The user's value at a path; UNSET when there is none."""
    value: Any = raw
    for name, index in _STEP.findall("." + path if path and path[0] != "[" else path):
        try:
            value = value[int(index)] if index else value[name]
        except (KeyError, IndexError, TypeError):
            return UNSET
    return value
