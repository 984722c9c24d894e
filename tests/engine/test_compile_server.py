"""When an unseen document is compiled, and blocks that nobody marked, on the real server. One server per class."""

from __future__ import annotations

import pytest
from looks import state_of
from marked import DOCS, SEP, generate, joined, start, wait_until_idle, with_separators
from prompts import Library, ask, distance, usage
from tolerances import FULL_PREFILL_LOGPROB
from transformers import AutoTokenizer

from sglang_blockreuse.cli import main

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def tokenizer(model_path):
    return AutoTokenizer.from_pretrained(model_path)


class TestBackgroundAndAuto:
    """Background compiling and blocks found without marks share a server."""

    LIBRARY = Library(seed=11)

    @pytest.fixture(scope="class")
    def server(self):
        with start({"compile": "background", "auto": True}) as running:
            yield running

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
        pool = state_of(server)["pool"]
        assert pool["free"] == pool["size"]


class TestHarvest:
    """Also one of the host's conversation templates, which are not rendered by Jinja."""

    LIBRARY = Library(seed=12)

    @pytest.fixture(scope="class")
    def server(self):
        with start({"compile": "harvest", "separator": SEP}, "--chat-template", "chatml") as running:
            yield running

    def test_marked_blocks_are_reused_from_the_prompt_that_held_them_first(self, server):
        ids, spans = self.LIBRARY.prompt((0, 1, 2))
        first = usage(ask(server, ids, blockreuse_spans=spans))
        assert (first["reused_tokens"], first["skipped_reason"]) == (0, "harvest_no_hits")
        ids, spans = self.LIBRARY.prompt((2, 0, 1))
        found = usage(ask(server, ids, blockreuse_spans=spans))
        assert found["skipped_reason"] is None
        assert found["reused_tokens"] > 0.8 * sum(self.LIBRARY.doc_lens[:3])
        assert "homes_total" not in server.new_counts()
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
    def server(self):
        blocks = {
            "compile": "manual",
            "separator": SEP,
            "compile_prefix_text": "A document:\n",
            "parts": True,
        }
        with start(blocks, "--tokenizer-worker-num", "2") as running:
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
        assert "homes_total" not in server.new_counts()
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
