"""Two replicas behind SGLang's router: the same documents go where they are known, and answers stay the same.

`Router` is a test class but for the model of its replicas.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
import requests
from prompts import usage
from servers import lease

from sglang_blockreuse.server_process import HOST, POLL_S, Server, free_port, stop_tree

SEPARATOR = "<<<document>>>"
START_TIMEOUT_S = 120.0
GROUPS = (
    [
        f"The {thing} over the Orla was opened in {1900 + i}. " * 8
        for i, thing in enumerate(("bridge", "gate", "lift"))
    ],
    [f"Captain {name} keeps a log of every storm. " * 8 for name in ("Brandt", "Dorr", "Moss")],
)
QUESTIONS = ("What was opened?", "Who keeps a log?", "When was it?")
LONG = 48  # tokens of the answer during which another request arrives


@contextlib.contextmanager
def router(replicas: tuple[Server, ...], policy: str, log) -> Iterator[Server]:
    """SGLang's router in front of the replicas, ready when it knows all of them."""
    port = free_port()
    flags = ["--host", HOST, "--port", str(port), "--prometheus-port", str(free_port()), "--policy", policy]
    command = [sys.executable, "-m", "sglang_router.launch_router", *flags, "--worker-urls"]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *(replica.url for replica in replicas)], stdout=output, stderr=subprocess.STDOUT
        )
    server = Server(url=f"http://{HOST}:{port}", log=log, pid=process.pid)
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _knows(server, len(replicas)):
            assert process.poll() is None, server.log_text()[-3000:]
            assert time.monotonic() < deadline, server.log_text()[-3000:]
            time.sleep(POLL_S)
        yield server
    finally:
        stop_tree(process)


def _knows(server: Server, num: int) -> bool:
    with contextlib.suppress(requests.RequestException):
        workers = server.get("/workers")["workers"]
        return sum(bool(worker["is_healthy"]) for worker in workers) == num
    return False


def ask(server: Server, group: int, question: str, *, new_tokens: int = 6, **custom_params) -> dict:
    text = SEPARATOR.join(["Answer.\n", *GROUPS[group], f"\n{question}"])
    params = {
        "temperature": 0,
        "max_new_tokens": new_tokens,
        "ignore_eos": True,
        "custom_params": custom_params,
    }
    return server.generate(text=text, sampling_params=params)


def complete(server: Server, group: int, question: str) -> str:
    """An exact answer."""
    text = SEPARATOR.join(["Answer.\n", *GROUPS[group], f"\n{question}"])
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}
    asked = {"custom_params": {"blockreuse_mode": "exact"}}
    answer = server.post("/v1/completions", model="small", prompt=text, **params, **asked)
    return str(answer["choices"][0]["text"])


def num_exact(replicas: tuple[Server, ...]) -> int:
    states = [replica.get("/server_info")["internal_states"][0]["blockreuse"] for replica in replicas]
    return sum(state["counts"].get("requests_total mode_exact", 0) for state in states)


def num_served(replicas: tuple[Server, ...]) -> list[int]:
    """Finished requests of each replica, but for SGLang's warm-up, which marks nothing."""
    states = [replica.get("/server_info")["internal_states"][0]["blockreuse"] for replica in replicas]
    counts = [state["counts"] for state in states]
    marked = [
        key for key in set().union(*counts) if key.startswith("requests_total") and "no_blocks" not in key
    ]
    return [sum(count.get(key, 0) for key in marked) for count in counts]


def routed(server: Server, replicas: tuple[Server, ...], *questions) -> list[tuple[int, dict]]:
    """(replica, answer) of each (group, question), one after the other."""
    found = []
    for group, question in questions:
        before = num_served(replicas)
        answer = ask(server, group, question)
        (index,) = [i for i, n in enumerate(num_served(replicas)) if n > before[i]]
        found.append((index, answer))
    return found


