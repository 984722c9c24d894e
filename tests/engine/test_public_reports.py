"""Ten public reports about non-prefix KV reuse in other engines, each as a test of this one.

One real server serves them; reports that need another start fork it.
Counts of tokens stand for speed: what is not computed costs nothing.
"""

from __future__ import annotations

import base64
import concurrent.futures
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import looks
import openai
import pytest
from packaging.specifiers import SpecifierSet
from places import ROOT
from prompts import Library, ask, distance, usage
from servers import COMMON, lease
from tiny_models import REFUSED, SUPPORTED
from tolerances import FULL_PREFILL_LOGPROB

from sglang_blockreuse.host import SUPPORTED_SGLANG
from sglang_blockreuse.server_process import ServerFailed

pytestmark = pytest.mark.engine
CHUNK = int(COMMON[COMMON.index("--chunked-prefill-size") + 1])
LIBRARY = Library(seed=21, doc_lens=(100, 80, 120, 90))
A, B, C, X = range(4)


@pytest.fixture(scope="module")
def server():
    with lease() as running:
        yield running


def counts(server) -> dict[str, float]:
    return {"homes_total": 0, "copied_tokens_total": 0, "tokens_total reused": 0, **looks.counts(server)}


def send(server, order, **options):
    ids, spans = LIBRARY.prompt(order)
    return ask(server, ids, blockreuse_spans=spans, **options)


def full_prefill(server, order):
    server.flush_cache()
    answer = ask(server, LIBRARY.prompt(order)[0], blockreuse_mode="off")
    server.flush_cache()
    return answer


def local_tokens(found) -> int:
    """Prompt tokens that did not have to be computed and that no exact prefix holds."""
    return found["reused_tokens"]


def check_sum(answer) -> dict:
    found = usage(answer)
    parts = [found[f"{kind}_tokens"] for kind in ("prefix", "reused", "repaired", "fresh")]
    assert sum(parts) == answer["meta_info"]["prompt_tokens"], found
    assert min(parts) >= 0, found
    return found


class TestReport01:
    """LMCache#5101: blending is configured and silently never happens."""

    def test_report_01_what_cannot_blend_does_not_start(self):
        flags = ("--radix-cache-backend", "blockreuse", "--attention-backend", "torch_native")
        with (
            pytest.raises(ServerFailed, match="only blockreuse computes several stretches"),
            lease(*flags, kind="stock"),
        ):
            pass

    def test_report_01_a_counter_proves_every_blend(self, server):
        send(server, (A, B, C), new_tokens=1)
        before = counts(server)
        answers = [send(server, order) for order in ((C, A, B), (B, C))]
        after = counts(server)
        reused = sum(usage(answer)["reused_tokens"] for answer in answers)
        assert all(usage(answer)["reused_tokens"] > 0 for answer in answers)
        assert after["tokens_total reused"] - before["tokens_total reused"] == reused
        assert after["copied_tokens_total"] - before["copied_tokens_total"] >= reused
        assert after["requests_total reused"] - before.get("requests_total reused", 0) == len(answers)

    def test_report_01_a_request_that_does_not_blend_says_why_and_counts_nothing(self, server):
        send(server, (A, B), new_tokens=1)
        before = counts(server)
        assert usage(send(server, (B, A), blockreuse_mode="exact"))["skipped_reason"] == "mode_exact"
        assert counts(server)["copied_tokens_total"] == before["copied_tokens_total"]


class TestReport02:
    """LMCache#4131, #2306: the shipped release crashes at start on a stock engine."""

    def test_report_02_it_starts_on_the_stock_pinned_engine(self, server):
        assert "block reuse is on" in server.log_text()
        assert importlib.metadata.version("sglang") in SpecifierSet(",".join(SUPPORTED_SGLANG))
        required = importlib.metadata.requires("sglang-blockreuse") or []
        assert any(r.startswith("sglang") and ">=0.5.23" in r for r in required)

    def test_report_02_no_file_of_the_engine_is_patched(self):
        files = [
            f for f in importlib.metadata.files("sglang") or [] if f.hash and f.parts[:2] == ("sglang", "srt")
        ]
        assert len(files) > 1000
        patched = [str(f) for f in files if f.hash.value != digest(Path(f.locate()).read_bytes())]
        assert not patched


