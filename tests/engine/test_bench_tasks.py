"""`bench tasks`: lm-eval asks the real server, exactly and with reuse, from our own rows and without a hub."""

from __future__ import annotations

import importlib.util
import json
import re

import pytest
import tasks
from lm_eval_tasks.facts import process_results
from servers import extended_server

FLAGS = ("--separator", "<doc>", "--requests", "3", "--per-prompt", "3", "--documents", "6")


def options(tmp_path, *words):
    return tasks.parse(["--out", str(tmp_path), *FLAGS, *words])


def score(arm, values, share=0.5, problem=None):
    return tasks.Score(arm, "t", "contains", values, share, problem)


RUN = {
    "environment": {
        "hardware": {"cpu": "x", "cores": 2, "gpu": None},
        "packages": {},
        "commit": "c",
        "time": "t",
    }
}
RUN["options"] = {"blocks": []}


def test_an_answer_counts_if_it_holds_the_fact():
    assert process_results({"answer": "Ada Moss"}, ["it was ADA MOSS, I think"]) == {"contains": 1.0}
    assert process_results({"answer": "Ada Moss"}, ["it was Ada"]) == {"contains": 0.0}


def test_rows_hold_the_answer_in_one_of_their_documents(tmp_path):
    rows = list(tasks.facts(options(tmp_path)))
    assert len(rows) == 3
    for row in rows:
        _, *documents, question = row["prompt"].split("<doc>")
        assert len(documents) == 3
        assert any(row["answer"] in document for document in documents)
        assert question.endswith("\nAnswer:")
    assert rows == list(tasks.facts(options(tmp_path)))
    assert rows != list(tasks.facts(options(tmp_path, "--seed", "1")))


def test_the_table_pairs_prompts_and_gives_no_score_where_nothing_was_reused():
    scores = [score("exact", [1.0, 0.0, 1.0, 1.0]), score("seam", [1.0, 0.0, 0.0, 1.0])]
    shown = tasks.table(scores, RUN)
    assert "| t | exact | 75.0 % contains |  | 50 % |" in shown
    assert re.search(r"\| t \| seam \| 50.0 % contains \| -25.0 \[-75.0, \+0.0\] \| 50 % \|", shown)
    silent = score("seam", [1.0] * 4, share=0.0, problem="the server reused nothing")
    assert "| t | seam | **none: the server reused nothing** |  | 0 % |" in tasks.table(
        [scores[0], silent], RUN
    )


def test_without_lm_eval_it_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"lm-eval\[api\]"):
        tasks.main(["--out", str(tmp_path)])


@pytest.mark.engine
class TestOnTheServer:
    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        pytest.importorskip("lm_eval", reason="pip install 'lm-eval[api]'")
        folder = tmp_path_factory.mktemp("tasks")
        config = folder / "blockreuse.yaml"
        config.write_text("blocks: {separator: <doc>}\n")
        flags = ("--blockreuse-config", str(config), "--max-total-tokens", "8000")
        with extended_server(model_path, *flags, log=folder / "server.log") as running:
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
