"""Moved blocks where every layer reads layer 0's KV (`kv_from: 0`): an exact law on the real server.

Layer 0's keys and values depend on token and position alone, so under such a plan a block that is moved and not
repaired must answer like a full prefill, in every layer: one rotation of one buffer, neither none nor two. The model
is a small one with random weights: one that was trained without sharing loses float32's last digits this way.
"""

from __future__ import annotations

import pytest
from prompts import Library, ask, distance, know, usage
from servers import lease
from tiny_models import NUM_LAYERS, SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
PLAN = f"""
version: 1
name: one
layers:
  - {{layers: 0, role: dense}}
  - {{layers: 1-{NUM_LAYERS - 1}, role: dense, kv_from: 0}}
"""
LIBRARY = Library(seed=7, doc_lens=(130,) * 4, ids=range(10, VOCAB))
HOME_ORDER, OTHER = (0, 1, 2, 3), (2, 0, 3, 1)


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    model = SUPPORTED["qwen2 yarn"].write(tmp_path_factory.mktemp("moves"))
    with lease("--skip-tokenizer-init", model=model, plan=PLAN) as running:
        yield running


def moved(server, **custom_params):
    """The answer after moved, unrepaired blocks, and that of a full prefill; leaves the tree empty."""
    ids, spans = LIBRARY.prompt(OTHER)
    server.flush_cache()
    full = ask(server, ids, blockreuse_mode="off")
    server.flush_cache()
    know(server, LIBRARY, HOME_ORDER)
    answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0, **custom_params)
    assert usage(answer)["reused_tokens"] > 250
    assert usage(answer)["repaired_tokens"] == 0
    return answer, full


def test_blocks_that_moved_equal_a_full_prefill(server):
    answer, full = moved(server)
    assert answer["output_ids"] == full["output_ids"]
    assert distance(answer, full) <= FULL_PREFILL_LOGPROB


@pytest.mark.parametrize("times", [0, 2])
def test_no_rotation_and_a_second_one_are_seen_to_differ(server, times):
    answer, full = moved(server, testing_rotations=times)
    assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB


def test_keys_of_other_blocks_are_seen_to_differ(server):
    answer, full = moved(server, testing_swap_homes=True)
    assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB
