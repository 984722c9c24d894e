"""Homes that outlive the pool, at length: other write policies, tight pools, 120 orders, two ranks."""

from __future__ import annotations

import concurrent.futures
import json
import random
import shutil
import statistics
from pathlib import Path

import pytest
import requests
from laws import host_memory, load, storage
from laws.distinct_orders import POOL, distinct_orders, generate, know_all, one_off, share
from laws.host_memory import DOC_LEN, HostMemory
from looks import state_of
from marked import wait_until_idle
from nursery import Nursery
from prompts import ask, random_ids, usage
from servers import lease, no_company, with_test_plugin
from tiny_models import TALKING, talking_model

from sglang_blockreuse.server_process import free_port

pytestmark = pytest.mark.engine
TWIN = "tests/engine/test_host_memory.py::TestWriteThrough"


@pytest.fixture(scope="module")
def wanted():
    with lease() as large:
        return host_memory.run(large)


@pytest.mark.nightly(twin=TWIN)
class TestWriteBack(HostMemory):
    @pytest.fixture(scope="class")
    def server(self):
        with lease(*host_memory.FLAGS, "--hicache-write-policy", "write_back") as running:
            yield running


@pytest.mark.nightly(twin=TWIN)
class TestPythonTree(HostMemory):
    """With KV events the host's other tree core serves."""

    @pytest.fixture(scope="class")
    def server(self):
        events = {"publisher": "zmq", "topic": "kv", "endpoint": f"tcp://*:{free_port()}"}
        with lease(*host_memory.FLAGS, "--kv-events-config", json.dumps(events)) as running:
            yield running


class _Tight(load.Load):
    """Aborts, retraction, chunks and exact requests, with room for half of the library on the host."""

    num_requests = 80
    num_prompts = 6
    pool_tokens = 1000  # for one large request, or for the library and no request
    write_policy = "write_through"

    @pytest.fixture(scope="class")
    def server(self):
        flags = (
            "--max-total-tokens",
            str(self.pool_tokens),
            "--enable-hierarchical-cache",
            "--hicache-ratio",
            "0.6",
        )
        flags += ("--hicache-write-policy", self.write_policy)
        with lease(*load.FLAGS, *flags, env=load.ENV) as running:
            yield running

    def test_slots_of_host_memory_add_up(self, server):
        pool = state_of(server)["pool"]
        assert pool["host_free"] < pool["host_size"], "KV is there"
        server.flush_cache()
        pool = state_of(server)["pool"]
        assert (pool["free"], pool["host_free"]) == (pool["size"], pool["host_size"])


@pytest.mark.nightly(twin=TWIN)
class TestTightWriteThrough(_Tight):
    pass


@pytest.mark.nightly(twin=TWIN)
class TestTightWriteBack(_Tight):
    write_policy = "write_back"


ORDERS = distinct_orders(120, seed=7)
EVICTION = "tests/engine/test_eviction_order.py::"
CASES = [
    ("alone", (), {}, 1, False),
    ("query", (), {"blockreuse_policy": "query"}, 1, False),
    ("four in flight", (), {}, 4, False),
    ("every second a one-off", ("--radix-eviction-policy", "slru"), {}, 1, True),
]


