"""The benchmarks' prompts: deterministic by their seed, and drawn by the laws that their options name."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from dataclasses import replace

import pytest
from contexts import CATEGORIES, MAX_BLOCKS, MAX_PROMPT_TOKENS, MIN_BLOCKS, make_contexts
from documents import (
    LENGTH_SLACK,
    Composer,
    Law,
    Question,
    Source,
    draw,
    made_source,
    popularity,
    read_source,
    requests_of,
    warm_up_prompts,
)

LAW = Law(num_requests=60, num_documents=20, per_prompt=3, seed=5)


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


@pytest.fixture(scope="module")
def num_tokens(tokenizer):
    return lambda text: len(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def source(num_tokens):
    return made_source(LAW, num_tokens)


@pytest.fixture(scope="module")
def composer(tokenizer, source):
    return Composer(tokenizer, source)


class TestLaws:
    def test_popularity_falls_with_the_rank_by_the_exponent(self):
        weights = popularity(50, 1.2)
        assert sum(weights) == pytest.approx(1)
        for rank in (2, 5, 50):
            assert weights[0] / weights[rank - 1] == pytest.approx(rank**1.2)
        assert set(popularity(4, 0.0)) == {0.25}

    def test_draws_are_different_and_follow_the_weights(self):
        import random

        rng = random.Random(0)
        weights = popularity(10, 1.0)
        firsts = Counter(draw(rng, weights, 4)[0] for _ in range(20_000))
        for index, weight in enumerate(weights):
            # five standard errors of a binomial share
            assert abs(firsts[index] / 20_000 - weight) < 5 * (weight * (1 - weight) / 20_000) ** 0.5
        assert all(len(set(draw(rng, weights, 10))) == 10 for _ in range(50))

    def test_lengths_fill_their_range(self, source, num_tokens):
        lengths = [num_tokens(text) for text in source.documents]
        assert all(LAW.min_tokens - LENGTH_SLACK <= n <= LAW.max_tokens for n in lengths)
        assert max(lengths) - min(lengths) > (LAW.max_tokens - LAW.min_tokens) / 2

    def test_the_same_seed_makes_the_same_requests_and_another_one_others(self, source, composer):
        assert requests_of(LAW, source, composer) == requests_of(LAW, source, composer)
        assert requests_of(LAW, source, composer) != requests_of(replace(LAW, seed=6), source, composer)

    @pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
    def test_the_share_of_unmarked_requests(self, source, composer, share):
        made = requests_of(replace(LAW, unmarked=share, num_requests=300), source, composer)
        found = sum(not request.marked for request in made) / 300
        assert abs(found - share) <= 5 * (share * (1 - share) / 300) ** 0.5

    def test_order_is_shuffled_or_kept(self, source, composer):
        kept = requests_of(replace(LAW, shuffle=False), source, composer)
        assert all(list(r.prompt.documents) == sorted(r.prompt.documents) for r in kept)
        shuffled = requests_of(LAW, source, composer)
        assert not all(list(r.prompt.documents) == sorted(r.prompt.documents) for r in shuffled)

    def test_unseen_traffic_shows_no_document_twice(self, source, composer):
        law = replace(LAW, unseen=True, num_requests=6)
        shown = [d for r in requests_of(law, source, composer) for d in r.prompt.documents]
        assert len(shown) == len(set(shown)) == 18
        assert warm_up_prompts(law, source, composer) == []

    def test_the_warm_up_shows_every_document_once(self, source, composer):
        shown = [d for prompt in warm_up_prompts(LAW, source, composer) for d in prompt.documents]
        assert sorted(shown) == list(range(20))

    def test_turns_extend_the_prompt_before_them(self, source, composer):
        made = requests_of(replace(LAW, turns=3, num_requests=6), source, composer)
        assert [r.turn for r in made] == [0, 1, 2] * 2
        for earlier, later in itertools.pairwise(made[:3]):
            assert later.prompt.input_ids[: len(earlier.prompt.input_ids)] == earlier.prompt.input_ids
            assert later.prompt.spans[: len(earlier.prompt.spans)] == earlier.prompt.spans
            assert len(later.prompt.documents) == len(earlier.prompt.documents) + 1

    @pytest.mark.parametrize(
        ("name", "value"),
        [("per_prompt", 21), ("zipf", -1.0), ("unmarked", 1.5), ("turns", 0), ("min_tokens", 500)],
    )
    def test_a_law_that_cannot_be_is_refused_by_name(self, name, value):
        with pytest.raises(ValueError, match=f"{name} is {value}, but it must be"):
            replace(LAW, **{name: value})

    def test_too_few_documents_are_refused(self, source, composer):
        with pytest.raises(ValueError, match="the source has 20 documents, but these requests need 180"):
            requests_of(replace(LAW, unseen=True), source, composer)


class TestSpans:
    def test_a_document_has_the_same_ids_wherever_it_stands(self, source, composer, tokenizer):
        for request in requests_of(LAW, source, composer):
            spans = zip(request.prompt.spans[::2], request.prompt.spans[1::2], strict=True)
            for (start, end), document in zip(spans, request.prompt.documents, strict=True):
                assert list(request.prompt.input_ids[start:end]) == composer.ids(source.documents[document])

    def test_the_asked_document_is_in_the_prompt(self, source, composer):
        for request in requests_of(LAW, source, composer):
            asked = {q.text for d in request.prompt.documents for q in source.about(d)}
            assert request.prompt.question in asked


class TestOwnDocuments:
    def write(self, path, *lines):
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
        return path

    def test_documents_and_questions_are_read_in_any_order(self, tmp_path):
        path = self.write(
            tmp_path / "own.jsonl",
            {"question": "Who?", "documents": ["b"], "answer": "Ada"},
            {"id": "a", "text": "First."},
            {"id": "b", "text": "Second."},
        )
        assert read_source(path) == Source(("First.", "Second."), (Question("Who?", "Ada", (1,)),))

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{", r"own.jsonl:2: not JSON"),
            ({"title": "x"}, r'own.jsonl:2: a line is \{"id", "text"\}'),
            (
                {"question": "?", "documents": ["z"]},
                r"own.jsonl:2: documents: 'z' is no document of this file",
            ),
        ],
        ids=["no JSON", "neither kind", "unknown document"],
    )
    def test_a_bad_line_is_named(self, tmp_path, line, message):
        path = self.write(tmp_path / "own.jsonl", {"id": "a", "text": "First."}, line)
        with pytest.raises(ValueError, match=message):
            read_source(path)

    def test_a_question_brings_the_documents_it_needs(self, tokenizer):
        documents = tuple(f"Document {i}." for i in range(6))
        source = Source(documents, (Question("Both?", "", (0, 5)),))
        law = Law(num_requests=40, num_documents=6, per_prompt=3)
        for request in requests_of(law, source, Composer(tokenizer, source)):
            assert {0, 5} <= set(request.prompt.documents)
            assert len(request.prompt.documents) == 3


class TestContexts:
    @pytest.fixture(scope="class")
    def made(self, tokenizer):
        return make_contexts(tokenizer, split="held-out", seed=0, per_category=4)

    def test_the_same_seed_makes_the_same_contexts(self, tokenizer, made):
        assert make_contexts(tokenizer, split="held-out", seed=0, per_category=4) == made

    def test_the_suite_has_its_size(self, made):
        assert Counter(context.category for context in made) == dict.fromkeys(CATEGORIES, 4)
        for context in made:
            assert MIN_BLOCKS <= len(context.prompt.spans) // 2 <= MAX_BLOCKS
            assert 800 <= len(context.prompt.input_ids) <= MAX_PROMPT_TOKENS
            starts, ends = context.prompt.spans[::2], context.prompt.spans[1::2]
            assert starts[0] > 0
            assert starts[1:] == ends[:-1]
            assert ends[-1] < len(context.prompt.input_ids)

    def test_calibration_and_held_out_share_no_block(self, tokenizer, made):
        def blocks(contexts):
            return {
                context.prompt.input_ids[start:end]
                for context in contexts
                for start, end in zip(context.prompt.spans[::2], context.prompt.spans[1::2], strict=True)
            }

        other = make_contexts(tokenizer, split="calibration", seed=0, per_category=4)
        assert blocks(made) & blocks(other) == set()

    def test_a_context_and_its_library_share_the_leading_text_and_nothing_that_is_asked_for(
        self, tokenizer, made
    ):
        for context in made:
            own, others = context.prompt, context.library
            start = own.spans[0]
            assert others.spans[0] == start
            assert others.input_ids[:start] == own.input_ids[:start]
            assert len(others.spans) // 2 == MIN_BLOCKS
            texts = [tokenizer.decode(p.input_ids[start : p.spans[-1]]) for p in (own, others)]
            # the line of which the answer is a part stands in the context alone
            asked = [line for line in texts[0].splitlines() if context.prompt.answer in line]
            assert not any(line in texts[1] for line in asked if context.prompt.answer)

    def test_the_value_stands_in_the_blocks_and_not_in_the_question(self, tokenizer, made):
        for context in made:
            if not context.reference_ids:
                assert context.category == "L"
                continue
            end = context.prompt.spans[-1]
            value = tokenizer.decode(context.reference_ids).strip()
            assert value == context.prompt.answer
            assert value in tokenizer.decode(context.prompt.input_ids[:end])
            assert value not in tokenizer.decode(context.prompt.input_ids[end:])
