"""`bench tasks`: its rows, its scores, its table."""

from __future__ import annotations

import importlib.util
import re

import pytest
import tasks
from lm_eval_tasks.facts import process_results

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
