"""Marks and compile choices on the real server. One server per class, because each needs a configuration."""

from __future__ import annotations

import itertools
import json
import random
import time

import openai
import pytest
import requests
from prompts import Library, ask, distance, usage
from servers import extended_server
from tolerances import FULL_PREFILL_LOGPROB
from transformers import AutoTokenizer

from sglang_blockreuse.cli import main

pytestmark = pytest.mark.engine
SEP = "<<<document>>>"
FLAGS = ("--dtype", "float32", "--max-total-tokens", "12000", "--max-running-requests", "8")
FLAGS += ("--served-model-name", "small")
# SmolLM2's template, which in addition renders `documents` and cuts messages at a `limit`
TEMPLATE = (
    "{% if documents %}<|im_start|>system\nAnswer from the documents.\n"
    "{% for document in documents %}{{ document.title }}: {{ document.text }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content[:limit or message.content | length] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GREEDY = {"temperature": 0, "max_new_tokens": 2, "ignore_eos": True}


def text_of(seed: int, num_words: int = 70) -> str:
    rng = random.Random(seed)
    words = (
        "river",
        "bridge",
        "winter",
        "contract",
        "copper",
        "letter",
        "museum",
        "harbour",
        "signal",
        "under",
    )
    return f"Document {seed}. " + " ".join(rng.choice(words) for _ in range(num_words)) + ".\n"


DOCS = [text_of(seed) for seed in range(4)]
QUESTION = "Which documents speak of a bridge?"


def with_separators(order, leading="Answer from the documents.\n", question=QUESTION) -> str:
    return SEP.join([leading, *(DOCS[i] for i in order), question])


def start(model_path, tmp_path_factory, blocks, *flags):
    folder = tmp_path_factory.mktemp("marking")
    (folder / "config.json").write_text(json.dumps({"blocks": {"tau": 3, **blocks}}))
    (folder / "template.jinja").write_text(TEMPLATE)
    ours = ("--blockreuse-config", str(folder / "config.json"))
    ours += ("--chat-template", str(folder / "template.jinja"))
    return extended_server(model_path, *FLAGS, *ours, *flags, log=folder / "server.log")


def generate(server, text, *, stream=False, n=1, **custom_params):
    params = {**GREEDY, "n": n, "custom_params": custom_params or None}
    return server.generate(text=text, sampling_params=params, return_prompt_token_ids=True)


def counts(server):
    return server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


class TestText:
    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        with start(model_path, tmp_path_factory, {"separator": SEP}) as running:
            yield running

    @pytest.fixture(autouse=True)
    def empty_tree(self, server):
        server.flush_cache()

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
        assert "they are served unmarked" in server.log_text()

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


class TestBackgroundAndAuto:
    """Background compiling and blocks found without marks share a server."""

    LIBRARY = Library(seed=11)

    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        blocks = {"compile": "background", "auto": True}
        with start(model_path, tmp_path_factory, blocks) as running:
            yield running

    @pytest.fixture(autouse=True)
    def empty_tree(self, server):
        server.flush_cache()

    def exact(self, server, ids):
        answer = ask(server, ids, blockreuse_mode="exact")
        server.flush_cache()
        return answer

    def test_the_request_that_brings_documents_is_exact_and_the_next_one_reuses(self, server):
        ids, spans = self.LIBRARY.prompt((0, 1, 2))
        exact = self.exact(server, ids)
        first = ask(server, ids, blockreuse_spans=spans)
        assert usage(first)["skipped_reason"] == "compile_background"
        assert usage(first)["compiled_tokens"] == len(self.LIBRARY.docs[1]) + len(self.LIBRARY.docs[2])
        assert distance(first, exact) <= FULL_PREFILL_LOGPROB
        wait_until_idle(server)
        ids, spans = self.LIBRARY.prompt((2, 1, 0))
        second = usage(ask(server, ids, blockreuse_spans=spans))
        assert second["reused_tokens"] > 0
        assert second["skipped_reason"] is None

    def test_unmarked_documents_are_found_in_earlier_prompts(self, server):
        ids, _ = self.LIBRARY.prompt((0, 1, 2))
        first = usage(ask(server, ids))
        assert (first["reused_tokens"], first["skipped_reason"]) == (0, "auto_no_hits")
        ids, _ = self.LIBRARY.prompt((2, 0, 1))
        exact = ask(server, ids, blockreuse_mode="exact", cache_salt="for reference")
        second = ask(server, ids)
        found = usage(second)
        assert found["skipped_reason"] is None
        # the system prompt is exact; all documents and the question were seen, none at its place
        assert found["prefix_tokens"] == len(self.LIBRARY.system)
        assert found["reused_tokens"] > 0.8 * (len(ids) - len(self.LIBRARY.system))
        assert found["compiled_tokens"] == 0
        # negative control: it is the moved documents that were read, not a full prefill
        assert distance(second, exact) > FULL_PREFILL_LOGPROB

    def test_repairing_everything_that_was_found_equals_full_prefill(self, server):
        ids, _ = self.LIBRARY.prompt((2, 0, 1))
        exact = self.exact(server, ids)
        ask(server, self.LIBRARY.prompt((0, 1, 2))[0])
        answer = ask(server, ids, blockreuse_tau=1000)
        assert usage(answer)["skipped_reason"] == "all_repaired"
        assert distance(answer, exact) <= FULL_PREFILL_LOGPROB

    @pytest.mark.parametrize("tenant", [{"cache_salt": "b"}, {"extra_key": "b"}], ids=["salt", "key"])
    def test_a_foreign_tenant_finds_nothing(self, server, tenant):
        ask(server, self.LIBRARY.prompt((0, 1, 2))[0])
        ids, _ = self.LIBRARY.prompt((2, 0, 1))
        foreign = usage(ask(server, ids, **tenant))
        assert (foreign["reused_tokens"], foreign["prefix_tokens"]) == (0, 0)
        assert foreign["skipped_reason"] == "auto_no_hits"
        assert usage(ask(server, ids))["reused_tokens"] > 0, "its own tenant does"

    def test_donors_that_the_tree_lost_are_harmless(self, server):
        ask(server, self.LIBRARY.prompt((0, 1, 2))[0])
        server.flush_cache()
        ids, _ = self.LIBRARY.prompt((2, 0, 1))
        assert usage(ask(server, ids))["skipped_reason"] == "auto_no_hits"

    def test_exact_requests_and_conversations_are_left_alone(self, server):
        ids, _ = self.LIBRARY.prompt((0, 1, 2))
        answer = ask(server, ids)
        exact = usage(ask(server, self.LIBRARY.prompt((2, 0, 1))[0], blockreuse_mode="exact"))
        assert (exact["reused_tokens"], exact["skipped_reason"]) == (0, "mode_exact")
        turn = ids + answer["output_ids"] + self.LIBRARY.question[::-1]
        second = usage(ask(server, turn))
        assert second["prefix_tokens"] >= len(ids), "the earlier turn is an exact prefix"
        assert second["reused_tokens"] == 0

    def test_nothing_leaks(self, server):
        for order in ((0, 1, 2), (2, 0, 1), (3, 1), (1, 3, 0)):
            ids, spans = self.LIBRARY.prompt(order)
            ask(server, ids)
            ask(server, ids, blockreuse_spans=spans)
        wait_until_idle(server)
        server.flush_cache()
        pool = server.get("/server_info")["internal_states"][0]["blockreuse"]["pool"]
        assert pool["free"] == pool["size"]


class TestHarvest:
    """Also one of the host's conversation templates, which are not rendered by Jinja."""

    LIBRARY = Library(seed=12)

    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        blocks = {"compile": "harvest", "separator": SEP}
        with start(model_path, tmp_path_factory, blocks, "--chat-template", "chatml") as running:
            yield running

    def test_marked_blocks_are_reused_from_the_prompt_that_held_them_first(self, server):
        ids, spans = self.LIBRARY.prompt((0, 1, 2))
        first = usage(ask(server, ids, blockreuse_spans=spans))
        assert (first["reused_tokens"], first["skipped_reason"]) == (0, "harvest_no_hits")
        ids, spans = self.LIBRARY.prompt((2, 0, 1))
        found = usage(ask(server, ids, blockreuse_spans=spans))
        assert found["skipped_reason"] is None
        assert found["reused_tokens"] > 0.8 * sum(self.LIBRARY.doc_lens[:3])
        assert counts(server).get("homes_total", 0) == 0
        foreign = usage(ask(server, ids, blockreuse_spans=spans, cache_salt="b"))
        assert (foreign["reused_tokens"], foreign["skipped_reason"]) == (0, "harvest_no_hits")

    def test_a_conversation_template_is_cut_at_separators(self, server, tokenizer):
        body = {"model": "small", "max_tokens": 2, "return_prompt_token_ids": True, "return_meta_info": True}

        def chat(text):
            (choice,) = server.post(
                "/v1/chat/completions", messages=[{"role": "user", "content": text}], **body
            )["choices"]
            return choice["prompt_token_ids"], choice["meta_info"]["blockreuse"][0]["skipped_reason"]

        ids, reason = chat(with_separators((0, 1)))
        assert reason == "harvest_no_hits"
        whole = tokenizer.decode(ids)
        assert SEP not in whole
        plain, reason = chat(with_separators((0, 1)).replace(SEP, ""))
        assert reason == "no_blocks"
        assert tokenizer.decode(plain) == whole
        documents = joined(tokenizer.encode(DOCS[i]) for i in (0, 1))
        assert any(ids[i : i + len(documents)] == documents for i in range(len(ids)))

    def test_a_request_of_mostly_new_blocks_is_exact_and_serves_later_ones(self, server):
        server.flush_cache()
        ids, spans = self.LIBRARY.prompt((0, 1))
        ask(server, ids, blockreuse_spans=spans)
        ids, spans = self.LIBRARY.prompt((2, 3, 1))
        exact = ask(server, ids, blockreuse_mode="exact", cache_salt="for reference")
        mixed = ask(server, ids, blockreuse_spans=spans)
        assert usage(mixed)["skipped_reason"] == "harvest_few_hits"
        assert distance(mixed, exact) <= FULL_PREFILL_LOGPROB
        ids, spans = self.LIBRARY.prompt((3, 2))
        assert usage(ask(server, ids, blockreuse_spans=spans))["reused_tokens"] > 0


class TestManual:
    """Also two tokenizer workers, in which SGLang loads no plug-ins, and one neutral compile prefix."""

    @pytest.fixture(scope="class")
    def server(self, model_path, tmp_path_factory):
        blocks = {
            "compile": "manual",
            "separator": SEP,
            "compile_prefix_text": "A document:\n",
            "parts": True,
        }
        with start(model_path, tmp_path_factory, blocks, "--tokenizer-worker-num", "2") as running:
            yield running

    def test_only_compile_requests_compile_and_one_home_serves_all_system_prompts(
        self, server, tmp_path, tokenizer, capsys
    ):
        text = with_separators((0, 1))
        for _ in range(4):  # whichever worker answers
            found = generate(server, text)
            assert usage(found)["skipped_reason"] in ("compile_manual", "exact_prefix")
            assert usage(found)["compiled_tokens"] == 0
            assert found["meta_info"]["prompt_tokens"] == sum(
                len(tokenizer.encode(p)) for p in text.split(SEP)
            )
        assert counts(server).get("homes_total", 0) == 0
        files = []
        for i in (0, 1):
            files.append(tmp_path / f"{i}.txt")
            files[-1].write_text(DOCS[i])
        assert main(["compile", *map(str, files), "--url", server.url]) == 0
        assert capsys.readouterr().out.count("compiled") == 3
        for leading in ("You are a pirate.\n", "You are a judge, and brief.\n"):
            found = usage(generate(server, with_separators((1, 0), leading=leading)))
            assert found["skipped_reason"] is None
            assert found["reused_tokens"] > 100

    def test_a_server_of_another_kind_is_told_apart(self, server, tmp_path, capsys):
        file = tmp_path / "a.txt"
        file.write_text("text")
        assert main(["compile", str(file), "--url", server.url + "/docs"]) == 1
        assert "no SGLang server with block reuse" in capsys.readouterr().err


def wait_until_idle(server, wait_s: float = 60.0) -> None:
    """Until background homes are prefilled."""
    deadline = time.monotonic() + wait_s
    while time.monotonic() < deadline:
        pool = server.get("/server_info")["internal_states"][0]["blockreuse"]["pool"]
        if pool["free"] + pool["evictable"] == pool["size"]:
            return
        time.sleep(0.25)
    raise AssertionError("the server is still busy")


def prompt_ids(answer):
    """Ids of a chat prompt, which the host reports beside or inside the choice."""
    return getattr(answer.choices[0], "prompt_token_ids", None) or answer.prompt_token_ids


def joined(pieces):
    return list(itertools.chain.from_iterable(pieces))