def digest(content: bytes) -> str:
    """As wheels record it."""
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def test_report_03_the_documented_example_reuses_and_computes_less(server, tmp_path):
    """LMCache#2442: the example of the documentation blends no token."""
    examples = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "requests.md").read_text(), re.DOTALL)
    (example,) = [code for code in examples if "blockreuse_spans" in code]
    assert "http://localhost:30000" in example
    script = tmp_path / "example.py"
    script.write_text(example.replace("http://localhost:30000", server.url))
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = {
        key: int(value)
        for key, value in re.findall(r"'(prefix|reused|repaired|fresh)_tokens': (\d+)", done.stdout)
    }
    assert found["reused"] > 0, done.stdout
    assert found["repaired"] + found["fresh"] < sum(found.values()) - found["prefix"]


class TestReport04:
    """LMCache#938, #854, #1875, PR#3217: dies of a full hit, of the same prompt again, of a prefix hit."""

    def still_answers(self, server):
        """The engine lives, and exact answers are what they were."""
        expected = full_prefill(server, (X, A))
        assert distance(ask(server, LIBRARY.prompt((X, A))[0]), expected) <= FULL_PREFILL_LOGPROB

    def test_report_04_the_same_prompt_twice(self, server):
        first, second, third = (send(server, (A, B, C)) for _ in range(3))
        assert check_sum(second)["fresh_tokens"] <= check_sum(first)["fresh_tokens"]
        assert usage(third)["fresh_tokens"] <= LIBRARY.question_len
        self.still_answers(server)

    def test_report_04_a_permutation_in_which_every_block_hits(self, server):
        send(server, (A, B, C))
        # A continued the prefix and had no home of its own until it stands elsewhere
        send(server, (B, A))
        homes = counts(server)["homes_total"]
        found = check_sum(send(server, (C, B, A)))
        assert counts(server)["homes_total"] == homes
        assert found["fresh_tokens"] == LIBRARY.question_len
        assert local_tokens(found) > 100
        self.still_answers(server)

    def test_report_04_a_prefix_hit_and_hits_behind_it(self, server):
        send(server, (A, B))
        send(server, (A, C))
        found = check_sum(send(server, (A, C, B)))
        assert found["prefix_tokens"] >= LIBRARY.system_len + len(LIBRARY.docs[A])
        assert found["reused_tokens"] > 0
        assert found["fresh_tokens"] == LIBRARY.question_len
        self.still_answers(server)


def test_report_05_after_a_partial_hit_the_next_request_hits_everything(server):
    """LMCache#2029, #2026: what a request computes beside its hits is not stored."""
    send(server, (A, B))
    partial = check_sum(send(server, (B, A, X)))
    assert partial["reused_tokens"] > 0
    homes = counts(server)["homes_total"]
    third = check_sum(send(server, (X, B, A)))
    assert counts(server)["homes_total"] == homes, "nothing was left to compile"
    assert third["fresh_tokens"] == LIBRARY.question_len


def test_report_06_a_model_that_would_be_garbled_does_not_start(tmp_path):
    """LMCache#4666: no gate per model; some answer nonsense from mis-rotated keys.

    A rotation that forgets the model's scaling is planted, and the start-up test finds it. The laws of each
    family stand in laws/families.py, planted faults of single layers in test_rope.py.
    """
    model = SUPPORTED["llama llama3"].write(tmp_path / "model")
    env = {"BLOCKREUSE_TESTING_ROPE_BASE": "10000"}
    with (
        pytest.raises(ServerFailed, match="Llama3RotaryEmbedding: moving a key by rotation differs"),
        lease("--skip-tokenizer-init", model=model, env=env),
    ):
        pass


def test_report_07_every_scaling_is_served_or_refused_by_name():
    """LMCache#1257, #1412, KVLink#1, CacheBlend#13: Llama only, and scaled ropes rotated without their scaling.

    test_families.py and test_all_families.py run these on real servers: an exact test of the rotation past the
    original context for what is served, the message for what is refused.
    """
    served = {model.rope.get("rope_type") for model in SUPPORTED.values()}
    assert served >= {"linear", "dynamic", "llama3", "yarn"}
    assert {model.family for model in SUPPORTED.values()} >= {
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "phi",
        "gptj",
    }
    assert REFUSED.keys() >= {"longrope", "mrope", "mla", "sliding window", "learned positions"}


