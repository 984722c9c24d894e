"""The retrieval benchmark sees on a real server that a plan reads too little; nightly, whether needles are lost."""

from __future__ import annotations

import itertools

import pytest
import retrieval
from plans import PLAN
from retrieval_cases import KINDS, cases_of, said
from servers import lease

pytestmark = pytest.mark.engine
NUM_CASES = 4


@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_that_reads_too_little_is_seen_to_answer_otherwise(kind, model_path):
    num_tokens = retrieval.token_counter(model_path)
    made = cases_of(kind, seed=0, num_tokens=num_tokens, low=500, high=700, per_context=2)
    with lease(plan=PLAN) as server:
        answers = [
            [said(retrieval.ask(server, case, arm)) for arm in ("dense", "dense", "plan")]
            for case in itertools.islice(made, NUM_CASES)
        ]
    assert all(first == again for first, again, _ in answers), "dense decode agrees with itself"
    assert sum(first != plan for first, _, plan in answers) > NUM_CASES / 2
