"""Examples and README's requests are run, as they stand, against the real server."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from places import ROOT
from servers import language_model
from tiny_models import talking_model

pytestmark = pytest.mark.engine
EXAMPLES = ROOT / "examples"
README = (ROOT / "README.md").read_text()
README_URL = "localhost:30000"


@pytest.fixture(scope="module")
def server():
    with language_model() as running:
        yield running


def run(*command: str, **env: str) -> str:
    """Output of a command that must end well; commands of this environment are found."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
        env={**os.environ, "PATH": path, **env},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def usages(text: str) -> list[dict]:
    """Usage objects that a program printed as Python."""
    return [eval(found) for found in re.findall(r"\{'(?:prefix|mode)'.*?\}", text)]


def test_curl(server):
    separator, parts, exact = run("bash", str(EXAMPLES / "requests.sh"), URL=server.url).splitlines()
    (usage,) = json.loads(separator)["meta_info"]["blockreuse"]
    assert usage["reused_tokens"] > 0
    (usage,) = json.loads(parts)["choices"][0]["meta_info"]["blockreuse"]
    assert usage["skipped_reason"] is None
    assert usage["reused_tokens"] > 0
    (usage,) = json.loads(exact)["meta_info"]["blockreuse"]
    assert (usage["skipped_reason"], usage["reused_tokens"]) == ("mode_exact", 0)


def test_openai_client(server):
    first, second = usages(run(sys.executable, str(EXAMPLES / "openai_client.py"), "--url", server.url))
    assert second["reused"] > 0
    assert sum(first.values()) == sum(second.values())


def test_rag_with_the_shipped_and_with_other_documents(server, tmp_path):
    questions = ["Who designed the bridge over the Orla?", "Who signed the contract about the mill?"]
    shown = run(sys.executable, str(EXAMPLES / "rag.py"), "--url", server.url, *questions)
    assert re.search(r"from bridge, .*; \d+ tokens known", shown)
    assert re.search(r"from mill, .*; \d+ tokens known", shown)
    own = tmp_path / "own.jsonl"
    rows = [
        {"id": f"note {i}", "text": f"The {word} of the valley is old and known to all. " * 8}
        for i, word in enumerate(("tower", "well", "inn"))
    ]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("Tell about the tower and the well.", "Tell about the inn and the well.")
    words = ("--documents", str(own), "--top", "2")
    shown = run(sys.executable, str(EXAMPLES / "rag.py"), "--url", server.url, *words, *asked)
    assert [int(n) > 0 for n in re.findall(r"(\d+) tokens known", shown)] == [True, True]


def test_offline_engine():
    first, second = usages(run(sys.executable, str(EXAMPLES / "offline_engine.py"), str(talking_model())))
    assert first["skipped_reason"] is second["skipped_reason"] is None
    assert second["reused_tokens"] > 0


def test_curl_of_the_readme(server):
    commands = [block for block in re.findall(r"```bash\n(.*?)```", README, re.DOTALL) if "curl" in block]
    answers = [json.loads(run("bash", "-c", c.replace(README_URL, server.url[7:]))) for c in commands]
    assert len(answers) == 2
    for answer in answers:
        (usage,) = answer["meta_info"]["blockreuse"]
        assert usage["skipped_reason"] in (None, "blocks_too_short")


def test_python_of_the_readme(server, tmp_path):
    """The second piece goes on with the first one's client and documents; the third stands alone."""
    first, second, third = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    report = "\nprint(answer.choices[0].meta_info['blockreuse'])\n"
    for number, code in enumerate((first + second + report, third)):
        script = tmp_path / f"readme_{number}.py"
        script.write_text(code.replace(README_URL, server.url[7:]))
        found = usages(run(sys.executable, str(script)))
        assert len(found) == 2 - number
        assert all(usage["reused_tokens"] > 0 for usage in found)
