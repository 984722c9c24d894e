"""Marks in text: where a prompt is cut, which ids its pieces get, and what is refused."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from sglang_blockreuse.blocks.compile import Compiler
from sglang_blockreuse.blocks.mark import (
    Fence,
    Piece,
    cut_at_fences,
    cut_at_separator,
    encode,
    fence_documents,
    text_parts,
)
from sglang_blockreuse.blocks.request import RequestError, parse_options
from sglang_blockreuse.blocks.split import Front, homes
from sglang_blockreuse.config import CONFIG_ENV, BlocksConfig, ConfigError
from sglang_blockreuse.settings import prepare_tokenizer
from sglang_blockreuse.types import Interval, Wait
from sglang_blockreuse.warm import Options, WarmError, read_documents, warm

SEP = "<sep>"
words = st.text(alphabet="ab <", max_size=6)


def blocks(pieces):
    return [p.text for p in pieces if p.is_block]


@given(words, st.lists(words, max_size=5), words)
def test_cutting_finds_what_was_joined(leading, documents, question):
    pieces = cut_at_separator(SEP.join([leading, *documents, question]), SEP)
    assert blocks(pieces) == [d for d in documents if d]
    assert not pieces[0].is_block
    assert not pieces[-1].is_block
    assert (pieces[0].text, pieces[-1].text) == (leading, question)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        pytest.param("plain", [("plain", False)], id="none"),
        pytest.param("a<sep>b", [("a", False), ("b", False)], id="once: nothing stands between two"),
        pytest.param("<sep>a<sep>", [("", False), ("a", True), ("", False)], id="at the ends"),
        pytest.param("a<sep><sep>b<sep>c", [("a", False), ("b", True), ("c", False)], id="twice in a row"),
        pytest.param("a<sep> <sep>c", [("a", False), (" ", True), ("c", False)], id="white space is text"),
    ],
)
def test_separators_in_odd_places(text, expected):
    assert [(p.text, p.is_block) for p in cut_at_separator(text, SEP)] == expected


@given(words, st.lists(st.tuples(words, words), max_size=5))
def test_fences_are_found_again_after_rendering(leading, rest):
    fence = Fence()
    text = leading + "".join(fence.around(block) + gap for block, gap in rest)
    pieces = cut_at_fences(text, fence)
    assert pieces is not None
    assert blocks(pieces) == [block for block, _ in rest]
    assert "".join(p.text for p in pieces) == leading + "".join(b + g for b, g in rest)


@pytest.mark.parametrize(
    "rendered",
    [
        pytest.param("{open}a", id="never closed"),
        pytest.param("a{close}", id="never opened"),
        pytest.param("{open}{open}a{close}", id="nested"),
        pytest.param("{open}a{close}{close}", id="closed twice"),
        pytest.param("\\ue000{nonce}\\ue001a", id="escaped"),
    ],
)
def test_a_template_that_breaks_the_fences_is_noticed(rendered):
    fence = Fence()
    assert (
        cut_at_fences(rendered.format(open=fence.opening, close=fence.closing, nonce=fence.nonce), fence)
        is None
    )


def test_fences_of_two_requests_differ():
    """Negative control: a client who copies a fence from elsewhere marks nothing."""
    one, other = Fence(), Fence()
    pieces = cut_at_fences(one.around("a"), other)
    assert pieces is not None
    assert blocks(pieces) == []


class TestEncoding:
    """A tokeniser of letters that puts 1 in front of a prompt and 2 behind it."""

    @staticmethod
    def plain(text):
        return [ord(c) for c in text]

    @classmethod
    def whole(cls, text):
        return [1, *cls.plain(text), 2]

    def test_special_tokens_stand_at_the_ends_of_the_prompt_only(self):
        marked = encode(
            cut_at_separator("s<sep>ab<sep>c<sep>q", SEP), with_specials=self.whole, plain=self.plain
        )
        assert marked.ids == self.whole("sabcq")
        assert marked.spans == [2, 4, 4, 5]

    def test_a_prompt_that_begins_with_a_block_keeps_its_special_tokens(self):
        marked = encode(cut_at_separator("<sep>ab<sep>", SEP), with_specials=self.whole, plain=self.plain)
        assert (marked.ids, marked.spans) == (self.whole("ab"), [1, 3])

    def test_a_piece_without_tokens_is_no_block(self):
        marked = encode(
            [Piece("a", False), Piece("zz", True)],
            with_specials=self.whole,
            plain=lambda t: self.plain(t.strip("z")),
        )
        assert (marked.ids, marked.spans) == (self.whole("a"), [])

    def test_nothing_but_separators_is_refused(self):
        with pytest.raises(RequestError, match="nothing but separators"):
            encode(cut_at_separator("<sep><sep>", SEP), with_specials=self.whole, plain=self.plain)

    def test_a_tokeniser_whose_special_tokens_change_the_text_is_refused(self):
        with pytest.raises(RequestError, match="cannot be cut"):
            encode([Piece("ab", False)], with_specials=lambda t: [1, 7, 7], plain=self.plain)


def test_a_document_has_the_same_ids_anywhere(model_path):
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def ids_of(text):
        marked = encode(
            cut_at_separator(text, SEP),
            with_specials=tokenizer.encode,
            plain=lambda t: tokenizer.encode(t, add_special_tokens=False),
        )
        return [marked.ids[a:b] for a, b in zip(marked.spans[::2], marked.spans[1::2], strict=True)]

    document, other = "standing water freez", "es the river\n"
    (alone,) = ids_of(f"Answer{SEP}{document}{SEP}Where?")
    assert ids_of(f"Words: under{SEP}{other}{SEP}{document}{SEP}{other}{SEP}it?") == [
        tokenizer.encode(other),
        alone,
        tokenizer.encode(other),
    ]
    # negative control: tokenised with its neighbours it has others
    joined = tokenizer.encode(f"Words: under{document}{other}")
    assert all(joined[i : i + len(alone)] != alone for i in range(len(joined)))


def part(text, kind="text"):
    return SimpleNamespace(type=kind, text=text)


def test_parts_are_texts_of_messages_with_at_least_two():
    image = SimpleNamespace(type="image_url")
    messages = [
        SimpleNamespace(role="system", content="plain"),
        SimpleNamespace(role="user", content=[part("only one"), image]),
        SimpleNamespace(role="user", content=[part("a"), image, part("b"), part("")]),
        SimpleNamespace(role="assistant", content=[part("c"), part("d")]),
    ]
    assert [p.text for p in text_parts(messages)] == ["a", "b"], "a continued answer is left alone"
    assert [p.text for p in text_parts([messages[3], messages[0]])] == ["c", "d"]


def test_documents_of_the_template_are_fenced_in_a_copy():
    fence = Fence()
    given = {"documents": ["a", {"title": "t", "text": "b"}, {"content": "c"}, {"url": "d"}], "other": 1}
    before = repr(given)
    marked = fence_documents(given, fence)
    assert marked == {
        "documents": [
            fence.around("a"),
            {"title": "t", "text": fence.around("b")},
            {"content": fence.around("c")},
            {"url": "d"},
        ],
        "other": 1,
    }
    assert repr(given) == before
    assert fence_documents({"documents": [{"url": "d"}]}, fence) is None
    assert fence_documents(None, fence) is None


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"blockreuse_parts": True}, "does not come from chat messages"),
        ({"blockreuse_parts": "yes"}, "must be true or false"),
        ({"blockreuse_mode": "compile"}, "marks no blocks"),
    ],
)
def test_marks_that_cannot_be_meant_are_refused(params, says):
    with pytest.raises(RequestError, match=says):
        parse_options(params, prompt_len=10, config=BlocksConfig())


def test_a_compile_request_compiles_the_block_that_a_prompt_has_exactly():
    from array import array

    tokens = array("q", range(30))
    spans = [Interval(5, 15), Interval(15, 30)]
    kept = homes(tokens, spans, front=Front(array("q", range(5))), min_block_tokens=4)
    everything = homes(tokens, spans, front=Front(array("q", range(5))), min_block_tokens=4, all_blocks=True)
    assert ([h.block for h in kept], [h.block for h in everything]) == ([1], [0, 1])


class TestStayingBehind:
    def jobs(self, compiler):
        from array import array

        tree = SimpleNamespace(lookup=lambda tokens, namespace: (0, None))
        wanted = homes(
            array("q", range(30)), [Interval(5, 30)], front=Front(array("q", (7,))), min_block_tokens=4
        )
        return compiler.stay_behind(compiler.jobs_for(tree, wanted, None)[0], "main")

    @pytest.mark.parametrize("end", ["prompt_computed", "ended"])
    def test_background_homes_run_when_the_prompt_is_computed_or_gone(self, end):
        compiler = Compiler()
        (job,) = self.jobs(compiler)
        wait, others = Wait(), Wait()
        compiler.wait(wait, job.waits_for)
        compiler.wait(others, [job.request_id])
        assert wait.num_open == 1
        getattr(compiler, end)("main")
        assert wait.num_open == 0
        assert others.num_open == 1, "others may wait for the home itself"

    def test_a_request_without_unseen_blocks_holds_nobody_back(self):
        compiler = Compiler()
        assert compiler.stay_behind([], "main") == []
        wait = Wait()
        compiler.wait(wait, ["main"])
        assert wait.num_open == 0


class TestCompileCommand:
    def options(self, *files, **more):
        return Options(url="http://127.0.0.1:9", files=files, **more)

    def test_a_file_is_a_document_and_separators_cut_it(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_bytes(b" one\r\n---two---")
        assert read_documents([file], None) == [("a.txt", " one\r\n---two---")]
        assert read_documents([file], "---") == [("a.txt[0]", " one\r\n"), ("a.txt[1]", "two")]

    @pytest.mark.parametrize(
        ("content", "says"),
        [(None, "cannot be read"), (b"", "holds no text"), (b"\xff\xfe", "not UTF-8")],
        ids=["missing", "empty", "binary"],
    )
    def test_files_that_hold_no_text_are_named(self, tmp_path, content, says):
        file = tmp_path / "document.txt"
        if content is not None:
            file.write_bytes(content)
        with pytest.raises(WarmError, match=rf"document\.txt.*{says}"):
            warm(self.options(file))

    def test_a_server_that_is_down_is_named(self, tmp_path):
        file = tmp_path / "a.txt"
        file.write_text("text")
        with pytest.raises(WarmError, match=r"127\.0\.0\.1:9 does not answer"):
            warm(self.options(file))

    def test_the_command_ends_with_status_1_and_no_traceback(self, tmp_path, capsys):
        from sglang_blockreuse.cli import main

        file = tmp_path / "a.txt"
        file.write_text("text")
        assert main(["compile", str(file), "--url", "http://127.0.0.1:9"]) == 1
        assert "does not answer" in capsys.readouterr().err


class TestStartUp:
    """Settings with which marks in text could not be read stop the server, before a model is loaded."""

    def prepare(self, tmp_path, monkeypatch, **settings):
        config = tmp_path / "config.json"
        config.write_text(json.dumps({"blocks": {"separator": SEP}}))
        monkeypatch.setenv(CONFIG_ENV, str(config))
        server = {
            "radix_cache_backend": "blockreuse",
            "skip_tokenizer_init": False,
            "tokenizer_worker_num": 1,
            "smg_grpc_mode": False,
            "grpc_mode": False,
        }
        prepare_tokenizer(SimpleNamespace(**{**server, **settings}))

    def test_without_a_tokeniser(self, tmp_path, monkeypatch):
        with pytest.raises(ConfigError, match=r"blocks\.separator.*--skip-tokenizer-init"):
            self.prepare(tmp_path, monkeypatch, skip_tokenizer_init=True)

    def test_with_the_server_in_rust(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SGLANG_RUST_SERVER", "1")
        with pytest.raises(ConfigError, match=r"blocks\.separator.*SGLANG_RUST_SERVER"):
            self.prepare(tmp_path, monkeypatch)

    @pytest.mark.parametrize("flag", ["smg_grpc_mode", "grpc_mode"])
    def test_with_a_gateway_that_tokenises(self, tmp_path, monkeypatch, flag):
        with pytest.raises(ConfigError, match=r"blocks\.separator.*--smg-grpc-mode"):
            self.prepare(tmp_path, monkeypatch, **{flag: True})

    def test_with_workers_that_run_another_application(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "elsewhere:app")
        with pytest.raises(ConfigError, match=r"elsewhere:app.*sglang_blockreuse\.http_app:app"):
            self.prepare(tmp_path, monkeypatch, tokenizer_worker_num=2)
