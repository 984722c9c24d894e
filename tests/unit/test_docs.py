"""What the documentation says is there: links, files, keys, metrics, commands, log lines."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
from pathlib import Path

import pytest
import yaml
from places import ROOT

from sglang_blockreuse import cli
from sglang_blockreuse.blocks.request import KEYS
from sglang_blockreuse.commands.bench import BENCHMARKS
from sglang_blockreuse.config import Config
from sglang_blockreuse.layers import plan
from sglang_blockreuse.layers.preset_names import PRESETS
from sglang_blockreuse.metrics import PREFIX, SERIES

PAGES = sorted(
    path.relative_to(ROOT)
    for folder in (".", "docs", "examples", "kernels", "layer_plans")
    for path in (ROOT / folder).glob("*.md")
)
CONFIG_KEYS = {
    section: set(type(getattr(Config(), section)).__struct_fields__) for section in ("blocks", "layers")
}
# words that stand for a value in a shown command
PLACEHOLDERS = {"M": "model", "MODEL": "model", "PATH": "path", "DIR": "dir", "NAME": "full", "PLAN": "full"}


def text_of(page: Path) -> str:
    return (ROOT / page).read_text()


def anchors(text: str) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
class TestEveryPage:
    def test_links_lead_somewhere(self, page):
        for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
            if target.startswith("https://"):
                continue
            path, _, anchor = target.partition("#")
            file = (ROOT / page).parent / path if path else ROOT / page
            assert file.exists(), target
            if anchor and file.suffix == ".md":
                assert anchor in anchors(file.read_text()), target

    def test_files_exist(self, page):
        named = re.findall(
            r"`((?:bench|docs|examples|kernels|layer_plans|sglang_blockreuse|tests)/[\w./-]+)`", text_of(page)
        )
        for name in named:
            assert (ROOT / name).exists(), name

    def test_metrics_exist(self, page):
        for name in re.findall(r"sglang:blockreuse_(\w+)", text_of(page)):
            assert name in SERIES, name

    def test_configuration_keys_exist(self, page):
        for section, key in re.findall(r"`(blocks|layers)\.(\w+)\b(?!\.|/)(?=[`:])", text_of(page)):
            if key == "yaml" or (ROOT / "sglang_blockreuse" / section / f"{key}.py").exists():
                continue  # a file
            assert key in CONFIG_KEYS[section], f"{section}.{key}"

    def test_commands_are_accepted(self, page):
        """Words of a shown command are the parser's; what belongs to SGLang or to a script is not looked at."""
        shown = "\n".join(re.findall(r"```(?:bash)?\n(.*?)```", text_of(page), re.DOTALL)).replace(
            "\\\n", " "
        )
        shown = re.sub(r'"\$\(.*?\)"', "MODEL", shown)
        for part in re.findall(r"^sglang-blockreuse .*|(?<=&& )sglang-blockreuse .*", shown, re.MULTILINE):
            words = shlex.split(re.split(r" #| &&| >", part)[0])
            check_command([PLACEHOLDERS.get(word, word) for word in words[1:]])

    def test_commands_in_the_text_exist(self, page):
        for name in re.findall(r"`sglang-blockreuse ([\w-]+)", text_of(page)):
            assert name in cli.COMMANDS, name
        for name in re.findall(r"`(?:sglang-blockreuse )?bench ([\w-]+)", text_of(page)):
            assert name in BENCHMARKS, name


def check_command(words: list[str]) -> None:
    name = words[0]
    assert name in cli.COMMANDS, name
    if name == "bench":
        assert words[1] in BENCHMARKS, words
    elif name not in cli.HANDED_ON:
        with contextlib.suppress(SystemExit) if "--help" in words else contextlib.nullcontext():
            cli.build_parser().parse_args(words)


def test_a_command_that_does_not_exist_is_seen():
    with pytest.raises(SystemExit):
        check_command(["top", "--no-such-flag"])
    with pytest.raises(AssertionError):
        check_command(["bench", "nothing"])


