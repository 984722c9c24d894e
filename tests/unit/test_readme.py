"""What README promises is there: its commands, its configuration, its Python, its links."""

from __future__ import annotations

import ast
import re

import msgspec
from places import ROOT

from sglang_blockreuse.blocks.manager import ADMISSION_VERDICTS
from sglang_blockreuse.blocks.request import KEYS
from sglang_blockreuse.config import Config
from sglang_blockreuse.metrics import SERIES

README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_the_two_commands():
    commands = "".join(blocks("bash"))
    assert "pip install -e '.[demo]' && sglang-blockreuse demo\n" in commands
    assert "pip install -e '.[test]' && pytest\n" in commands
    assert "pip install --quiet -e '.[test]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_the_configuration_shown_is_the_default():
    (shown,) = blocks("yaml")
    assert msgspec.yaml.decode(shown, type=Config) == Config()


def test_the_python_parses():
    assert [ast.parse(code) for code in blocks("python")]


def test_every_name_of_the_surface_is_told():
    for name in (*KEYS, *ADMISSION_VERDICTS):
        assert f"`{name}`" in README, name
    for name in SERIES:
        assert re.search(rf"[_…]{name}", README), name


def test_links_lead_somewhere():
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for path in re.findall(r"`(bench/\S+?\.py|layer_plans/\S+|kernels/README\.md)`", README):
        assert (ROOT / path).exists(), path
