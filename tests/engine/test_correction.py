"""Operator F on the real engine: alpha acts on local keys, beta on false sinks, and both vanish with them."""

from __future__ import annotations

import json

import pytest
from prompts import Library, ask, distance, usage
from servers import extended_server
from tiny_models import SUPPORTED, VOCAB
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=6, doc_lens=(100, 80, 120, 90), ids=range(10, VOCAB))
ORDER, OTHER = (0, 1, 2, 3), (2, 0, 3, 1)
NUM_SINKS = 4
# what each server adds to logits; the first is the control for the other two
TERMS = {"none": (0.0, 0.0), "alpha": (-30.0, 0.0), "beta": (0.0, -30.0)}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """name of the terms -> answers to the same requests."""
    folder = tmp_path_factory.mktemp("correction")
    model = SUPPORTED["llama llama3"].write(folder / "model")
    found = {}
    for name, (alpha, beta) in TERMS.items():
        config = folder / f"{name}.json"
        config.write_text(json.dumps({"blocks": {"alpha": alpha, "beta": beta, "num_true_sinks": NUM_SINKS}}))
        flags = ("--dtype", "float32", "--max-total-tokens", "8000", "--max-running-requests", "4")
        flags += ("--skip-tokenizer-init", "--blockreuse-config", str(config))
        with extended_server(model, *flags, log=folder / f"{name}.log") as server:
            found[name] = {case: answer(server) for case, answer in CASES.items()}
    return found


def know(server):
    server.flush_cache()
    ids, spans = LIBRARY.prompt((3, 2, 1, 0))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)


def full(server):
    server.flush_cache()
    return ask(server, LIBRARY.prompt(ORDER)[0], new_tokens=8, blockreuse_mode="off")


def reused(tau):
    def found(server):
        know(server)
        ids, spans = LIBRARY.prompt(ORDER)
        return ask(server, ids, new_tokens=8, blockreuse_spans=spans, blockreuse_tau=tau)

    return found


def exact_in_used_slots(server):
    """An exact request in slots that held local keys and false sinks before."""
    for _ in range(2):
        know(server)
        ids, spans = LIBRARY.prompt(OTHER)
        ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
    server.flush_cache()
    return full(server)


CASES = {
    "full": full,
    "nothing repaired": reused(0),
    "heads repaired": reused(NUM_SINKS),
    "all repaired": reused(1000),
    "exact in used slots": exact_in_used_slots,
}


@pytest.mark.parametrize("term", ["alpha", "beta"])
def test_a_term_alone_changes_what_is_read_from_reused_blocks(answers, term):
    """Its control is the same request on the same KV where the term is 0."""
    assert usage(answers[term]["nothing repaired"])["reused_tokens"] > 200
    assert usage(answers[term]["nothing repaired"]) == usage(answers["none"]["nothing repaired"])
    moved = distance(answers[term]["nothing repaired"], answers["none"]["nothing repaired"])
    assert moved > 100 * FULL_PREFILL_LOGPROB


def test_a_server_without_terms_answers_twice_the_same(answers):
    """Negative control for the comparison of servers: what differs above is the term, not the server."""
    for term in ("alpha", "beta"):
        assert distance(answers[term]["full"], answers["none"]["full"]) == 0.0


def test_beta_vanishes_where_the_heads_of_blocks_are_repaired(answers):
    """Then no false sink is left, though the blocks are still local, as alpha shows."""
    assert usage(answers["beta"]["heads repaired"])["reused_tokens"] > 200
    repaired = {term: answers[term]["heads repaired"] for term in TERMS}
    assert distance(repaired["beta"], repaired["none"]) == 0.0
    assert distance(repaired["alpha"], repaired["none"]) > 100 * FULL_PREFILL_LOGPROB


@pytest.mark.parametrize("term", ["alpha", "beta"])
def test_without_local_keys_f_is_plain_attention(answers, term):
    """Degeneration, and proof that a recycled slot does not keep the tag of who had it before."""
    for case in ("all repaired", "exact in used slots"):
        assert distance(answers[term][case], answers["none"]["full"]) <= FULL_PREFILL_LOGPROB