@pytest.mark.nightly(
    twin=EVICTION + "test_documents_that_fit_the_pool_stay_in_it_whatever_orders_they_come_in"
)
@pytest.mark.parametrize(
    ("flags", "params", "in_flight", "one_offs"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_reuse_does_not_fade_over_120_orders(flags, params, in_flight, one_offs):
    """The known system falls from a gain of 4.48 to 1.07 within four batches of new orders."""
    # four requests need room beside the documents
    pool = str(POOL + (in_flight - 1) * 650)
    with lease("--max-total-tokens", pool, *flags) as server:
        know_all(server)
        for order in ORDERS[:8]:
            generate(server, order, **params)  # homes are used for the second time

        def one(index: int) -> float:
            if one_offs and index % 2:
                one_off(server, index)
            return share(generate(server, ORDERS[index], **params))

        with concurrent.futures.ThreadPoolExecutor(in_flight) as clients:
            shares = list(clients.map(one, range(len(ORDERS))))
        early, late = statistics.mean(shares[10:30]), statistics.mean(shares[100:120])
        assert late > early - 0.05, (early, late)
        assert early > 0.6, "there is something to lose"
        assert state_of(server)["counts"].get("errors_total", 0) == 0


@pytest.mark.nightly(twin=TWIN)
@pytest.mark.parametrize("write_policy", ["write_through", "write_back"])
def test_two_ranks_find_the_same_homes_in_host_memory_and_answer_as_one(wanted, write_policy, tmp_path):
    """SGLang's rank consensus checker ends a server whose ranks decide differently."""
    env = {
        **with_test_plugin(),
        "SGLANG_ENABLE_RANK_CONSENSUS_CHECKER": "1",
        "CXX": "/no/such/compiler",
    }
    flags = (
        "--dtype",
        "float32",
        "--max-running-requests",
        "8",
        "--chunked-prefill-size",
        "128",
        "--tp-size",
        "2",
    )
    flags += (*host_memory.FLAGS, "--hicache-write-policy", write_policy, *no_company(tmp_path))
    with (
        Nursery(env) as nursery,
        nursery.server(talking_model(), *flags, log=tmp_path / "two.log", env=env) as server,
    ):
        found = host_memory.run(server)
        assert sum(host_memory.usage(answer)["host_tokens"] for answer in found) > host_memory.POOL
        for answer, want in zip(found, wanted, strict=True):
            assert host_memory.logprobs(answer) == pytest.approx(
                host_memory.logprobs(want), abs=host_memory.FULL_PREFILL_LOGPROB
            )
        assert state_of(server)["counts"].get("errors_total", 0) == 0


@pytest.mark.nightly(twin=TWIN)
def test_a_plan_begins_anew_where_the_host_does_not_bring_the_exact_prefix_back():
    """It leaves fewer than 10 tokens in host memory. A plan that began behind them would not compute them."""
    library = host_memory.LIBRARY
    known, order, blocks = library.system[:8], (4, 7), {"compile_prefix_text": "river"}
    ids, spans = library.prompt(order)
    ids = known + ids[len(library.system) :]
    spans = [at - len(library.system) + len(known) for at in spans]

    def answer_on(server, *, push_out: bool):
        ask(server, known + random_ids(40, random.Random(1)), new_tokens=1, top=0)
        compiled = {"blockreuse_spans": spans, "blockreuse_mode": "compile"}
        server.generate(input_ids=ids, sampling_params={"max_new_tokens": 1, "custom_params": compiled})
        for seed in range(3 if push_out else 0):
            one_off(server, seed)
        return ask(server, ids, new_tokens=3, top=4, blockreuse_spans=spans)

    with lease(blocks=blocks) as large:
        want = answer_on(large, push_out=False)
    with lease(*host_memory.FLAGS, blocks=blocks) as server:
        found = answer_on(server, push_out=True)
    told, would = usage(found), usage(want)
    assert (told["prefix_tokens"], would["prefix_tokens"]) == (0, len(known))
    assert told["host_tokens"] == told["reused_tokens"] == would["reused_tokens"] > 0
    assert host_memory.logprobs(found) == pytest.approx(
        host_memory.logprobs(want), abs=host_memory.FULL_PREFILL_LOGPROB
    )


@pytest.mark.nightly(twin=TWIN)
def test_written_selectively_a_home_that_was_used_goes_to_host_memory_and_a_prompt_that_came_once_does_not():
    with lease(*host_memory.FLAGS, "--hicache-write-policy", "write_through_selective") as server:
        one_off(server, 1)
        wait_until_idle(server)
        pool = state_of(server)["pool"]
        assert pool["host_free"] == pool["host_size"]
        host_memory.generate(server, (0, 1, 2, 3))
        wait_until_idle(server)
        pool = state_of(server)["pool"]
        # the first document stands in the prompt itself, which came once
        assert pool["host_size"] - pool["host_free"] >= 3 * DOC_LEN


STORAGE = "tests/engine/test_storage_server.py::"


@pytest.fixture(scope="module")
def store(nursery, tmp_path_factory):
    """A folder that a server of the talking model has filled, which is gone."""
    folder = tmp_path_factory.mktemp("store")
    with nursery.server(
        talking_model(), *storage.flags_of(folder), log=folder.parent / "filled.log"
    ) as server:
        storage.fill(server, folder)
    return folder


def other_weights(tmp_path) -> Path:
    """The talking model with other weights."""
    folder = shutil.copytree(talking_model(), tmp_path / "other")
    TALKING.write(folder, seed=1)
    return folder


@pytest.mark.nightly(twin=STORAGE + "test_another_tenant_finds_nothing_on_storage")
@pytest.mark.parametrize("what", ["weights", "dtype", "nothing"])
def test_kv_of_another_model_is_never_found_on_storage(nursery, store, tmp_path, what):
    """The control: the same model finds all of it. Both models are served under one name."""
    model = other_weights(tmp_path) if what == "weights" else talking_model()
    flags = ("--dtype", "bfloat16") if what == "dtype" else ()
    with nursery.server(model, *storage.flags_of(store), *flags, log=tmp_path / "log") as server:
        found = usage(storage.generate(server, storage.AFTER))
    assert found["storage_tokens"] == (storage.NUM_HOMES * DOC_LEN if what == "nothing" else 0)


@pytest.mark.nightly(twin=STORAGE + "test_a_restarted_server_reuses_what_storage_has")
def test_a_second_server_reads_what_the_first_one_writes(nursery, tmp_path):
    folder = tmp_path / "store"
    flags = storage.flags_of(folder)
    with (
        nursery.server(talking_model(), *flags, log=tmp_path / "one.log") as first,
        nursery.server(talking_model(), *flags, log=tmp_path / "two.log") as second,
    ):
        storage.fill(first, folder)
        found = usage(storage.generate(second, storage.AFTER))
    assert (found["storage_tokens"], found["compiled_tokens"]) == (storage.NUM_HOMES * DOC_LEN, 0)


@pytest.mark.nightly(twin=STORAGE + "test_weights_are_not_updated_under_a_store_of_the_old_ones")
def test_storage_that_is_attached_behind_an_update_of_weights_has_another_name(nursery, store, tmp_path):
    key = {"Authorization": "Bearer key"}
    flags = (*storage.flags_of(store), "--admin-api-key", "key")
    with nursery.server(talking_model(), *flags, log=tmp_path / "log") as server:

        def ask(method: str, path: str, **body) -> None:
            answer = requests.request(method, server.url + path, json=body, headers=key, timeout=300)
            assert answer.ok, answer.text
            assert '"success":false' not in answer.text, answer.text

        ask("DELETE", "/hicache/storage-backend")
        ask("POST", "/update_weights_from_disk", model_path=str(other_weights(tmp_path)))
        settings = json.dumps({"file_storage_path": str(store)})
        ask(
            "PUT",
            "/hicache/storage-backend",
            hicache_storage_backend="file",
            hicache_storage_backend_extra_config_json=settings,
        )
        found = usage(storage.generate(server, storage.AFTER))
        assert (found["storage_tokens"], found["compiled_tokens"]) == (0, storage.NUM_HOMES * DOC_LEN)


@pytest.mark.nightly(twin=STORAGE + "test_a_restarted_server_reuses_what_storage_has")
def test_a_store_that_fails_and_dawdles_costs_time_and_nothing_else(nursery, store, tmp_path):
    env = {
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_FAILURE": "0.3",
        "SGLANG_TEST_HICACHE_BACKEND_RANDOM_DELAY": "0.05",
    }
    with nursery.server(talking_model(), *storage.flags_of(store), log=tmp_path / "log", env=env) as server:
        want = storage.generate(server, storage.AFTER, blockreuse_mode="exact")
        for _ in range(6):
            server.flush_cache()
            reused = storage.generate(server, storage.AFTER)
            assert usage(reused)["reused_tokens"] > 0
            told = usage(reused)
            assert told["storage_tokens"] + told["compiled_tokens"] == storage.NUM_HOMES * DOC_LEN
            server.flush_cache()
            exact = storage.generate(server, storage.AFTER, blockreuse_mode="exact")
            assert host_memory.logprobs(exact) == pytest.approx(
                host_memory.logprobs(want), abs=host_memory.FULL_PREFILL_LOGPROB
            )
        wait_until_idle(server)
        server.flush_cache()
        pool = state_of(server)["pool"]
        assert (pool["free"], pool["host_free"]) == (pool["size"], pool["host_size"])
        assert state_of(server)["counts"].get("errors_total", 0) == 0
