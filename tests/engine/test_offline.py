"""Without a server: `sglang.Engine` in the user's own script, configured by the environment."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from prompts import Library
from tiny_models import talking_model

from sglang_blockreuse.config import CONFIG_ENV

pytestmark = pytest.mark.engine
SCRIPT = """
import json, sys
import sglang

if __name__ == "__main__":
    model, cases, texts = json.load(sys.stdin)
    engine = sglang.Engine(
        model_path=model,
        radix_cache_backend="blockreuse",
        attention_backend="blockreuse",
        max_total_tokens=8000,
    )
    for ids, spans in cases:
        params = {"temperature": 0, "max_new_tokens": 2, "custom_params": {"blockreuse_spans": spans}}
        answer = engine.generate(input_ids=ids, sampling_params=params)
        print("USAGE", json.dumps(answer["meta_info"]["blockreuse"][0]))
    for text in texts:
        answer = engine.generate(prompt=text, sampling_params={"temperature": 0, "max_new_tokens": 2})
        print("USAGE", json.dumps(answer["meta_info"]["blockreuse"][0]))
    engine.shutdown()
"""


def test_the_offline_engine_reuses_blocks(tmp_path):
    library = Library(seed=8)
    cases = [library.prompt(order) for order in ((0, 1, 2), (2, 1, 0))]
    config = tmp_path / "blockreuse.json"
    config.write_text(json.dumps({"blocks": {"tau": 3, "separator": "<doc>"}}))
    documents = [f"{word} " * 60 for word in ("river", "bridge", "museum")]
    texts = ["<doc>".join(["Answer.\n", *(documents[i] for i in o), "Why?"]) for o in ((0, 1, 2), (2, 1, 0))]
    script = tmp_path / "offline.py"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script)],
        input=json.dumps([str(talking_model()), cases, texts]),
        env={**os.environ, CONFIG_ENV: str(config)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    usages = [json.loads(line[6:]) for line in done.stdout.splitlines() if line.startswith("USAGE ")]
    assert len(usages) == len(cases) + len(texts), done.stderr[-3000:]
    # at first sight three documents stand as at home; later three tokens are repaired on each side of every one
    assert [u["repaired_tokens"] for u in usages] == [0, 18, 0, 18]
    assert all(u["reused_tokens"] > 0 for u in usages[1::2])