class TestOperations:
    text = text_of(Path("docs/operations.md"))

    def test_every_metric_has_its_meaning(self):
        table = dict(re.findall(r"^\| `sglang:blockreuse_(\w+)` \| (.*?) \|", self.text, re.MULTILINE))
        assert set(table) == set(SERIES)
        for name, (_, labels) in SERIES.items():
            assert all(f"`{label}`" in table[name] for label in labels), name

    def test_alert_rules_ask_for_series_and_labels_that_exist(self):
        (rules,) = re.findall(r"```yaml\n(.*?)```", self.text, re.DOTALL)
        (group,) = yaml.safe_load(rules)["groups"]
        assert len(group["rules"]) > 5
        for rule in group["rules"]:
            assert {"alert", "expr", "labels", "annotations"} <= set(rule)
            check_expression(rule["expr"])

    def test_log_lines_are_the_source_s(self):
        source = "".join(path.read_text() for path in (ROOT / "sglang_blockreuse").glob("**/*.py"))
        source = re.sub(r'"\s*\n\s*f?"', "", source).replace("%s", "on")
        table = self.text.split("| log or answer |")[1].split("\n\n")[0]
        lines = re.findall(r"^\| `([^`]+)` \|", table, re.MULTILINE)
        assert len(lines) > 5
        for line in lines:
            assert line in source, line

    def test_the_dashboard_asks_for_series_and_labels_that_exist(self):
        dashboard = json.loads((ROOT / "docs" / "grafana.json").read_text())
        for panel in dashboard["panels"]:
            for target in panel["targets"]:
                check_expression(target["expr"])


def check_expression(expression: str) -> None:
    ours = re.findall(PREFIX + r"(\w+)(?:\{([^}]*)\})?", expression)
    assert ours or "sglang:" in expression, expression
    for name, selector in ours:
        labels = {"model_name", *SERIES[name][1]}
        assert set(re.findall(r"(\w+)=", selector)) <= labels, expression
        for grouped in re.findall(r"by \((\w+)\)", expression):
            assert grouped in labels, expression
    assert expression.count("(") == expression.count(")"), expression


def test_every_page_is_reached_from_the_readme():
    readme = text_of(Path("README.md"))
    for page in PAGES:
        if page != Path("README.md"):
            assert str(page) in readme, page


def test_security_s_evidence_exists():
    for file, name in re.findall(r"`(tests/\w+/\w+\.py)`, `(test_\w+)`", text_of(Path("docs/security.md"))):
        assert f"def {name}(" in (ROOT / file).read_text(), name


def test_contributing_names_test_files_that_exist():
    for name in re.findall(r"`(test_\w+?)(?:_\*)?`", text_of(Path("CONTRIBUTING.md"))):
        assert list((ROOT / "tests").glob(f"*/{name}*.py")), name


class TestSources:
    """The table of mechanisms: what it names is there, and what is not whole says what is missing."""

    rows = tuple(
        [cell.strip() for cell in line[1:-1].split("|")]
        for line in text_of(Path("docs/sources.md")).splitlines()
        if line.startswith("| ") and not line.startswith("| mechanism")
    )

    def test_every_row_has_its_five_cells_and_none_stands_twice(self):
        assert {len(row) for row in self.rows} == {5}
        assert len(self.rows) > 120
        assert len({row[0] for row in self.rows}) == len(self.rows)

    def test_every_verdict_is_whole_or_says_what_is_missing(self):
        for what, where, _, tests, verdict in self.rows:
            assert re.fullmatch(r"whole|(partly|not served): .{8,}", verdict), (what, verdict)
            assert verdict.startswith("not served") or (where and tests), what

    def test_every_file_exists(self):
        for what, where, *_ in self.rows:
            for name in re.findall(r"`([\w/]+\.\w+)`", where):
                assert (ROOT / "sglang_blockreuse" / name).exists() or (ROOT / name).exists(), (what, name)

    def test_every_test_exists(self):
        num_named = sum(len(check_tests(tests)) for *_, tests, _ in self.rows)
        assert num_named > 150

    def test_every_setting_exists(self):
        sections = {"selection": plan.Selection, "scorer": plan.Scorer}
        for what, _, how, *_ in self.rows:
            for section, key in re.findall(r"`(selection|scorer)\.(\w+)", how):
                assert key in plan.entry_fields(sections[section]), (what, key)
            for name in re.findall(r"`(blockreuse_\w+)", how):
                assert name in KEYS, (what, name)
            for name in re.findall(r"`plan preset ([\w-]+)", how):
                assert name in PRESETS, (what, name)

    @pytest.mark.parametrize(
        "cell",
        [
            "`tests/unit/test_docs.py` `test_that_nobody_wrote`",
            "`tests/unit/test_cli.py` `test_every_file_exists`",
            "`test_every_file_exists`",
        ],
        ids=["no such test", "of another file", "of no file"],
    )
    def test_a_test_that_does_not_exist_is_seen(self, cell):
        with pytest.raises(AssertionError):
            check_tests(cell)


def check_tests(cell: str) -> list[str]:
    """The tests that a cell names, each behind its file; AssertionError for one that is not in it."""
    found, source = [], ""
    for name in re.findall(r"`([^`]+)`", cell):
        if name.endswith(".py"):
            source = (ROOT / name).read_text()
        else:
            assert f"def {name}(" in source, cell
            found.append(name)
    return found
