"""What README and the pages of the surface promise is there: commands, configuration, Python, every name."""

from __future__ import annotations

import ast
import re

import msgspec
from places import ROOT

from sglang_blockreuse.blocks.request import KEYS
from sglang_blockreuse.blocks.worth import ADMISSION_VERDICTS
from sglang_blockreuse.config import Config
from sglang_blockreuse.metrics import SERIES

README, REQUESTS, CONFIGURATION, OPERATIONS = (
    (ROOT / page).read_text()
    for page in ("README.md", "docs/requests.md", "docs/configuration.md", "docs/operations.md")
)


def blocks(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_it_is_one_page():
    assert len(README.splitlines()) <= 200
    assert len(README.split()) <= 1300


def test_the_two_commands():
    commands = "".join(blocks("bash", README))
    assert "pip install -e '.[demo]' && sglang-blockreuse demo\n" in commands
    assert "pip install -e '.[test]' && pytest\n" in commands
    assert "pip install --quiet -e '.[test]' && pytest\n" in (ROOT / ".ci" / "run").read_text()


def test_the_configuration_shown_is_the_default():
    (shown,) = blocks("yaml", CONFIGURATION)
    assert msgspec.yaml.decode(shown, type=Config) == Config()


def test_the_python_parses():
    for page in (README, REQUESTS):
        assert [ast.parse(code) for code in blocks("python", page)]


def test_every_name_of_the_surface_is_told():
    for name in (*KEYS, *ADMISSION_VERDICTS):
        assert f"`{name}`" in REQUESTS, name
    for name in SERIES:
        assert f"`sglang:blockreuse_{name}`" in OPERATIONS, name
