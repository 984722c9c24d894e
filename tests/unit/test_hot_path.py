"""What every step runs must not wait for the device: words that do are found in the source, or give their reason."""

from __future__ import annotations

import ast

import pytest
from places import ROOT

PACKAGE = ROOT / "sglang_blockreuse"
# run in every folded prefill step
HOT = (
    "hooks.py",
    *(f"blocks/{name}.py" for name in ("step", "load", "rows", "tags", "upload", "probe", "measure")),
)
# (file, function, word): why it may stand there
ALLOWED = {
    ("hooks.py", "keep_captured", "cpu"): "the host stores what it captured, and would do so with the result",
    ("blocks/probe.py", "evidence", "cpu"): "the host chooses by what a probe measured",
    (
        "blocks/rows.py",
        "_moved_overrides",
        "bool",
    ): "a neighbour's embeddings for single tokens: which of them are kept",
    ("blocks/measure.py", "_asked", "nonzero"): "positions, on the host",
    ("blocks/measure.py", "_asked", "tensor"): "the same",
}
WAITING = ("item", "cpu", "nonzero", "synchronize", "unique", "masked_select")


def waits(source: str) -> set[tuple[str, str]]:
    """(function, word) of calls that wait: for a value, for a copy to the host, for one to the device."""
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            found |= {(function.name, word) for call in calls_of(function) if (word := waiting(call))}
    return found


def calls_of(function: ast.AST) -> list[ast.Call]:
    """Without those of functions inside, which are found by themselves."""
    found, left = [], list(ast.iter_child_nodes(function))
    while left:
        node = left.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(node, ast.Call):
            found.append(node)
        left += ast.iter_child_nodes(node)
    return found


def waiting(call: ast.Call) -> str | None:
    name = ast.unparse(call.func).rpartition(".")[2]
    keywords = {keyword.arg for keyword in call.keywords}
    if name in WAITING:
        return name
    if name in ("tensor", "as_tensor"):
        return "tensor"
    sends = name == "to" and any(
        "device" in ast.unparse(x) for x in (*call.args, *(k.value for k in call.keywords))
    )
    if sends and "non_blocking" not in keywords:
        return "to"
    if name == "bool" and call.args and isinstance(call.args[0], ast.Call):
        inner = ast.unparse(call.args[0].func).rpartition(".")[2]
        return "bool" if inner in ("any", "all") else None
    return None


@pytest.mark.parametrize("name", HOT)
def test_no_word_that_waits_stands_on_the_hot_path_without_its_reason(name):
    found = {(name, *place) for place in waits((PACKAGE / name).read_text())}
    assert found <= ALLOWED.keys()


def test_every_reason_is_still_needed():
    found = {(name, *place) for name in HOT for place in waits((PACKAGE / name).read_text())}
    assert found >= ALLOWED.keys()


@pytest.mark.parametrize(
    "line",
    [
        "return x.item()",
        "return torch.tensor(lens, device=x.device)",
        "return lens.to(x.device)",
        "return lens.to(device=x.device, dtype=x.dtype)",
        "return bool(x.any())",
        "return x.nonzero()",
    ],
)
def test_a_word_that_waits_is_seen(line):
    assert waits(f"def step(x, lens):\n    {line}\n")


def test_a_copy_that_does_not_wait_is_not_taken_for_one_that_does():
    assert not waits("def step(x, held):\n    return held.to(x.device, non_blocking=True).to(x.dtype)\n")
