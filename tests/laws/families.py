"""Families and rotary scalings on the real engine, each with random weights: what must be exact is.

`Families` is a test class but for its fixtures `name`, a key of SUPPORTED, and `layer`, one of `layers`. One server per
family serves its laws. With weights that let a single layer attend, the keys that matter depend on
token and position alone, so a block that is moved and not repaired must answer like a full prefill: the exact
test of the rotation in every layer, past the context that a scaled rope was made for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from prompts import Library, ask, distance, usage
from servers import lease
from tiny_models import NUM_LAYERS, ORIGINAL_CONTEXT, SUPPORTED, VOCAB, TinyModel
from tolerances import FULL_PREFILL_LOGPROB

CHUNK = 128  # tokens of one prefill step
IDS = range(10, VOCAB)
LIBRARY = Library(seed=3, doc_lens=(150, 130, 140, 120), ids=IDS)
HOME_ORDER, OTHER = (0, 1, 2, 3), (2, 1, 3, 0)


class Family:
    """A running server with several sets of weights to choose from."""

    def __init__(self, server, model: TinyModel, folder: Path):
        self.server, self.model, self._folder = server, model, folder

    def load(self, weights: str) -> None:
        answer = self.server.post("/update_weights_from_disk", model_path=str(self._folder / weights))
        assert answer["success"], answer

    def full_prefill(self, ids):
        self.server.flush_cache()
        answer = ask(self.server, ids, blockreuse_mode="off")
        self.server.flush_cache()
        return answer

    def know(self, **params) -> None:
        """Compile the library's documents behind its system prompt."""
        ids, spans = LIBRARY.prompt(HOME_ORDER)
        ask(self.server, ids, new_tokens=1, blockreuse_spans=spans, **params)


class Families:
    layers = tuple(range(NUM_LAYERS))

    @pytest.fixture(scope="class")
    def family(self, name, tmp_path_factory):
        folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
        model = SUPPORTED[name]
        model.write(folder / "contextual")
        for layer in {0, *self.layers}:
            model.write(folder / f"only_layer_{layer}", only_layer=layer)
        with lease("--skip-tokenizer-init", model=folder / "contextual") as server:
            yield Family(server, model, folder)

    @pytest.fixture(autouse=True)
    def empty_tree(self, family):
        family.server.flush_cache()

    def test_repairing_everything_equals_full_prefill(self, family):
        ids, spans = LIBRARY.prompt(OTHER)
        full = family.full_prefill(ids)
        family.know()
        answer = ask(family.server, ids, blockreuse_spans=spans, blockreuse_budget=1.0)
        assert usage(answer)["reused_tokens"] == 0
        assert answer["output_ids"] == full["output_ids"]
        assert distance(answer, full) <= FULL_PREFILL_LOGPROB

    def test_moving_without_repair_is_seen_to_differ(self, family):
        """Negative control: the documents' keys depend on context, and the comparison sees that."""
        ids, spans = LIBRARY.prompt(OTHER)
        full = family.full_prefill(ids)
        family.know()
        answer = ask(family.server, ids, blockreuse_spans=spans, blockreuse_tau=0)
        assert usage(answer)["reused_tokens"] > 300
        assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB

    def test_same_place_and_context_has_difference_zero(self, family):
        """System prompt, document and question are computed in forwards of the same shape by both requests."""
        library = Library(seed=2, system_len=CHUNK, doc_lens=(CHUNK,), ids=IDS)
        ids, spans = library.prompt((0,))
        computed = ask(family.server, ids)
        family.server.flush_cache()
        copied = ask(
            family.server,
            ids,
            testing_max_prefix=spans[0],
            testing_all_homes=True,
            blockreuse_spans=spans,
            blockreuse_tau=0,
        )
        assert usage(copied)["reused_tokens"] == CHUNK
        assert copied["output_ids"] == computed["output_ids"]
        assert distance(copied, computed) == 0.0

    def test_moved_keys_are_those_that_the_model_computes_there(self, family, layer):
        ids, spans = LIBRARY.prompt(OTHER)
        assert spans[-2] > ORIGINAL_CONTEXT, "a document moves past the context of the scaled ropes"
        family.load(f"only_layer_{layer}")
        try:
            full = family.full_prefill(ids)
            family.know()
            moved = ask(family.server, ids, blockreuse_spans=spans, blockreuse_tau=0)
            assert usage(moved)["reused_tokens"] > 300
            assert distance(moved, full) <= FULL_PREFILL_LOGPROB
            family.server.flush_cache()
            family.know()
            base = family.model.wrong_rope_base
            wrong = ask(
                family.server, ids, blockreuse_spans=spans, blockreuse_tau=0, testing_wrong_rope_base=base
            )
            assert usage(wrong)["reused_tokens"] > 300
            assert distance(wrong, full) > 100 * FULL_PREFILL_LOGPROB, (
                "a rotation without the scaling is seen"
            )
        finally:
            family.load("contextual")

    def test_other_weights_never_see_the_homes_of_the_old_ones(self, family):
        ids, spans = LIBRARY.prompt(OTHER)
        family.know()
        family.load("only_layer_0")
        try:
            answer = ask(family.server, ids, blockreuse_spans=spans, blockreuse_tau=0)
            assert usage(answer)["reused_tokens"] > 300, "of homes that the new weights computed"
            assert distance(answer, family.full_prefill(ids)) <= FULL_PREFILL_LOGPROB
        finally:
            family.load("contextual")
