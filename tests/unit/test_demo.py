"""The demo: its documents and prompts, its comparison, its verdict, and its ways to fail."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse.cli import main
from sglang_blockreuse.demo import report
from sglang_blockreuse.demo.client import EndOfTurn, Position, Timed, usage_of
from sglang_blockreuse.demo.compare import Agreement, agreement, kl_divergence
from sglang_blockreuse.demo.documents import make_documents
from sglang_blockreuse.demo.measure import Pass
from sglang_blockreuse.demo.prompts import PromptMaker, measured_prompts, warm_up_prompts
from sglang_blockreuse.demo.run import NothingReused
from sglang_blockreuse.server_process import ServerFailed


def count_words(text):
    return len(text.split())


class TestDocuments:
    documents = make_documents(40, seed=3, num_tokens=count_words, low=300, high=330)

    def test_the_same_seed_makes_the_same_documents(self):
        assert make_documents(40, seed=3, num_tokens=count_words, low=300, high=330) == self.documents
        assert make_documents(40, seed=4, num_tokens=count_words, low=300, high=330) != self.documents

    def test_names_differ(self):
        assert len({document.title for document in self.documents}) == 40

    def test_lengths_are_in_range(self):
        assert all(300 <= count_words(document.text) <= 330 for document in self.documents)

    def test_every_answer_stands_in_its_document(self):
        for document in self.documents:
            for fact in document.facts:
                assert fact.answer in document.text
                assert "{" not in document.text + fact.question + fact.answer

    def test_no_sentence_is_said_twice(self):
        for document in self.documents:
            sentences = document.text.split(". ")
            assert len(set(sentences)) == len(sentences)

    def test_more_documents_than_names_are_refused(self):
        with pytest.raises(ValueError, match="num_documents is 1000, but there are names for 208"):
            make_documents(1000, seed=0, num_tokens=count_words)


@pytest.fixture(scope="module")
def tokenizer(model_path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model_path)


class TestPrompts:
    @pytest.fixture(scope="class")
    def made(self, tokenizer):
        documents = make_documents(6, seed=0, num_tokens=lambda text: len(tokenizer(text)["input_ids"]))
        maker = PromptMaker(tokenizer, documents)
        return documents, maker, measured_prompts(maker, documents, num_prompts=8, per_prompt=4, seed=0)

    def test_a_document_has_the_same_ids_wherever_it_stands(self, made, tokenizer):
        documents, _, prompts = made
        for prompt in prompts:
            spans = zip(prompt.spans[::2], prompt.spans[1::2], strict=True)
            for (start, end), index in zip(spans, prompt.documents, strict=True):
                assert list(prompt.input_ids[start:end]) == tokenizer(documents[index].text)["input_ids"]

    def test_prefix_spans_and_question_tile_the_prompt(self, made):
        _, maker, prompts = made
        for prompt in prompts:
            assert prompt.spans[0] == maker.prefix_len
            assert prompt.spans[1:-1:2] == prompt.spans[2::2]
            assert prompt.spans[-1] < len(prompt.input_ids)

    def test_it_is_the_model_s_own_chat_template(self, made, tokenizer):
        _, _, prompts = made
        text = tokenizer.decode(prompts[0].input_ids)
        assert text.startswith("<|im_start|>system\nYou are a helpful assistant.")
        assert text.endswith(f"Question: {prompts[0].question}<|im_end|>\n<|im_start|>assistant\n")

    def test_the_asked_document_is_in_the_prompt(self, made):
        documents, _, prompts = made
        for prompt in prompts:
            questions = {fact.question for index in prompt.documents for fact in documents[index].facts}
            assert prompt.question in questions

    @pytest.mark.parametrize("per_prompt", [1, 4, 6])
    def test_the_warm_up_shows_every_document(self, made, per_prompt):
        _, maker, _ = made
        shown = {index for p in warm_up_prompts(maker, 6, per_prompt=per_prompt) for index in p.documents}
        assert shown == set(range(6))


weights = st.lists(st.floats(0.01, 10), min_size=4, max_size=12)


def position(weights, keep):
    total = sum(weights)
    logprobs = {token: math.log(weight / total) for token, weight in enumerate(weights)}
    return Position({t: logprobs[t] for t in list(logprobs)[:keep]}, top=max(logprobs, key=logprobs.get))


class TestComparison:
    @given(weights)
    def test_a_distribution_is_at_distance_zero_from_itself(self, p):
        assert kl_divergence(position(p, 3), position(p, 3)) == pytest.approx(0, abs=1e-12)

    @given(weights, st.randoms())
    def test_lumping_the_rest_gives_a_lower_bound(self, p, random):
        q = random.sample(p, len(p))
        full = kl_divergence(position(p, len(p)), position(q, len(q)))
        assert 0 <= kl_divergence(position(p, 3), position(q, len(q))) <= full + 1e-9

    def test_a_token_without_a_probability_is_an_error(self):
        with pytest.raises(ValueError, match=r"no probability for 1 of 3 tokens, e\.g\. 2"):
            kl_divergence(position([1, 1, 1, 1], 3), position([1, 1, 1, 1], 2))

    def test_agreement_counts_positions(self):
        p, q = position([3, 1, 1, 1], 4), position([1, 3, 1, 1], 4)
        same = agreement([p, p], [p, q])
        assert (same.same_first_top, same.top1, same.num_positions, same.first_kl) == (True, 0.5, 2, 0.0)
        assert same.mean_kl > 0


def test_an_answer_ends_with_its_turn():
    end = EndOfTurn(2, "<|im_end|>")
    assert end.cut([5, 6, 2, 7, 2]) == (5, 6, 2)
    assert end.cut([5, 6]) == (5, 6)


@pytest.mark.parametrize("wrapped", [{"mode": "reuse"}, [{"mode": "reuse"}], [[], [{"mode": "reuse"}]]])
def test_usage_is_found_in_every_wrapping(wrapped):
    assert usage_of({"blockreuse": wrapped}) == {"mode": "reuse"}
    assert usage_of({}) is None


USAGE = {
    "prefix_tokens": 1,
    "reused_tokens": 5,
    "repaired_tokens": 1,
    "fresh_tokens": 1,
    "recompute_ratio": 0.1,
}


class TestVerdict:
    timed = Timed(ttft_ms=10.0, tpot_ms=1.0, answer_ids=(1,), answer="x", cached_tokens=1, usage=USAGE)
    row = report.Row(
        num_tokens=8,
        documents=(0,),
        question="?",
        expected="x",
        stock=replace(timed, ttft_ms=40.0, usage=None),
        ours=timed,
        agreement=Agreement(first_kl=0.0, mean_kl=0.0, same_first_top=True, top1=1.0, num_positions=1),
    )

    def test_reuse_is_no_failure(self):
        assert report.nothing_reused([self.row]) is None
        summary = report.summarise([self.row], Pass((self.timed,), (), ()), Pass((self.timed,), (), ()))
        assert summary["ttft_ratio_median"] == 4.0
        assert "ratio 4.0x" in report.summary_text(summary)

    def test_a_server_without_the_extension_is_a_failure(self):
        stock_only = replace(self.row, ours=replace(self.timed, usage=None))
        assert "reports no meta_info.blockreuse" in report.nothing_reused([stock_only])

    def test_nothing_reused_is_a_failure_with_the_reason(self):
        usage = {**USAGE, "reused_tokens": 0, "skipped_reason": "no_homes"}
        assert "no_homes" in report.nothing_reused([replace(self.row, ours=replace(self.timed, usage=usage))])

    def test_the_table_has_one_line_per_prompt_of_equal_width(self):
        lines = report.table([self.row, self.row]).splitlines()
        assert len(lines) == 3
        assert len({len(line) for line in lines}) == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NothingReused("no prompt reused a single token"), 1),
        (ServerFailed("the server ended"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_every_way_to_fail_has_its_exit_status(error, status, monkeypatch, tmp_path, capsys):
    def fail(options):
        raise error

    monkeypatch.setattr("sglang_blockreuse.demo.run.run", fail)
    assert main(["demo", "--out", str(tmp_path)]) == status
    assert str(error) in capsys.readouterr().err


def test_more_documents_per_prompt_than_there_are_is_a_usage_error(capsys):
    assert main(["demo", "--documents", "3", "--per-prompt", "4"]) == 2
    assert "--per-prompt 4 is more than --documents 3" in capsys.readouterr().err
