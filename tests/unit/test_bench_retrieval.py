"""The retrieval benchmark: its cases and its scoring."""

from __future__ import annotations

import itertools

import pytest
import retrieval
from retrieval_cases import KINDS, Case, cases_of, is_right, said

LOW, HIGH, PER_CONTEXT = 500, 700, 3


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
