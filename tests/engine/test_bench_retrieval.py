"""The retrieval benchmark: its cases, its scoring, and that it sees a plan on a real server which reads too little."""

from __future__ import annotations

import argparse
import itertools

import pytest
import retrieval
from records import Log
from retrieval_cases import KINDS, Case, cases_of, is_right, said
from servers import extended_server

from sglang_blockreuse.layers.calibration.pattern import pattern_of, plan_of
from sglang_blockreuse.layers.plan import Selection
from sglang_blockreuse.layers.plan_loader import load_plan

LOW, HIGH, PER_CONTEXT = 500, 700, 3
NUM_LAYERS = 30


@pytest.fixture(scope="module")
def num_tokens(model_path):
    return retrieval.token_counter(model_path)


def draw(kind, num_tokens, num, *, seed=0):
    made = cases_of(kind, seed=seed, num_tokens=num_tokens, low=LOW, high=HIGH, per_context=PER_CONTEXT)
    return list(itertools.islice(made, num))


class TestCases:
    @pytest.mark.parametrize("kind", KINDS)
    def test_the_answer_stands_once_and_the_prompt_ends_before_it(self, kind, num_tokens):
        for case in draw(kind, num_tokens, 6):
            assert case.prompt.count(case.answer) == 1
            question = case.prompt.rsplit("\n", 1)[1]
            assert f"{question} {case.answer}" in case.prompt
            assert case.prompt.index(case.answer) < case.prompt.rindex(question)

    @pytest.mark.parametrize("kind", KINDS)
    def test_contexts_have_the_length_that_is_asked_for(self, kind, num_tokens):
        for case in draw(kind, num_tokens, 6):
            assert LOW - 60 <= num_tokens(case.prompt) <= HIGH + 60

    @pytest.mark.parametrize("kind", KINDS)
    def test_cases_share_contexts_and_a_seed_decides_them(self, kind, num_tokens):
        cases = draw(kind, num_tokens, 6)
        assert [case.context for case in cases] == [0, 0, 0, 1, 1, 1]
        assert len({case.answer for case in cases}) == 6
        assert cases == draw(kind, num_tokens, 6)
        assert cases[0].prompt != draw(kind, num_tokens, 1, seed=1)[0].prompt

    def test_an_unknown_kind_is_refused(self, num_tokens):
        with pytest.raises(ValueError, match="kind 'poem' is unknown"):
            draw("poem", num_tokens, 1)


class TestScoring:
    CASE = Case("needle", 0, 0.5, "The code is", "12345678")

    @pytest.mark.parametrize(
        ("text", "right"),
        [
            (" 12345678.", True),
            (" 12345678\nmore", True),
            (" 12345678. The gate", True),
            (" 12345679", False),
            (" 123456789", False),
            ("", False),
            ("The code 12345678", False),
        ],
    )
    def test_right_is_the_whole_number_at_the_start(self, text, right):
        assert is_right(self.CASE, text) is right

    def test_answers_are_compared_without_the_chatter_behind_them(self):
        assert said(" 12. The gate") == said("12\nx") == "12"
        assert said("12") != said("13")
        assert said("12 and more") != said("12")

    def test_the_table_counts_what_dense_decode_answers(self):
        head = {
            "record": "retrieval",
            "options": {"plan": "p", "lengths": (1, 2), "per_context": 1},
            "environment": {"packages": {}, "time": "t", "commit": "c"},
        }
        right = {"record": "case", "kind": "needle", "answer": "1", "right": True}
        records = [
            head,
            {**right, "plan": "1", "same": True},
            {**right, "plan": "2", "same": False},
            {"record": "case", "kind": "pairs", "answer": "1", "right": False},
        ]
        text = retrieval.table(records)
        assert "needle | 2 | 2 | 1 of 2 (50%) | 1 of 2 (50%)" in text
        assert "pairs | 1 | 0 | 0 of 0 (0%) | 0 of 0 (0%)" in text
        assert "all | 3 | 2 | 1 of 2 (50%) | 1 of 2 (50%)" in text


# the shipped pattern, for contexts that a test can afford
GOOD = (None, Selection(final_k=196, pool_size=324, min_seq_len=256))
# all layers read what the first one chose: sinks, a window and one position
BLIND = ("F" + "R" * (NUM_LAYERS - 1), Selection(final_k=37, sink=4, window=32, min_seq_len=256))


@pytest.mark.engine
@pytest.mark.parametrize(
    ("plan_words", "least", "most"), [(GOOD, 0.8, 1.0), (BLIND, 0.0, 0.4)], ids=["good", "blind"]
)
def test_a_plan_that_reads_too_little_is_seen_to_lose_the_needles(
    plan_words, least, most, model_path, num_tokens, tmp_path
):
    pattern, selection = plan_words
    pattern = pattern or pattern_of(load_plan("smollm2-135m-three-role").bind(NUM_LAYERS, None))
    plan = tmp_path / "plan.yaml"
    plan.write_text(plan_of(pattern, selection, name="test").to_yaml())
    log = Log(tmp_path / "retrieval.jsonl")
    flags = ("--max-total-tokens", "4000", "--layer-plan", str(plan))
    with extended_server(model_path, *flags, log=tmp_path / "server.log") as server:
        for kind in KINDS:
            retrieval.measure(server, draw(kind, num_tokens, 9), argparse.Namespace(cases=5), log)
    same = [record["same"] for record in log.of(right=True)]
    assert len(same) >= 5, "dense decode answers some, else this says nothing"
    assert least <= sum(same) / len(same) <= most
