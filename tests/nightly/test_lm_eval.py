"""`bench tasks`: lm-eval asks the real server, exactly and with reuse, from our own rows and without a hub."""

from __future__ import annotations

import json

import pytest
import tasks
from servers import lease

pytestmark = pytest.mark.engine
FLAGS = ("--separator", "<doc>", "--requests", "3", "--per-prompt", "3", "--documents", "6")


@pytest.mark.nightly(
    twin="tests/engine/test_bench_tasks_rows.py::test_rows_are_reused_where_their_marks_arrive"
)
class TestOnTheServer:
    @pytest.fixture(scope="class")
    def server(self):
        pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
        with lease(model="smollm2", blocks={"separator": "<doc>"}) as running:
            yield running

    def test_both_arms_answer_every_prompt(self, server, tmp_path, capsys):
        assert tasks.main(["--out", str(tmp_path), "--url", server.url, *FLAGS]) == 0
        records = [json.loads(line) for line in (tmp_path / "tasks.jsonl").read_text().splitlines()]
        exact, seam = [record for record in records if record["record"] == "score"]
        assert (exact["arm"], exact["reused_share"], len(exact["values"])) == ("exact", 0.0, 3)
        assert (seam["arm"], len(seam["values"])) == ("seam", 3)
        assert seam["reused_share"] > 0.2
        assert "| blockreuse_facts | seam |" in capsys.readouterr().out

    def test_marks_that_do_not_arrive_turn_it_red(self, server, tmp_path, capsys):
        words = ["--out", str(tmp_path), "--url", server.url, *FLAGS, "--separator", "<other>"]
        assert tasks.main(words) == 1
        assert "**none: the server reused nothing**" in capsys.readouterr().out
