"""Examples and the requests that the documentation shows are run, as they stand, against the real server."""

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

pytestmark = pytest.mark.engine
EXAMPLES = ROOT / "examples"
README, REQUESTS = ((ROOT / page).read_text() for page in ("README.md", "docs/requests.md"))
URL = "localhost:30000"


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
    said = run(sys.executable, str(EXAMPLES / "rag.py"), "--url", server.url, *questions)
    assert re.search(r"from bridge, .*; \d+ tokens known", said)
    assert re.search(r"from mill, .*; \d+ tokens known", said)
    own = tmp_path / "own.jsonl"
    rows = [
        {"id": f"note {i}", "text": f"The {word} of the valley is old and known to all. " * 8}
        for i, word in enumerate(("tower", "well", "inn"))
    ]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    asked = ("Tell about the tower and the well.", "Tell about the inn and the well.")
    words = ("--documents", str(own), "--top", "2")
    said = run(sys.executable, str(EXAMPLES / "rag.py"), "--url", server.url, *words, *asked)
    assert [int(n) > 0 for n in re.findall(r"(\d+) tokens known", said)] == [True, True]


def shown(language: str, page: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", page, re.DOTALL)


def test_the_readme_shows_requests_that_are_run():
    curls, pythons = (
        [code for code in shown(name, README) if "localhost" in code] for name in ("bash", "python")
    )
    assert len(curls) == len(pythons) == 1
    assert set(curls + pythons) <= {*shown("bash", REQUESTS), *shown("python", REQUESTS)}


def test_curl_of_the_requests(server):
    commands = [block for block in shown("bash", REQUESTS) if "curl" in block]
    answers = [json.loads(run("bash", "-c", c.replace(URL, server.url[7:]))) for c in commands]
    assert len(answers) == 2
    for answer in answers:
        (usage,) = answer["meta_info"]["blockreuse"]
        assert usage["skipped_reason"] in (None, "blocks_too_short")


def test_python_of_the_requests(server, tmp_path):
    """The second piece goes on with the first one's client and documents; the third stands alone."""
    first, second, third = shown("python", REQUESTS)
    report = "\nprint(answer.choices[0].meta_info['blockreuse'])\n"
    for number, code in enumerate((first + second + report, third)):
        script = tmp_path / f"request_{number}.py"
        script.write_text(code.replace(URL, server.url[7:]))
        found = usages(run(sys.executable, str(script)))
        assert len(found) == 2 - number
        assert all(usage["reused_tokens"] > 0 for usage in found)
