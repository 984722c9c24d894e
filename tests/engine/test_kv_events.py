"""What the server advertises in `--kv-events-config`: KV that anybody may use who has the tokens before it.

A subscriber rebuilds from the events which token sequences the server says it holds, as a router does.
"""

from __future__ import annotations

import json
import time

import msgspec
import pytest
import zmq
from prompts import Library, ask, usage
from servers import extended_server, no_company
from tiny_models import SUPPORTED, VOCAB

from sglang_blockreuse.server_process import HOST, free_port

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=7, doc_lens=(120, 90, 100), ids=range(10, VOCAB))
POOL = 1500  # tokens; a few prompts more and the tree evicts
FLAGS = ("--dtype", "float32", "--max-total-tokens", str(POOL), "--max-running-requests", "4")
FLAGS += ("--skip-tokenizer-init",)
FIELDS = ("type", "block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium")
QUIET_MS = 1500  # no event for so long: the server has said what it had to say


class Router:
    """Believes every event."""

    def __init__(self, endpoint: str):
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.setsockopt_string(zmq.SUBSCRIBE, "")
        self.held: dict[int, tuple[int, ...]] = {}  # block hash -> the tokens from the root to its end
        self.strange: list[object] = []  # removals of what was never announced
        self.num_removed = 0

    def listen(self) -> None:
        while self._socket.poll(QUIET_MS):
            for raw in msgspec.msgpack.decode(self._socket.recv_multipart()[-1])[1]:
                self._take(raw if isinstance(raw, dict) else dict(zip(FIELDS, raw, strict=False)))

    def _take(self, event: dict) -> None:
        if event["type"] == "AllBlocksCleared":
            self.held.clear()
        elif event["type"] == "BlockRemoved":
            self.strange += [block for block in event["block_hashes"] if block not in self.held]
            self.num_removed += len(event["block_hashes"])
            for block in event["block_hashes"]:
                self.held.pop(block, None)
        else:
            parent, size = event["parent_block_hash"], event["block_size"]
            path = self.held[parent] if parent is not None else ()
            for at, block in enumerate(event["block_hashes"]):
                path += tuple(event["token_ids"][at * size : (at + 1) * size])
                self.held[block] = path

    def knows(self, ids) -> bool:
        return tuple(ids) in self.held.values()

    def close(self) -> None:
        self._socket.close(linger=0)


@pytest.fixture(scope="module", params=["default", "dynamo"])
def world(request, tmp_path_factory):
    """(server, router)."""
    folder = tmp_path_factory.mktemp("kv-events")
    model = SUPPORTED["llama llama3"].write(folder / "model")
    port = free_port()
    config = {"publisher": "zmq", "endpoint": f"tcp://*:{port}", "topic": "kv"}
    if request.param != "default":
        config["format"] = request.param
    flags = (*FLAGS, "--kv-events-config", json.dumps(config), *no_company(folder))
    with extended_server(model, *flags, log=folder / "server.log") as server:
        router = Router(f"tcp://{HOST}:{port}")
        time.sleep(1)  # a subscription takes its time, and nobody repeats events
        yield server, router
        router.close()


@pytest.fixture(autouse=True)
def empty_tree(world):
    server, router = world
    server.flush_cache()
    router.listen()
    router.held.clear()
    router.strange.clear()


def reuse(server, order=(1, 0), **params):
    """A prompt whose second document stands elsewhere than in its home: its usage, its tokens and its spans."""
    know(server)
    ids, spans = LIBRARY.prompt(order)
    answer = ask(server, ids, new_tokens=8, blockreuse_spans=spans, **params)
    return usage(answer), ids + answer["output_ids"], spans


def know(server):
    ids, spans = LIBRARY.prompt((0, 1))
    ask(server, ids, new_tokens=1, blockreuse_spans=spans)


def test_every_announced_chain_begins_like_a_prompt(world):
    server, router = world
    found, row, spans = reuse(server)
    assert found["reused_tokens"] > 0
    again = usage(ask(server, [*row, 11, 12, 13], blockreuse_spans=spans))
    router.listen()
    assert again["reused_tokens"] > found["reused_tokens"], "the tree holds the path that nobody was told of"
    system = tuple(LIBRARY.system)
    strangers = [path for path in router.held.values() if path[: len(system)] != system[: len(path)]]
    assert not strangers, f"{len(strangers)} blocks from the middle of a prompt are announced as a prefix"


def test_exact_kv_is_announced_with_and_without_marks(world):
    server, router = world
    plain = LIBRARY.prompt((2,))[0]
    ask(server, plain, new_tokens=1)
    _, row, _ = reuse(server)
    router.listen()
    assert router.knows(plain)
    for doc in (0, 1):
        assert router.knows(LIBRARY.system + LIBRARY.docs[doc]), "a home is an ordinary prompt"
    assert router.knows(row[: len(LIBRARY.system) + len(LIBRARY.docs[1])])
    assert not router.knows(row[: len(LIBRARY.system) + len(LIBRARY.docs[1]) + len(LIBRARY.docs[0])])


def test_what_is_removed_was_announced(world):
    server, router = world
    before = router.num_removed
    reuse(server)
    for seed in range(8):
        ids, _ = Library(seed=20 + seed, doc_lens=(400,), ids=range(10, VOCAB)).prompt((0,))
        ask(server, ids, new_tokens=1)
    router.listen()
    assert router.num_removed > before + POOL, "the tree evicted, our path among it"
    assert not router.strange


def test_a_namespace_of_a_client_is_announced_as_the_host_does(world):
    """Ours are kept to ourselves, not those of others."""
    server, router = world
    ids = LIBRARY.prompt((2,))[0]
    ask(server, ids, new_tokens=1, extra_key="somebody")
    router.listen()
    assert router.knows(ids)
