"""The tiers of the suite: what runs at night only has a cheap twin that always runs, and no test imports a test."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

TESTS = ROOT / "tests"
NIGHTLY = sorted((TESTS / "nightly").glob("test_*.py"))
Definition = ast.FunctionDef | ast.ClassDef


def definitions(body: list[ast.stmt]) -> dict[str, Definition]:
    return {node.name: node for node in body if isinstance(node, Definition)}


def twins_of(tree: ast.Module, decorators: list[ast.expr]) -> list[str]:
    """Values of `twin` in the marks `nightly`."""
    names: dict[str, str] = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names[ast.unparse(node.targets[0])] = node.value.value
    return [
        eval(ast.unparse(keyword.value), {}, names)
        for mark in decorators
        if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.nightly"
        for keyword in mark.keywords
        if keyword.arg == "twin"
    ]


def nightly_tests(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """(name, its twins) of each test; a class may name one for all of its tests."""
    for name, node in definitions(tree.body).items():
        twins = twins_of(tree, node.decorator_list)
        if isinstance(node, ast.FunctionDef) and name.startswith("test_"):
            yield name, twins
        elif isinstance(node, ast.ClassDef) and name.startswith("Test"):
            methods = [m for n, m in definitions(node.body).items() if n.startswith("test_")]
            if not methods or twins:
                yield name, twins  # its tests stand in a class of tests/laws, or all have one twin
            else:
                yield from ((f"{name}::{m.name}", twins_of(tree, m.decorator_list)) for m in methods)


@pytest.mark.parametrize("path", NIGHTLY, ids=lambda path: path.stem)
def test_every_nightly_test_names_a_twin_that_always_runs(path):
    found = list(nightly_tests(ast.parse(path.read_text())))
    assert found, "no test is here"
    for name, twins in found:
        assert len(twins) == 1, f"{path.name}::{name} names no twin"
        check_twin(twins[0])


def check_twin(twin: str) -> None:
    file, *names = twin.split("::")
    assert re.fullmatch(r"tests/(unit|engine|kernels|rehearsal)/test_\w+\.py", file), twin
    body = ast.parse((ROOT / file).read_text()).body
    for name in names:
        assert name in definitions(body), f"{twin}: there is no {name}"
        body = definitions(body)[name].body


@pytest.mark.parametrize(
    "twin",
    [
        "tests/nightly/test_needles.py::test_x",
        "tests/unit/test_tiers.py::test_no_such_test",
        "tests/unit/test_no_such_file.py::test_x",
    ],
)
def test_a_twin_that_does_not_always_run_is_seen(twin):
    with pytest.raises((AssertionError, OSError)):
        check_twin(twin)


def test_a_nightly_test_without_a_twin_is_seen():
    source = "class TestA:\n    @pytest.mark.slow\n    def test_b(self): ...\n\ndef test_c(): ..."
    assert list(nightly_tests(ast.parse(source))) == [("TestA::test_b", []), ("test_c", [])]


def test_no_test_imports_a_test():
    for path in TESTS.glob("**/*.py"):
        imported = re.findall(r"^\s*(?:from|import) (test_\w+)", path.read_text(), re.MULTILINE)
        assert not imported, f"{path.relative_to(ROOT)} imports {imported}; move what both use into tests/"


def test_every_test_file_stands_in_a_tier():
    places = {path.parent.relative_to(TESTS) for path in TESTS.glob("**/test_*.py")}
    allowed = {
        "unit",
        "engine",
        "kernels",
        "kernels/interpreter",
        "nightly",
        "rehearsal",
        "rehearsal/interpreter",
    }
    assert places <= {Path(name) for name in allowed}
