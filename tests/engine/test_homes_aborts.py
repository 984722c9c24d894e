"""Homes end, and whoever waits for them is told: aborts by prefix, aborts of all, time in the queue."""

from __future__ import annotations

import concurrent.futures
import random
import time

import pytest
from prompts import Library, random_ids, usage
from servers import no_company
from tiny_models import talking_model

from sglang_blockreuse.blocks.compile import HOME_ID_PREFIX

pytestmark = pytest.mark.engine
TIMEOUT_S = 240.0
GREEDY = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
DOC_LEN = 300


@pytest.fixture(scope="module")
def server(nursery, tmp_path_factory):
    flags = ("--dtype", "float32", "--max-total-tokens", "8000", "--max-running-requests", "2")
    folder = tmp_path_factory.mktemp("aborts")
    flags += ("--chunked-prefill-size", "32", *no_company(folder))
    with nursery.server(talking_model(), *flags, log=folder / "server.log") as running:
        yield running


@pytest.fixture(autouse=True)
def empty_tree(server):
    server.flush_cache()


@pytest.fixture
def clients():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        yield pool


def generate(server, ids, spans=(), *, mode="reuse", new_tokens=4, **body):
    custom = {"blockreuse_spans": list(spans), "blockreuse_mode": mode}
    params = {**GREEDY, "max_new_tokens": new_tokens, "custom_params": custom}
    return server.generate(input_ids=ids, sampling_params=params, timeout_s=TIMEOUT_S, **body)


def state(server):
    return server.get("/server_info")["internal_states"][0]["blockreuse"]


def wait_for_homes(server, before: float) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while state(server)["counts"].get("homes_total", 0) <= before:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def documents(seed: int, num: int = 3) -> Library:
    return Library(seed=seed, doc_lens=(DOC_LEN,) * num)


def occupy(server, clients, rid: str):
    """A request that decodes for as long as the test needs."""
    running = clients.submit(generate, server, random_ids(40, random.Random(rid)), new_tokens=900, rid=rid)
    deadline = time.monotonic() + TIMEOUT_S
    while not _runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return running


def _runs(server) -> bool:
    pool = state(server)["pool"]
    return pool["free"] + pool["evictable"] < pool["size"]


def wait_until_idle(server) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while _runs(server):
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("rid", ["b", "blockreuse-home-", HOME_ID_PREFIX + "0"])
def test_nobody_aborts_the_homes_of_others_by_the_id_of_a_request(server, clients, rid):
    """The host aborts every request whose id begins with the one that is sent."""
    mine = occupy(server, clients, rid)
    ids, spans = documents(1).prompt((0, 1, 2))
    before = state(server)["counts"].get("homes_total", 0)
    other = clients.submit(generate, server, ids, spans, mode="compile", rid="someone-else")
    wait_for_homes(server, before)
    server.post("/abort_request", rid=rid)
    assert mine.result()["meta_info"]["finish_reason"]["type"] == "abort", "the control: it does abort"
    found = usage(other.result())
    assert (found["compiled_tokens"], found["skipped_reason"]) == (3 * DOC_LEN, "mode_compile")
    moved = documents(1).prompt((2, 0, 1))
    assert usage(generate(server, *moved))["compiled_tokens"] == 0, "what was said to be compiled is there"


def test_aborting_all_takes_the_homes_and_who_waits_for_them(server, clients):
    occupant = occupy(server, clients, "occupant")
    before = state(server)["counts"].get("homes_total", 0)
    ids, spans = documents(2).prompt((0, 1, 2))
    waiting = [clients.submit(generate, server, ids, spans, mode=mode) for mode in ("reuse", "compile")]
    # of the second and third document, and of the first too where nothing but homes is asked for
    wait_for_homes(server, before + 2)
    server.post("/abort_request", abort_all=True)
    for request in (occupant, *waiting):
        assert request.result()["meta_info"]["finish_reason"]["type"] == "abort"
    server.flush_cache()
    pool = state(server)["pool"]
    assert pool["free"] == pool["size"]
    # nobody waits for a home that is gone
    assert usage(generate(server, ids, spans))["compiled_tokens"] == 2 * DOC_LEN


def test_an_abort_of_the_request_that_brought_homes_leaves_them_to_the_others(server, clients):
    before = state(server)["counts"].get("homes_total", 0)
    occupant = occupy(server, clients, "occupant")
    ids, spans = documents(3).prompt((0, 1, 2))
    bringer = clients.submit(generate, server, ids, spans, rid="bringer")
    wait_for_homes(server, before)
    joiner = clients.submit(generate, server, *documents(3).prompt((2, 1, 0)), rid="joiner")
    server.post("/abort_request", rid="bringer")
    bringer.result()
    assert usage(joiner.result())["reused_tokens"] > 0
    server.post("/abort_request", rid="occupant")
    occupant.result()


def test_homes_that_nobody_waits_for_any_longer_are_not_computed(server, clients):
    before = state(server)["counts"].get("homes_total", 0)
    occupants = [occupy(server, clients, f"occupant-{i}") for i in range(2)]
    ids, spans = documents(4).prompt((0, 1, 2))
    bringer = clients.submit(generate, server, ids, spans, rid="bringer")
    wait_for_homes(server, before)
    server.post("/abort_request", rid="bringer")
    bringer.result()
    for i, occupant in enumerate(occupants):
        server.post("/abort_request", rid=f"occupant-{i}")
        occupant.result()
    wait_until_idle(server)
    assert usage(generate(server, ids, spans))["compiled_tokens"] == 2 * DOC_LEN
