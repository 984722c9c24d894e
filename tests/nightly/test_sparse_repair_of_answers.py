"""`prefill: sparse` and the language model's answers about documents: how near they stay to those of dense repair."""

from __future__ import annotations

import math

import pytest
from prompts import ask, logprobs
from servers import lease
from tolerances import SPARSE_REPAIR_KL
from transformers import AutoTokenizer

from sglang_blockreuse.demo.documents import make_documents

pytestmark = pytest.mark.engine
PLAN = """
version: 1
name: repair
model: {num_layers: 30}
selection: {final_k: 224, pool_size: 320, sink: 4, window: 32}
prefill: sparse
layers:
  - {layers: 0, role: dense}
  - {layers: 1, role: full}
  - {layers: 2-8, role: reindex, anchor: 1}
  - {layers: 9-12, role: reuse, anchor: 8}
  - {layers: 13, role: full}
  - {layers: 14-29, role: reuse, anchor: 13}
"""
REPAIR = "tests/engine/test_sparse_repair_server.py::TestSomethingLeftOut"


@pytest.mark.nightly(twin=f"{REPAIR}::test_its_answer_stays_nearer_to_dense_repair_than_that_of_none")
def test_answers_about_documents_stay_near_dense_repair(model_path):
    with lease(model="smollm2", plan=PLAN) as server:
        for repaired_kl, unrepaired_kl in rag_divergences(server, model_path, num_questions=3):
            assert 0 < repaired_kl <= SPARSE_REPAIR_KL
            assert unrepaired_kl > SPARSE_REPAIR_KL, "the bound tells repair from none"


def rag_divergences(server, model_path, *, num_questions):
    """KL of the first answer token from dense repair to sparse repair, and to none; four documents of ~300 tokens."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)

    def ids(text):
        return tokenizer.encode(text, add_special_tokens=False)

    documents = make_documents(4, seed=5, num_tokens=lambda text: len(ids(text)), low=260, high=310)
    prompt, spans = ids("Answer the question from the documents.\n"), []
    for document in documents:
        spans += [len(prompt), len(prompt) + len(ids(document.text))]
        prompt += ids(document.text)
    for fact in [documents[i % 4].facts[i // 4] for i in range(num_questions)]:
        asked = prompt + ids(f"\nQuestion: {fact.question}\nAnswer: The answer is")
        dense, sparse, none = (
            logprobs(ask(server, asked, new_tokens=1, top=1000, blockreuse_spans=spans, **knobs))[0]
            for knobs in (
                {"blockreuse_budget": 0.1, "testing_dense_repair": True, "cache_salt": "dense"},
                {"blockreuse_budget": 0.1, "cache_salt": "sparse"},
                {"blockreuse_tau": 0, "cache_salt": "none"},
            )
        )
        server.flush_cache()
        yield divergence(dense, sparse), divergence(dense, none)


def divergence(p, q) -> float:
    """KL over the tokens that both report, the others as one: never above the KL of the whole distributions."""
    common = p.keys() & q.keys()
    kl = sum(math.exp(p[t]) * (p[t] - q[t]) for t in common)
    rest_p, rest_q = (max(1 - sum(math.exp(x[t]) for t in common), 1e-12) for x in (p, q))
    return kl + rest_p * math.log(rest_p / rest_q)
