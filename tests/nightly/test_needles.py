"""The retrieval benchmark sees that a plan which reads too little loses needles, and that a good one does not."""

from __future__ import annotations

import argparse
import itertools

import pytest
import retrieval
from records import Log
from retrieval_cases import KINDS, cases_of
from servers import lease

from sglang_blockreuse.layers.calibration.pattern import pattern_of, plan_of
from sglang_blockreuse.layers.plan import Selection
from sglang_blockreuse.layers.plan_loader import load_plan

pytestmark = pytest.mark.engine
NUM_LAYERS = 30

# the shipped pattern, for contexts that a test can afford
GOOD = (None, Selection(final_k=196, pool_size=324, min_seq_len=256))
# all layers read what the first one chose: sinks, a window and one position
BLIND = ("F" + "R" * (NUM_LAYERS - 1), Selection(final_k=37, sink=4, window=32, min_seq_len=256))


@pytest.mark.nightly(
    twin="tests/engine/test_bench_retrieval_run.py::test_a_plan_that_reads_too_little_is_seen_to_answer_otherwise"
)
@pytest.mark.parametrize(
    ("plan_words", "least", "most"), [(GOOD, 0.8, 1.0), (BLIND, 0.0, 0.4)], ids=["good", "blind"]
)
def test_a_plan_that_reads_too_little_is_seen_to_lose_the_needles(
    plan_words, least, most, model_path, tmp_path
):
    pattern, selection = plan_words
    pattern = pattern or pattern_of(load_plan("smollm2-135m-three-role").bind(NUM_LAYERS, None))
    log = Log(tmp_path / "retrieval.jsonl")
    num_tokens = retrieval.token_counter(model_path)
    with lease(
        "--dtype", "bfloat16", model="smollm2", plan=plan_of(pattern, selection, name="test").to_yaml()
    ) as server:
        for kind in KINDS:
            made = cases_of(kind, seed=0, num_tokens=num_tokens, low=500, high=700, per_context=3)
            retrieval.measure(server, itertools.islice(made, 9), argparse.Namespace(cases=5), log)
    same = [record["same"] for record in log.of(right=True)]
    assert len(same) >= 5, "dense decode answers some, else this says nothing"
    assert least <= sum(same) / len(same) <= most
