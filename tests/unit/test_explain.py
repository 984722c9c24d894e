"""Where each token of a prompt came from: pieces that tile it, and how they are shown."""

from __future__ import annotations

import json

import pytest

from sglang_blockreuse.blocks.explain import NO_BLOCK, explain
from sglang_blockreuse.blocks.plan import build_plan
from sglang_blockreuse.blocks.request import RequestError, parse_options
from sglang_blockreuse.commands.explain_request import show
from sglang_blockreuse.config import POLICIES, BlocksConfig
from sglang_blockreuse.explained import WHY, Explained, ExplainError, Piece, page, read_body
from sglang_blockreuse.types import BlockOptions, Interval, LocalSegment, Usage

SPANS = (Interval(20, 70), Interval(70, 120), Interval(130, 180))
OPTIONS = BlockOptions("reuse", SPANS, "seam", None, 0.1)


def plan_of(start=20, end=200, spans=SPANS[1:]):
    segments = [LocalSegment(span, 5, SPANS.index(span), span.start) for span in spans]
    return build_plan(segments, start=start, end=end, options=OPTIONS)


@pytest.mark.parametrize("prompt_len", [200, 190])
def test_pieces_tile_the_prompt_and_add_up_to_the_counts(prompt_len):
    plan = plan_of()
    found = explain(plan, SPANS, prefix_len=20, prompt_len=prompt_len)
    assert [start for start, *_ in found] == [0, *(end for _, end, *_ in found[:-1])]
    assert found[-1][1] == prompt_len
    counts = {kind: sum(e - s for s, e, k, _ in found if k == kind) for kind in ("reused", "repaired")}
    assert counts == {"reused": plan.num_reused, "repaired": plan.num_repaired}
    assert counts["repaired"] > 0


def test_every_piece_lies_in_one_block_or_outside_of_all():
    for start, end, kind, block in explain(plan_of(), SPANS, prefix_len=20, prompt_len=200):
        if block == NO_BLOCK:
            assert not any(span.start < end and start < span.end for span in SPANS)
        else:
            assert SPANS[block].start <= start < end <= SPANS[block].end
        # the first block had no home: nothing of it is called repaired
        assert (kind in ("reused", "repaired")) == (block in (1, 2))


def test_without_a_plan_all_behind_the_prefix_is_fresh():
    found = explain(None, SPANS, prefix_len=70, prompt_len=200)
    assert {(kind, block) for _, end, kind, block in found if end <= 70} == {("prefix", -1), ("prefix", 0)}
    assert {kind for start, _, kind, _ in found if start >= 70} == {"fresh"}


def test_pieces_are_told_to_those_who_ask():
    assert "pieces" not in Usage().as_dict()
    assert Usage(pieces=[[0, 1, "fresh", -1]]).as_dict()["pieces"]
    assert not parse_options({}, prompt_len=9, config=BlocksConfig()).explain
    with pytest.raises(RequestError, match=r"blockreuse_explain is 'yes'.*true or false"):
        parse_options({"blockreuse_explain": "yes"}, prompt_len=9, config=BlocksConfig())


def explained(skipped=None):
    usage = {"policy": "query", "skipped_reason": skipped}
    usage |= {"prefix_tokens": 2, "reused_tokens": 3, "repaired_tokens": 1, "fresh_tokens": 1}
    pieces = (
        Piece(0, 2, "prefix", -1, "Read: "),
        Piece(2, 5, "reused", 0, "a <b> & "),
        Piece(5, 6, "repaired", 0, "bridge"),
        Piece(6, 7, "fresh", -1, "?"),
    )
    return Explained(usage, pieces)


def test_every_policy_has_a_reason_in_words():
    assert set(WHY) == set(POLICIES)


def test_the_summary_says_why():
    assert explained().summary() == f"2 prefix, 3 reused, 1 repaired, 1 fresh tokens; {WHY['query']}"
    assert "nothing reused: not_cached" in explained("not_cached").summary()


def test_documents_are_told_apart():
    titles = [title for title, _ in explained().documents()]
    assert titles[1] == "document 1: 4 tokens, 3 reused, 1 repaired"
    assert titles[0].startswith("outside of documents: 2 tokens")


def test_the_terminal_shows_the_text_as_it_is(capsys):
    show(explained())
    shown = capsys.readouterr().out
    assert "a <b> & bridge" in shown
    assert "[document 1: 4 tokens, 3 reused, 1 repaired]" in shown


def test_the_page_is_no_place_for_markup_of_a_document():
    text = page(explained())
    assert "a &lt;b&gt; &amp; " in text
    assert "<b>" not in text
    assert "title='repaired 5–5'" in text


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "no JSON"), ("[1]", "body of a request"), ('{"model": "x"}', "body of a request")],
)
def test_a_file_that_holds_no_request_is_told(tmp_path, content, says):
    path = tmp_path / "request.json"
    path.write_text(content)
    with pytest.raises(ExplainError, match=says):
        read_body(path)
    with pytest.raises(ExplainError, match="cannot be read"):
        read_body(tmp_path / "nowhere.json")


def test_a_request_is_read_as_it_is(tmp_path):
    path = tmp_path / "request.json"
    path.write_text(json.dumps({"text": "hello", "sampling_params": {"temperature": 0}}))
    assert read_body(path) == {"text": "hello", "sampling_params": {"temperature": 0}}