def load_of(server: Server) -> int:
    """Requests that the router has given out and that have not come back."""
    return sum(worker["load"] for worker in server.get("/workers")["workers"])


class Router:
    model: str

    @pytest.fixture(scope="class")
    def replicas(self):
        blocks = {"separator": SEPARATOR}
        with (
            lease("--random-seed", "1", model=self.model, blocks=blocks) as first,
            lease("--random-seed", "2", model=self.model, blocks=blocks) as second,
        ):
            yield first, second

    def test_the_same_documents_go_to_the_replica_that_knows_them(self, replicas, tmp_path):
        """What nobody knows goes to an idle replica, so the second group arrives while the first is answered."""
        for replica in replicas:
            replica.flush_cache()
        first_sight = num_served(replicas)
        with router(replicas, "cache_aware", tmp_path / "router.log") as server:
            with concurrent.futures.ThreadPoolExecutor() as pool:
                answers = [pool.submit(ask, server, 0, QUESTIONS[0], new_tokens=LONG)]
                while load_of(server) == 0 and not answers[0].done():
                    time.sleep(POLL_S / 10)
                answers.append(pool.submit(ask, server, 1, QUESTIONS[0], new_tokens=LONG))
            assert [after - n for n, after in zip(first_sight, num_served(replicas), strict=True)] == [1, 1]
            found = routed(
                server, replicas, *((group, question) for question in QUESTIONS[1:] for group in (0, 1))
            )
        new = [answer.result() for answer in answers]
        assert [usage(answer)["compiled_tokens"] > 0 for answer in new] == [True, True]
        places = [index for index, _ in found]
        assert places in ([0, 1, 0, 1], [1, 0, 1, 0])
        for _, answer in found:
            told = usage(answer)
            known = told["prefix_tokens"] + told["reused_tokens"] + told["repaired_tokens"]
            assert told["compiled_tokens"] == 0
            assert known > 0.8 * answer["meta_info"]["prompt_tokens"]

        # a single server that gets the requests of one group answers the same, token by token
        alone = replicas[0]
        alone.flush_cache()
        single = [ask(alone, 0, QUESTIONS[0], new_tokens=LONG), *(ask(alone, 0, q) for q in QUESTIONS[1:])]
        for one, through in zip(single, [new[0], found[0][1], found[2][1]], strict=True):
            assert one["output_ids"] == through["output_ids"]
            assert usage(one) == usage(through)

    def test_taking_turns_makes_every_replica_compile_the_same_documents(self, replicas, tmp_path):
        for replica in replicas:
            replica.flush_cache()
        with router(replicas, "round_robin", tmp_path / "router.log") as server:
            found = routed(server, replicas, *((0, question) for question in QUESTIONS))
        places = [index for index, _ in found]
        assert places in ([0, 1, 0], [1, 0, 1])
        assert [usage(answer)["compiled_tokens"] > 0 for _, answer in found] == [True, True, False]

    def test_exact_answers_are_those_of_a_single_server(self, replicas, tmp_path):
        """On /v1/completions, where the router hands `custom_params` on."""
        with router(replicas, "cache_aware", tmp_path / "router.log") as server:
            for group, question in enumerate(QUESTIONS[:2]):
                before = num_exact(replicas)
                through = complete(server, group, question)
                assert num_exact(replicas) == before + 1
                for replica in replicas:
                    assert complete(replica, group, question) == through

    def test_the_router_drops_what_generate_asks_of_blocks(self, replicas, tmp_path):
        """Not ours to mend, and said in docs/scale.md: this fails on the day that the router hands it on."""
        with router(replicas, "cache_aware", tmp_path / "router.log") as server:
            assert usage(ask(server, 0, QUESTIONS[0], blockreuse_mode="exact"))["mode"] == "reuse"
        assert usage(ask(replicas[0], 0, QUESTIONS[0], blockreuse_mode="exact"))["mode"] == "exact"
