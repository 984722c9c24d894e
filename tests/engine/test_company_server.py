"""Homes in company on the real server: what they cost, that moved keys are right, that no tenant colours another."""

from __future__ import annotations

import pytest
from laws.families import CHUNK, IDS, OTHER, Family
from looks import state_of
from marked import wait_until_idle
from prompts import Library, ask, distance, usage
from servers import lease
from tiny_models import NUM_LAYERS, ORIGINAL_CONTEXT, SUPPORTED
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine

LIBRARY = Library(seed=3, doc_lens=(150, 130, 140, 120, 110), ids=IDS)
SYSTEM = len(LIBRARY.system)


@pytest.fixture(scope="module")
def family(tmp_path_factory):
    folder = tmp_path_factory.mktemp("company")
    model = SUPPORTED["llama llama3"]
    model.write(folder / "contextual")
    model.write(folder / "only_layer", only_layer=NUM_LAYERS - 1)
    with lease("--skip-tokenizer-init", model=folder / "contextual", blocks={"company": 2}) as server:
        yield Family(server, model, folder)


@pytest.fixture
def server(family):
    family.server.flush_cache()
    return family.server


def send(server, order, library=LIBRARY, **options):
    ids, spans = library.prompt(order)
    return ask(server, ids, **{"blockreuse_spans": spans, "blockreuse_tau": 0, **options})


def homes(server):
    return state_of(server)["counts"].get("homes_total", 0)


def test_the_first_documents_are_companions_and_cost_the_first_prompt_nothing(server):
    before = homes(server)
    found = usage(send(server, (0, 1, 2, 3, 4)))
    # three documents stand as at home, for two a home is made behind the first two
    assert homes(server) - before == 2
    assert found["prefix_tokens"] == SYSTEM + sum(LIBRARY.doc_lens[:2])
    assert found["compiled_tokens"] == found["reused_tokens"] == sum(LIBRARY.doc_lens[3:])


def test_company_takes_no_room_and_no_computing_of_its_own(server):
    """The row consists of the companions' own homes: every token of the library is computed and kept once."""
    ids, spans = LIBRARY.prompt((0, 1, 2, 3, 4))
    params = {"blockreuse_spans": spans, "blockreuse_mode": "compile"}
    answer = server.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "custom_params": params})
    assert usage(answer)["compiled_tokens"] == sum(LIBRARY.doc_lens)
    wait_until_idle(server)
    pool = state_of(server)["pool"]
    assert pool["size"] - pool["free"] == SYSTEM + sum(LIBRARY.doc_lens)


def test_every_block_has_one_home_and_is_compiled_once(server):
    send(server, (0, 1, 2, 3, 4))
    before = homes(server)
    for order in ((4, 3, 1, 2, 0), (3, 0, 4), (2, 4, 1), (1, 3, 0, 2)):
        found = usage(send(server, order))
        assert (found["skipped_reason"], found["compiled_tokens"]) == (None, 0)
        assert found["prefix_tokens"] == SYSTEM
        assert found["reused_tokens"] == sum(LIBRARY.doc_lens[i] for i in order)
    assert homes(server) == before
    # a companion is at home where it stands in the row: an exact prefix
    found = usage(send(server, (0, 4, 3)))
    assert found["prefix_tokens"] == SYSTEM + LIBRARY.doc_lens[0]


def test_repairing_everything_equals_full_prefill(family, server):
    ids, _ = LIBRARY.prompt(OTHER)
    full = family.full_prefill(ids)
    send(server, (0, 1, 2, 3, 4))
    # negative control: the same blocks moved and not repaired
    assert distance(send(server, OTHER), full) > 100 * FULL_PREFILL_LOGPROB
    answer = send(server, OTHER, blockreuse_tau=1000)
    assert usage(answer)["skipped_reason"] == "all_repaired"
    assert distance(answer, full) <= FULL_PREFILL_LOGPROB


def test_keys_are_moved_back_from_behind_companions_to_where_the_model_computes_them(family, server):
    """With one layer that attends, keys depend on token and position alone; homes lie behind where blocks are used."""
    ids, spans = LIBRARY.prompt(OTHER)
    assert spans[-2] > ORIGINAL_CONTEXT
    family.load("only_layer")
    try:
        full = family.full_prefill(ids)
        send(server, (0, 1, 2, 3, 4))
        moved = send(server, OTHER)
        assert usage(moved)["reused_tokens"] == sum(LIBRARY.doc_lens[i] for i in OTHER)
        assert distance(moved, full) <= FULL_PREFILL_LOGPROB
        server.flush_cache()
        send(server, (0, 1, 2, 3, 4))
        wrong = send(server, OTHER, testing_wrong_rope_base=family.model.wrong_rope_base)
        assert distance(wrong, full) > 100 * FULL_PREFILL_LOGPROB, "a rotation without the scaling is seen"
    finally:
        family.load("contextual")


@pytest.mark.parametrize("tenant", [{"cache_salt": "b"}, {"extra_key": "b"}], ids=["salt", "key"])
def test_a_foreign_tenant_s_documents_colour_no_answer(server, tenant):
    """The same two requests, before and after somebody else's; in one namespace the answer tells who came first."""
    foreign = Library(seed=9, doc_lens=LIBRARY.doc_lens, ids=IDS)
    foreign.system = LIBRARY.system

    def answers(before):
        server.flush_cache()
        for request in before:
            send(server, (0, 1, 2, 3), library=foreign, **request)
        send(server, (0, 1, 2, 3, 4), **tenant)
        return send(server, (4, 3, 2), **tenant)

    alone = answers(())
    beside = answers(({},))
    assert usage(beside) == usage(alone)
    assert beside["output_ids"] == alone["output_ids"]
    assert distance(beside, alone) <= FULL_PREFILL_LOGPROB
    # negative control: in the tenant's own namespace the first documents stand in front, whoever sent them
    coloured = answers((tenant,))
    assert distance(coloured, alone) > 100 * FULL_PREFILL_LOGPROB


def test_exact_requests_never_read_a_home_in_company(family, server):
    ids, _ = LIBRARY.prompt(OTHER)
    full = family.full_prefill(ids)
    send(server, (0, 1, 2, 3, 4))
    send(server, OTHER)
    exact = ask(server, ids, blockreuse_mode="exact")
    assert usage(exact)["prefix_tokens"] == SYSTEM
    assert distance(exact, full) <= FULL_PREFILL_LOGPROB


def test_an_emptied_tree_chooses_companions_anew(server):
    send(server, (0, 1, 2, 3, 4))
    server.flush_cache()
    before = homes(server)
    found = usage(send(server, (4, 3, 2, 1, 0)))
    assert homes(server) - before == 2
    assert found["prefix_tokens"] == SYSTEM + LIBRARY.doc_lens[4] + LIBRARY.doc_lens[3]


def test_a_block_alone_in_its_prompt_is_exact(family, server):
    library = Library(seed=4, doc_lens=(CHUNK,) * 4, ids=IDS)
    ids, _ = library.prompt((3,))
    full = family.full_prefill(ids)
    send(server, (0, 1, 2), library=library)
    answer = send(server, (3,), library=library)
    assert usage(answer)["reused_tokens"] == 0
    assert distance(answer, full) <= FULL_PREFILL_LOGPROB


def test_nothing_leaks(server):
    for order in ((0, 1, 2, 3), (3, 2, 1, 0), (4, 0), (1, 4, 2)):
        send(server, order)
        send(server, order, cache_salt="b")
    wait_until_idle(server)
    server.flush_cache()
    pool = state_of(server)["pool"]
    assert pool["free"] == pool["size"]
