"""Marks on the real server: separators, chat parts, template documents, on every endpoint that takes text."""

from __future__ import annotations

import json

import openai
import pytest
import requests
from looks import counts
from marked import DOCS, GREEDY, QUESTION, SEP, generate, joined, prompt_ids, start, with_separators
from prompts import ask, usage
from transformers import AutoTokenizer

from sglang_blockreuse.cli import main
from sglang_blockreuse.explained import explain

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


class TestText:
    @pytest.fixture(scope="class")
    def server(self):
        with start({"separator": SEP}) as running:
            yield running

    @pytest.fixture
    def client(self, server):
        return openai.OpenAI(base_url=server.url + "/v1", api_key="none")

    def chat(self, client, messages, **custom_params):
        extra = {
            "custom_params": custom_params or None,
            "return_meta_info": True,
            "return_prompt_token_ids": True,
        }
        if "chat_template_kwargs" in custom_params:
            extra["chat_template_kwargs"] = custom_params.pop("chat_template_kwargs")
        answer = client.chat.completions.create(
            model="small", messages=messages, max_tokens=2, temperature=0, extra_body=extra
        )
        choice = answer.choices[0]
        return choice.meta_info["blockreuse"][0], prompt_ids(answer)

    def test_documents_have_their_own_ids_and_are_reused_anywhere(self, server, tokenizer):
        first = generate(server, with_separators((0, 1, 2)))
        second = generate(server, with_separators((2, 0, 1)))
        pieces = ["Answer from the documents.\n", *(DOCS[i] for i in (2, 0, 1)), QUESTION]
        ids = [tokenizer.encode(piece) for piece in pieces]
        assert second["prompt_token_ids"] == joined(ids)
        assert usage(first)["compiled_tokens"] == len(ids[1]) + len(ids[3])
        found = usage(second)
        # document 2 stands behind the leading text, where its home is an exact prefix
        assert found["prefix_tokens"] >= len(ids[0]) + len(ids[1]) - 3
        assert found["reused_tokens"] > 0.8 * (len(ids[2]) + len(ids[3]))
        assert found["skipped_reason"] is None

    def test_anthropic_messages_are_cut_too(self, server, tokenizer):
        """SGLang turns /v1/messages into a chat; its answer has no place for our usage, the counters do."""

        def message(order):
            body = {"model": "small", "max_tokens": 2, "temperature": 0}
            body["messages"] = [{"role": "user", "content": with_separators(order)}]
            answer = requests.post(server.url + "/v1/messages", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()["usage"]["input_tokens"]

        lens = [len(tokenizer.encode(doc)) for doc in DOCS[:3]]
        message((0, 1, 2))
        before = counts(server).get("tokens_total reused", 0)
        num_tokens = message((2, 0, 1))
        assert counts(server)["tokens_total reused"] - before > 0.8 * (lens[2] + lens[0])
        # the marks are not in the prompt
        assert num_tokens < sum(lens) + 60

    def test_spans_and_separators_mean_the_same(self, server, tokenizer):
        generate(server, with_separators((0, 1, 2)))
        by_text = generate(server, with_separators((1, 2, 0)))
        ids, spans = tokenizer.encode("Answer from the documents.\n"), []
        for i in (1, 2, 0):
            tokens = tokenizer.encode(DOCS[i])
            spans += [len(ids), len(ids) + len(tokens)]
            ids += tokens
        ids += tokenizer.encode(QUESTION)
        server.flush_cache()
        generate(server, with_separators((0, 1, 2)))
        by_ids = ask(server, ids, new_tokens=2, blockreuse_spans=spans)
        assert by_ids["output_ids"] == by_text["output_ids"]
        assert usage(by_ids) == usage(by_text)

    def test_completions_reuse_what_generate_compiled(self, server, client):
        generate(server, with_separators((0, 1, 2)))
        before = counts(server).get("tokens_total reused", 0)
        prompts = [with_separators((2, 1, 0)), "A plain prompt of no documents"]
        answer = client.completions.create(model="small", prompt=prompts, max_tokens=2, temperature=0)
        assert len(answer.choices) == 2
        assert counts(server)["tokens_total reused"] > before

    def test_chat_cuts_the_rendered_template(self, server, client, tokenizer):
        def messages(order):
            return [
                {"role": "system", "content": "Answer from the documents."},
                {"role": "user", "content": with_separators(order, leading="")},
            ]

        self.chat(client, messages((0, 1, 2)))
        found, ids = self.chat(client, messages((2, 1, 0)))
        assert found["reused_tokens"] > 0
        leading = "<|im_start|>system\nAnswer from the documents.<|im_end|>\n<|im_start|>user\n"
        pieces = [leading, DOCS[2], DOCS[1], DOCS[0], QUESTION + "<|im_end|>\n<|im_start|>assistant\n"]
        assert ids == joined(tokenizer.encode(piece) for piece in pieces)

    def test_the_next_turn_of_a_marked_chat_computes_what_is_new(self, server, client, tokenizer):
        """Also where the first turn stands on moved documents: its path is found again."""
        messages = [{"role": "user", "content": with_separators((0, 1, 2), leading="")}]
        self.chat(client, messages)
        messages = [{"role": "user", "content": with_separators((2, 1, 0), leading="")}]
        first, ids = self.chat(client, messages)
        assert first["reused_tokens"] > 0
        messages += [{"role": "assistant", "content": "No."}, {"role": "user", "content": "Are you sure?"}]
        second, more = self.chat(client, messages)
        assert more[: len(ids)] == ids
        computed = second["fresh_tokens"] + second["repaired_tokens"]
        assert computed <= len(more) - len(ids)

    @pytest.mark.parametrize(
        "content",
        [
            "Plain words",
            [{"type": "text", "text": "One part"}],
            [{"type": "text", "text": t} for t in ("a", "b")],
        ],
        ids=["text", "one part", "parts nobody asked to mark"],
    )
    def test_a_chat_without_marks_has_the_ids_of_the_stock_server(self, server, client, tokenizer, content):
        found, ids = self.chat(client, [{"role": "user", "content": content}])
        text = content if isinstance(content, str) else " ".join(part["text"] for part in content)
        rendered = f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
        assert ids == tokenizer.encode(rendered)
        assert found["skipped_reason"] == "no_blocks"

    def test_text_without_a_separator_has_the_ids_of_the_stock_server(self, server, tokenizer):
        answer = generate(server, DOCS[0])
        assert answer["prompt_token_ids"] == tokenizer(DOCS[0]).input_ids
        assert usage(answer)["skipped_reason"] == "no_blocks"

    def test_content_parts_are_blocks(self, server, client, tokenizer):
        def messages(order):
            texts = [DOCS[i] for i in order] + [QUESTION]
            return [{"role": "user", "content": [{"type": "text", "text": t} for t in texts]}]

        self.chat(client, messages((0, 1, 2)), blockreuse_parts=True)
        found, ids = self.chat(client, messages((2, 1, 0)), blockreuse_parts=True)
        assert found["reused_tokens"] > 0
        # the host joins the parts of a message by a space
        pieces = ["<|im_start|>user\n", DOCS[2], " ", DOCS[1], " ", DOCS[0], " ", QUESTION]
        pieces.append("<|im_end|>\n<|im_start|>assistant\n")
        assert ids == joined(tokenizer.encode(piece) for piece in pieces)

    def test_documents_of_the_chat_template_are_blocks(self, server, client):
        def ask_about(order):
            documents = [{"title": f"T{i}", "text": DOCS[i]} for i in order]
            return self.chat(
                client,
                [{"role": "user", "content": QUESTION}],
                blockreuse_parts=True,
                chat_template_kwargs={"documents": documents},
            )

        ask_about((0, 1, 2))
        found, ids = ask_about((1, 0, 2))
        assert found["reused_tokens"] > 0
        assert found["prefix_tokens"] + found["reused_tokens"] > 0.8 * len(ids) - len(DOCS[0])

    def test_a_template_that_cuts_parts_serves_them_unmarked(self, server, client, tokenizer):
        content = [{"type": "text", "text": text} for text in DOCS[:2]]
        found, ids = self.chat(
            client,
            [{"role": "user", "content": content}],
            blockreuse_parts=True,
            chat_template_kwargs={"limit": 60},
        )
        text = " ".join(DOCS[:2])[:60].strip()
        assert ids == tokenizer.encode(f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n")
        assert found["skipped_reason"] == "no_blocks"
        assert "they are served unmarked" in server.new_log_text()

    def test_a_separator_in_a_message_that_is_continued_is_refused(self, server):
        messages = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": f"It is{SEP}"}]
        body = {"model": "small", "messages": messages, "continue_final_message": True, "max_tokens": 2}
        with pytest.raises(requests.HTTPError, match=r"400.*its last message"):
            server.post("/v1/chat/completions", **body)

    @pytest.mark.parametrize("text", [SEP, SEP + SEP], ids=["one separator", "two separators"])
    def test_nothing_but_separators_is_refused(self, server, text):
        with pytest.raises(requests.HTTPError, match=r"400.*nothing but separators"):
            generate(server, text)

    @pytest.mark.parametrize(
        ("text", "num_blocks"),
        [
            (f"{DOCS[0]}{SEP}{QUESTION}", 0),
            (f"{SEP}{DOCS[0]}{SEP}{SEP}{DOCS[1]}{SEP}", 2),
        ],
        ids=["once", "at the ends and twice in a row"],
    )
    def test_separators_in_odd_places_leave_the_prompt(self, server, tokenizer, text, num_blocks):
        answer = generate(server, text)
        pieces = [piece for piece in text.split(SEP) if piece]
        assert answer["prompt_token_ids"] == joined(tokenizer.encode(p) for p in pieces)
        assert (usage(answer)["skipped_reason"] == "no_blocks") == (num_blocks == 0)

    def test_marks_of_two_kinds_are_refused(self, server):
        both = {"blockreuse_spans": [0, 40]}
        text = with_separators((0, 1))
        chat = {"model": "small", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        parts = [{"type": "text", "text": text}, {"type": "text", "text": QUESTION}]
        twice = {"model": "small", "messages": [{"role": "user", "content": parts}], "max_tokens": 2}
        cases = [
            ("/generate", {"text": text, "sampling_params": {"custom_params": both}}, "holds separators"),
            (
                "/v1/completions",
                {"model": "small", "prompt": text, "custom_params": both},
                "holds separators",
            ),
            ("/v1/chat/completions", {**chat, "custom_params": both}, "holds separators"),
            ("/v1/chat/completions", {**twice, "custom_params": {"blockreuse_parts": True}}, "in one way"),
            (
                "/v1/chat/completions",
                {**twice, "custom_params": {"blockreuse_parts": True, **both}},
                "both given",
            ),
            (
                "/generate",
                {"text": "a", "sampling_params": {"custom_params": {"blockreuse_parts": True}}},
                "does not come from chat messages",
            ),
        ]
        for path, body, says in cases:
            with pytest.raises(requests.HTTPError, match=rf"400.*{says}"):
                server.post(path, **body)

    def test_batches_samples_and_streams(self, server, tokenizer):
        generate(server, with_separators((0, 1, 2)))
        plain, marked = "A plain prompt of no documents", with_separators((2, 1, 0))
        # one dict of sampling parameters for both, which must stay apart
        answers = server.generate(text=[plain, marked], sampling_params=GREEDY, return_prompt_token_ids=True)
        assert answers[0]["prompt_token_ids"] == tokenizer(plain).input_ids
        assert [usage(a)["skipped_reason"] for a in answers] == ["no_blocks", None]
        samples = generate(server, with_separators((1, 0, 2)), n=2)
        assert [usage(a)["skipped_reason"] for a in samples] == [None, None]
        body = {"text": with_separators((2, 0)), "sampling_params": GREEDY, "stream": True}
        with requests.post(server.url + "/generate", json=body, stream=True, timeout=60) as response:
            lines = [line for line in response.iter_lines(decode_unicode=True) if line.startswith("data: {")]
        assert usage(json.loads(lines[-1][6:]))["reused_tokens"] > 0

    def test_an_exact_request_has_the_same_ids_and_reuses_nothing(self, server):
        generate(server, with_separators((0, 1, 2)))
        reused = generate(server, with_separators((2, 1, 0)))
        exact = generate(server, with_separators((2, 1, 0)), blockreuse_mode="exact")
        assert exact["prompt_token_ids"] == reused["prompt_token_ids"]
        assert (usage(exact)["reused_tokens"], usage(exact)["skipped_reason"]) == (0, "mode_exact")

    def test_a_compile_request_compiles_and_does_nothing_else(self, server, tokenizer):
        text = with_separators((0, 1, 2))
        params = {**GREEDY, "max_new_tokens": 50, "custom_params": {"blockreuse_mode": "compile"}}
        answer = server.generate(text=text, sampling_params=params)
        num_tokens = sum(len(tokenizer.encode(DOCS[i])) for i in (0, 1, 2))
        assert usage(answer)["compiled_tokens"] == num_tokens
        assert usage(answer)["skipped_reason"] == "mode_compile"
        assert answer["meta_info"]["completion_tokens"] == 1
        again = usage(server.generate(text=text, sampling_params=params))
        assert again["compiled_tokens"] == 0
        found = usage(generate(server, with_separators((1, 2, 0))))
        assert (found["compiled_tokens"], found["skipped_reason"]) == (0, None)
        assert found["reused_tokens"] > 0
        with pytest.raises(requests.HTTPError, match=r"400.*no log-probabilities"):
            server.generate(text=text, sampling_params=params, return_logprob=True)

    def test_the_compile_command_warms_the_server(self, server, tmp_path, capsys):
        file = tmp_path / "documents.txt"
        file.write_text("%%%".join(DOCS[:3]))
        prefix = tmp_path / "prefix.txt"
        prefix.write_text("Answer from the documents.\n")
        words = [
            "compile",
            str(file),
            "--url",
            server.url,
            "--prefix-file",
            str(prefix),
            "--separator",
            "%%%",
        ]
        assert main(words) == 0
        assert capsys.readouterr().out.count("compiled") == 4, "three documents and the heading"
        found = usage(generate(server, with_separators((1, 2, 0))))
        assert (found["compiled_tokens"], found["skipped_reason"]) == (0, None)
        assert main(words) == 0
        assert capsys.readouterr().out.count("known already") == 3
        # negative control: behind another prefix nothing was compiled
        other = usage(generate(server, with_separators((1, 2, 0), leading="You are a pirate.\n")))
        assert other["compiled_tokens"] > 0


class TestExplained:
    """What `explain-request` shows of a request is what was done to it."""

    @pytest.fixture(scope="class")
    def server(self):
        with start({"separator": SEP}) as running:
            yield running

    def body(self, order):
        return {"text": with_separators(order), "sampling_params": {"max_new_tokens": 1, "temperature": 0}}

    def test_the_repaired_tokens_of_a_document_are_shown(self, server, tmp_path, capsys):
        generate(server, with_separators((0, 1, 2)))
        file, made = tmp_path / "request.json", tmp_path / "page.html"
        file.write_text(json.dumps(self.body((2, 1, 0))))
        assert main(["explain-request", str(file), "--url", server.url]) == 0
        shown = " ".join(capsys.readouterr().out.split())  # a terminal breaks lines where it likes
        assert "repaired: both edges of every document" in shown
        assert "[document 2: " in shown
        assert all(document.split(".")[0] in shown for document in DOCS[:3])
        assert main(["explain-request", str(file), "--url", server.url, "--html", str(made)]) == 0
        assert made.read_text().count("<h4>document") == 3

    def test_pieces_add_up_to_the_usage(self, server):
        generate(server, with_separators((0, 1, 2)))
        found = explain(server.url, self.body((1, 2, 0)))
        for kind in ("prefix", "reused", "repaired", "fresh"):
            assert sum(len(p) for p in found.pieces if p.kind == kind) == found.usage[f"{kind}_tokens"]
        assert found.usage["repaired_tokens"] > 0
        assert "".join(piece.text for piece in found.pieces).replace(" ", "") == (
            with_separators((1, 2, 0)).replace(SEP, "").replace(" ", "")
        )

    def test_a_server_that_is_not_there_is_told(self, tmp_path, capsys):
        file = tmp_path / "request.json"
        file.write_text(json.dumps(self.body((0, 1))))
        assert main(["explain-request", str(file), "--url", "http://127.0.0.1:1"]) == 1
        assert "does not answer" in capsys.readouterr().err
