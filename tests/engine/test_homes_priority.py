"""Homes and those who wait for them under priorities and every scheduling policy of the host."""

from __future__ import annotations

import concurrent.futures
import random
import time

import pytest
from prompts import Library, random_ids, usage
from servers import no_company
from tiny_models import talking_model

pytestmark = pytest.mark.engine
TIMEOUT_S = 240.0
GREEDY = {"temperature": 0, "ignore_eos": True}
DOC_LEN = 200
FLAGS = ("--dtype", "float32", "--max-total-tokens", "9000", "--max-running-requests", "2")
FLAGS += ("--chunked-prefill-size", "128")


@pytest.fixture
def clients():
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
        yield pool


def generate(server, ids, spans=(), *, new_tokens=4, **body):
    params = {**GREEDY, "max_new_tokens": new_tokens, "custom_params": {"blockreuse_spans": list(spans)}}
    answer = server.generate(input_ids=ids, sampling_params=params, timeout_s=TIMEOUT_S, **body)
    return answer, time.monotonic()


def prompt(seed: int, order=(0, 1, 2)):
    return Library(seed=seed, doc_lens=(DOC_LEN,) * 3).prompt(order)


def occupy(server, clients, num: int, **body):
    """Requests that take every place and decode for long."""
    return [
        clients.submit(
            generate, server, random_ids(30, random.Random(i)), new_tokens=500, rid=f"long-{i}", **body
        )
        for i in range(num)
    ]


def wait_until(true) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def pool_in_use(server) -> int:
    pool = server.get("/server_info")["internal_states"][0]["blockreuse"]["pool"]
    return pool["size"] - pool["free"] - pool["evictable"]


class TestPriorities:
    """Larger numbers first; whoever is better by more than ten preempts."""

    @pytest.fixture(scope="class")
    def server(self, nursery, tmp_path_factory):
        folder = tmp_path_factory.mktemp("priority")
        flags = (*FLAGS, "--enable-priority-scheduling", "--max-queued-requests", "9", *no_company(folder))
        with nursery.server(talking_model(), *flags, log=folder / "server.log") as running:
            yield running

    @pytest.fixture(autouse=True)
    def empty_tree(self, server):
        server.flush_cache()

    def test_a_better_request_is_not_held_up_by_homes_that_a_worse_one_brought(self, server, clients):
        """The places are taken by requests between the two, which keep a worse home out."""
        running = occupy(server, clients, 2, priority=50)
        wait_until(lambda: pool_in_use(server) > 60)
        worse = clients.submit(generate, server, *prompt(1), priority=0)
        time.sleep(0.5)
        better = clients.submit(generate, server, *prompt(1, (2, 1, 0)), priority=100)
        answer, ended = better.result()
        assert usage(answer)["reused_tokens"] > 0
        assert all(ended < request.result()[1] for request in running)
        assert usage(worse.result()[0])["skipped_reason"] is None

    def test_a_held_request_preempts_nobody_whose_place_its_homes_do_not_need(self, server, clients):
        running = occupy(server, clients, 2, priority=50)
        wait_until(lambda: pool_in_use(server) > 60)
        same = clients.submit(generate, server, *prompt(2), priority=50)
        answer, ended = same.result()
        assert usage(answer)["reused_tokens"] > 0
        assert min(request.result()[1] for request in running) < ended, "equals wait for a place"

    def test_homes_that_find_no_place_in_the_queue_are_not_made(self, server, clients):
        running = occupy(server, clients, 2, priority=90)
        wait_until(lambda: pool_in_use(server) > 60)
        crowd = [
            clients.submit(generate, server, random_ids(20, random.Random(i)), priority=89) for i in range(7)
        ]
        time.sleep(0.5)
        answer, _ = generate(server, *prompt(3), priority=89)
        assert usage(answer)["skipped_reason"] == "queue_full"
        for request in (*running, *crowd):
            request.result()


@pytest.mark.parametrize("policy", ["lof", "routing-key"])
def test_homes_run_no_later_than_who_waits_for_them(nursery, tmp_path, policy):
    """The request is the one that the policy likes best, its homes would be the last: their answer is one token,
    under `lof`; nobody who runs has their key, under `routing-key`."""
    flags = (*FLAGS, "--schedule-policy", policy, *no_company(tmp_path))
    with (
        nursery.server(talking_model(), *flags, log=tmp_path / "server.log") as server,
        concurrent.futures.ThreadPoolExecutor(12) as clients,
    ):

        def load(numbers, routing_key, longer=0):
            return [
                clients.submit(
                    generate,
                    server,
                    random_ids(40, random.Random(i)),
                    new_tokens=60 + i + longer * i,
                    routing_key=routing_key,
                )
                for i in numbers
            ]

        # one of them goes on, or nobody who runs had the key by the time that the homes are done
        running = load(range(2), "liked", longer=250)
        wait_until(lambda: pool_in_use(server) > 60)
        waiting = load(range(2, 8), "other")
        marked = clients.submit(generate, server, *prompt(1), new_tokens=70, routing_key="liked")
        answer, ended = marked.result()
        assert usage(answer)["reused_tokens"] > 0
        assert ended < max(request.result()[1] for request in waiting)
        for request in running:
            request.result()