class TestReport08:
    """LMCache#409, #1823: works only without chunked prefill and prefix caching; chat requests hit nothing."""

    def chat(self, server, **extra):
        client = openai.OpenAI(base_url=server.url + "/v1", api_key="none")
        answer = client.chat.completions.create(
            model="small",
            messages=[{"role": "user", "content": ""}],
            max_tokens=4,
            temperature=0,
            extra_body={**extra, "return_meta_info": True},
        )
        (found,) = answer.choices[0].meta_info["blockreuse"]
        return answer, found

    def test_report_08_chat_reuses_with_chunks_and_prefix_cache_and_without_separators(self, server):
        send(server, (A, B, C), new_tokens=1)
        ids, spans = LIBRARY.prompt((C, A, X, B))
        assert len(ids) > 2 * CHUNK
        answer, found = self.chat(server, input_ids=ids, custom_params={"blockreuse_spans": spans})
        assert answer.usage.prompt_tokens == len(ids), "nothing is put between the blocks"
        assert found["reused_tokens"] > 100
        assert found["prefix_tokens"] >= LIBRARY.system_len

    def test_report_08_repaired_everywhere_chat_says_what_a_full_prefill_says(self, server):
        ids, spans = LIBRARY.prompt((C, A, B))
        params = {"blockreuse_spans": spans, "blockreuse_budget": 1.0}
        exact, _ = self.chat(server, input_ids=ids, custom_params={"blockreuse_mode": "off"})
        server.flush_cache()
        send(server, (A, B, C), new_tokens=1)
        repaired, found = self.chat(server, input_ids=ids, custom_params=params)
        assert found["reused_tokens"] == 0
        assert repaired.choices[0].message.content == exact.choices[0].message.content


def test_report_09_reuse_survives_a_missing_block_in_the_middle(server):
    """LMCache-Ascend PR#254, vLLM RFC#25950: the lookup stops at the first block that is not there."""
    send(server, (A, B, C))
    homes = counts(server)["homes_total"]
    found = check_sum(send(server, (A, X, C)))
    assert counts(server)["homes_total"] - homes == 1, "X alone was unknown"
    assert found["prefix_tokens"] >= LIBRARY.system_len + len(LIBRARY.docs[A])
    assert found["reused_tokens"] > len(LIBRARY.docs[C]) / 2
    assert found["fresh_tokens"] == LIBRARY.question_len


class TestReport10:
    """IBM/vllm#88: live sequences that share a span corrupt each other. Spans on, none marked: gibberish."""

    def test_report_10_live_requests_share_a_document_at_different_offsets(self, server):
        cases = [LIBRARY.prompt(order) for order in ((B, A), (C, B, A), (X, A, B))]

        def run(case):
            return ask(server, case[0], new_tokens=16, blockreuse_spans=case[1], blockreuse_tau=0)

        alone = []
        for case in cases:
            server.flush_cache()
            send(server, (A, B, C, X), new_tokens=1)
            alone.append(run(case))
        server.flush_cache()
        send(server, (A, B, C, X), new_tokens=1)
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(run, cases))
        for one, other in zip(alone, together, strict=True):
            assert usage(other)["reused_tokens"] > 0
            assert other["output_ids"] == one["output_ids"]
            assert distance(other, one) <= FULL_PREFILL_LOGPROB

    def test_report_10_nothing_marked_is_bit_identical_to_off(self):
        """Both servers are forks of one process; test_unmarked.py does the same at length."""
        prompts = [LIBRARY.prompt(order)[0] for order in ((A,), (B, X), (A, B, C))]
        found = []
        for kind in ("stock", "extended"):
            with lease("--enable-mixed-chunk", kind=kind) as server:
                answers = [ask(server, ids) for ids in prompts]
                found.append([(a["output_ids"], a["meta_info"]["output_top_logprobs"]) for a in answers])
        assert found[0] == found[1]
        assert found[0][0] != found[0][1], "negative control: other prompts answer otherwise"
