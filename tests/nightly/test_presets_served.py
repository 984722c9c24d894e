"""What `plan preset` writes, on a server: it starts, decodes under the plan, and answers as the evaluator computes."""

from __future__ import annotations

import random

import pytest
from prompts import ask, random_ids
from servers import lease
from tiny_models import TALKING_LAYERS, talking_model
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.preset_names import PRESETS, Shape, named

pytestmark = pytest.mark.engine
# what a scheme needs to show all of its roles in six layers
CHOICES = {
    "indexcache": {"full": (0, 3)},
    "lisa-dagger": {"full": (1, 4), "pool_size": 160},
    "misa": {"routed_heads": 2},
    "resmisa": {"routed_heads": 2},
    "csa2": {"full": (4,), "pool_size": 160},
    "hysparse": {"full": (1, 4)},
}
TWIN = "tests/unit/test_plan_preset_command.py"


@pytest.mark.nightly(twin=f"{TWIN}::test_decode_under_a_preset_is_what_the_law_selects")
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_answers_on_a_server_as_the_evaluator_computes(name):
    shape = Shape(
        num_layers=TALKING_LAYERS,
        final_k=96,
        trained=PRESETS[name].trained_for is not None,
        **CHOICES.get(name, {}),
    )
    plan = named(name, shape)
    bound = plan.bind(TALKING_LAYERS, None)
    prompt = random_ids(400, random.Random(name))
    with lease(plan=plan.to_yaml()) as server:
        answer = ask(server, prompt, new_tokens=12)
        num_sparse = server.new_counts().get("decode_rows_total sparse", 0)
    assert (num_sparse > 0) == bound.is_sparse
    tokens = answer["output_ids"]
    got = [value for value, *_ in answer["meta_info"]["output_token_logprobs"]][1:]
    case = ScoredCase(Llama(talking_model()), "served", prompt + tokens, len(tokens) - 1)

    def furthest_from(log_probs):
        expected = [float(log_probs[row, token]) for row, token in enumerate(tokens[1:])]
        return max(abs(a - b) for a, b in zip(got, expected, strict=True))

    assert furthest_from(case.log_probs(bound)[0]) <= FULL_PREFILL_LOGPROB
    assert furthest_from(case.dense) > 100 * FULL_PREFILL_LOGPROB, "the unchanged model says something else"
