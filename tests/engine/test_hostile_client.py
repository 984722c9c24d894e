"""What one client can do to the scheduler's thread of a real server, and to the server's life.

The model is so small that prefill costs next to nothing; the test plug-in's clock says what block reuse takes of the
thread that decodes for everybody. Copying KV is the device's work, as a forward is: on the CPU it runs in this thread,
and the clock has it apart. What bounds it is that no token of a prompt is copied twice. `-s` prints the worst of both.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import requests
from bounded import MS_PER_10K_TOKENS, MS_PER_REQUEST, allowed_ms
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prompts import usage
from servers import extended_server, with_test_plugin
from tiny_models import VOCAB, TinyModel

pytestmark = pytest.mark.engine

CONTEXT = 40_960
CHUNK = 8192
SMALL = {"num_hidden_layers": 1, "hidden_size": 32, "num_attention_heads": 1, "num_key_value_heads": 1}
SMALL |= {"intermediate_size": 32, "max_position_embeddings": CONTEXT}
FLAGS = ("--dtype", "float32", "--skip-tokenizer-init", "--max-total-tokens", "120000")
FLAGS += (
    "--context-length",
    str(CONTEXT),
    "--chunked-prefill-size",
    str(CHUNK),
    "--max-running-requests",
    "4",
)
CONFIGS = {
    "marked": "blocks: {}\n",
    "auto": "blocks: {auto: true}\n",
    "harvest": "blocks: {auto: true, compile: harvest}\n",
}


class Clocked:
    """A server and the clock of its scheduler's thread."""

    def __init__(self, kind: str, server, clock: Path):
        self.kind = kind  # of CONFIGS
        self.server = server
        # by stage: ms for 10K tokens, tokens, what it was
        self.worst: dict[str, tuple[float, int, str]] = {}
        self.num_broken = 0  # errors of ours that tests asked for
        self._clock = clock
        self._read = 0

    def taken(self) -> Counter[str]:
        """Milliseconds by stage since the last call."""
        lines = self._clock.read_text().splitlines() if self._clock.exists() else []
        found: Counter[str] = Counter()
        for line in lines[self._read :]:
            stage, ms = line.split()
            found[stage] += float(ms)
        self._read = len(lines)
        return found


@pytest.fixture(scope="module", params=CONFIGS)
def clocked(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hostile")
    model = TinyModel("llama", SMALL).write(folder / "model")
    config = folder / "config.yaml"
    config.write_text(CONFIGS[request.param])
    env = {**with_test_plugin(), "BLOCKREUSE_TESTING_CLOCK": str(folder / "clock")}
    flags = (*FLAGS, "--blockreuse-config", str(config))
    with extended_server(model, *flags, log=folder / "server.log", env=env) as server:
        yield Clocked(request.param, server, folder / "clock")


class TooSlow(AssertionError):
    """A request held the scheduler's thread for longer than it may."""


def serve(clocked: Clocked, what: str, ids, **params) -> None:
    """One request, whose stages together must keep to the bound; its homes are requests like any other."""
    clocked.taken()
    answer = clocked.server.generate(
        input_ids=ids, sampling_params={"max_new_tokens": 1, "temperature": 0, "custom_params": params}
    )
    taken = clocked.taken()
    num_home_tokens = int(taken.pop("home.tokens", 0))
    for who, num_tokens in (("main", len(ids)), ("home", num_home_tokens)):
        num_copied = taken.pop(f"{who}.copied", 0)
        assert num_copied <= num_tokens, (
            f"{what}: {num_copied} of {num_tokens} tokens copied; {usage(answer)}"
        )
        mine = {stage: ms for stage, ms in taken.items() if stage.startswith(who)}
        both = sum(mine.values())
        host = both - mine.get(f"{who}.copy", 0.0)
        for stage, ms in [*mine.items(), (f"{who}, host", host), (f"{who}, host and copy", both)]:
            if num_tokens > 2000 and 1e4 * ms / num_tokens > clocked.worst.get(stage, (0.0, 0, ""))[0]:
                clocked.worst[stage] = (1e4 * ms / num_tokens, num_tokens, what)
        stages = ", ".join(f"{stage} {ms:.1f} ms" for stage, ms in mine.items())
        if host > allowed_ms(num_tokens):
            raise TooSlow(f"{num_tokens} tokens, {what}: {host:.1f} ms: {stages}; {usage(answer)}")


def in_some_try(clocked: Clocked, scenario: Callable[[], None]) -> None:
    """Three tries for what must be fast: what else runs on the machine costs time of this thread, too."""
    for num_left in (2, 1, 0):
        try:
            return scenario()
        except TooSlow:
            if num_left == 0:
                raise
            clocked.server.flush_cache()


def comb(start: int, end: int, length: int, gap: int = 0) -> list[int]:
    return [x for s in range(start, end - length, length + gap) for x in (s, s + length)]


def random_ids(num: int, seed: int, vocab: int = VOCAB) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocab) for _ in range(num)]


LONG = 30_000
POLICIES = ["seam", "head", "query", "head+query", "deviation", "random"]


@pytest.mark.parametrize("policy", ["seam", "head+query"])
@pytest.mark.parametrize("length", [32, 400])
def test_a_prompt_full_of_blocks(clocked, policy, length):
    """Compiled, and asked again in another order: with every block behind 1,000 tokens of leading text."""
    clocked.server.flush_cache()
    blocks = [random_ids(length, seed) for seed in range((LONG - 1100) // length)]
    spans = comb(1000, 1001 + length * len(blocks), length)

    def both_turns() -> None:
        for turn in range(2):
            order = blocks if turn == 0 else blocks[::-1]
            ids = random_ids(1000, 7) + list(itertools.chain.from_iterable(order)) + random_ids(20, 8)
            what = f"{len(blocks)} blocks of {length}, {policy}, turn {turn}"
            serve(clocked, what, ids, blockreuse_spans=spans, blockreuse_policy=policy)

    in_some_try(clocked, both_turns)


@pytest.mark.parametrize("name", ["one token", "period", "holes", "snippets"])
def test_an_unmarked_prompt_that_is_hard_to_search(clocked, name):
    clocked.server.flush_cache()
    unique = random_ids(LONG, 1)
    holes = [3 if i % 40 == 39 else x for i, x in enumerate(unique)]
    snippets = [random_ids(128, seed) for seed in range(300)]
    donors, prompt = {
        "one token": ([[5] * LONG], [6] + [5] * LONG),
        "period": ([[7, 8] * 8 + random_ids(32, seed) for seed in range(4)], [7, 8] * (LONG // 2)),
        "holes": ([unique], [3, *holes]),
        "snippets": (snippets, list(itertools.chain.from_iterable(s[64:] for s in snippets))),
    }[name]

    def searched() -> None:
        for donor in donors:
            serve(clocked, f"donor: {name}", donor, blockreuse_mode="exact")
        serve(clocked, f"unmarked: {name}", prompt)
        serve(clocked, f"marked: {name}", prompt, blockreuse_spans=comb(1, len(prompt), 32))

    in_some_try(clocked, searched)


@st.composite
def drawn_requests(draw: st.DrawFn):
    """Stretches of a library behind each other, so that some were served before, and marks that say anything."""
    ids: list[int] = []
    for _ in range(draw(st.integers(1, 8))):
        source = random_ids(6000, draw(st.integers(0, 3)), draw(st.sampled_from([5, VOCAB])))
        first = draw(st.integers(0, 5000))
        ids += source[first : first + draw(st.integers(1, 3000))]
    at, spans = draw(st.integers(0, len(ids) - 1)), []
    while at < len(ids) - 1 and draw(st.integers(0, 9)):
        length, gap = draw(st.integers(1, 300)), draw(st.integers(0, 50))
        for _ in range(draw(st.integers(1, 400))):
            if at + length > len(ids):
                break
            spans += [at, at + length]
            at += length + gap
    params = {
        "blockreuse_mode": draw(st.sampled_from(["reuse", "reuse", "reuse", "exact", "off", "compile"])),
        "blockreuse_policy": draw(st.sampled_from(POLICIES)),
        "blockreuse_tau": draw(st.none() | st.integers(0, 40) | st.just(2**31 - 1)),
        "blockreuse_budget": draw(st.none() | st.floats(0, 1) | st.integers(32, 2**31 - 1)),
    }
    if spans:
        params["blockreuse_spans"] = spans
    elif params["blockreuse_mode"] == "compile":
        params["blockreuse_mode"] = "reuse"
    return ids, params


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(drawn_requests())
def test_whatever_a_client_draws(clocked, drawn):
    ids, params = drawn
    in_some_try(clocked, lambda: serve(clocked, f"drawn: {str(params)[:200]}", ids, **params))


MALFORMED = {
    "reversed": {"blockreuse_spans": [5, 3]},
    "overlapping": {"blockreuse_spans": [0, 5, 4, 9]},
    "outside": {"blockreuse_spans": [0, 101]},
    "negative": {"blockreuse_spans": [-1, 3]},
    "odd": {"blockreuse_spans": [1, 2, 3]},
    "more spans than tokens": {"blockreuse_spans": list(range(200_000))},
    "far away": {"blockreuse_spans": [0, 2**62]},
    "nested": {"blockreuse_spans": [[0, 5]] * 50_000},
    "an object": {"blockreuse_spans": {str(i): i for i in range(50_000)}},
    "text": {"blockreuse_spans": "0" * 1_000_000},
    "tau": {"blockreuse_tau": -1, "blockreuse_spans": [0, 40]},
    "large tau": {"blockreuse_tau": 2**40, "blockreuse_spans": [0, 40]},
    "budget": {"blockreuse_budget": 5, "blockreuse_spans": [0, 40]},
    "large budget": {"blockreuse_budget": 2**62, "blockreuse_spans": [0, 40]},
    "policy": {"blockreuse_policy": "x" * 100_000, "blockreuse_spans": [0, 40]},
    "mode": {"blockreuse_mode": ["reuse"], "blockreuse_spans": [0, 40]},
    "compile nothing": {"blockreuse_mode": "compile"},
    "question": {"blockreuse_question": [5, 2**62], "blockreuse_spans": [0, 40]},
    "parts": {"blockreuse_parts": True},
    "unknown": {"blockreuse_" + "x" * 100_000: 1},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_what_is_malformed_is_a_400_with_a_short_message(clocked, name):
    body = {
        "input_ids": random_ids(100, 1),
        "sampling_params": {"max_new_tokens": 1, "custom_params": MALFORMED[name]},
    }
    clocked.taken()
    answer = requests.post(clocked.server.url + "/generate", json=body, timeout=60)
    assert answer.status_code == 400
    assert len(answer.text) < 1000
    assert sum(clocked.taken().values()) <= allowed_ms(100)
    assert_lives(clocked)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({"extra_key": "blockreuse:seam:0123"}, id="a namespace of ours"),
        pytest.param({"input_ids": [VOCAB]}, id="an id that is no token"),
        pytest.param({"input_ids": [-1, 3]}, id="a negative id"),
        pytest.param({"return_logprob": True, "logprob_start_len": -7}, id="a negative start"),
    ],
)
def test_other_fields_of_a_request(clocked, body):
    body = {"input_ids": random_ids(100, 1), "sampling_params": {"max_new_tokens": 1}, **body}
    assert requests.post(clocked.server.url + "/generate", json=body, timeout=60).status_code == 400
    assert_lives(clocked)


def test_ids_of_requests_reach_nobody_else(clocked):
    """Two requests of one id, and aborts by the beginning of an id."""
    spans = comb(10, 2000, 64)
    ids = random_ids(2020, 3)
    for rid in ("b", "blockreuse-home-", "blockreuse-home-0"):
        with contextlib.suppress(requests.HTTPError):
            clocked.server.generate(
                input_ids=ids,
                rid=rid,
                sampling_params={"max_new_tokens": 1, "custom_params": {"blockreuse_spans": spans}},
            )
        clocked.server.post("/abort_request", rid=rid)
        assert_lives(clocked)


def test_homes_take_no_room_in_the_index(clocked):
    """It holds prompts of clients: seven homes behind 1,000 tokens would take four times as much as their prompt."""
    clocked.server.flush_cache()
    documents = random_ids(1000, 1000)
    ids = random_ids(1000, 1001) + documents + random_ids(20, 1002)
    before = state_of(clocked)
    serve(clocked, "ten blocks", ids, blockreuse_spans=comb(1000, 2001, 100))
    between = state_of(clocked)
    num_homes = between["counts"].get("homes_total", 0) - before["counts"].get("homes_total", 0)
    # the first three blocks stand as at home
    assert num_homes == (0 if clocked.kind == "harvest" else 7)
    serve(clocked, "the same, exact", ids, blockreuse_mode="exact")
    after = state_of(clocked)
    entered = [late["index"] != early["index"] for early, late in ((before, between), (between, after))]
    # negative control: a prompt that was served exactly is entered; `harvest` serves the first one so
    assert (
        entered == {"marked": [False, False], "auto": [False, True], "harvest": [True, False]}[clocked.kind]
    )


@pytest.mark.parametrize(("stage", "seed"), [("plan", 1003), ("load", 1004)], ids=["plan", "load"])
def test_an_id_in_the_log_is_short_and_printable(clocked, stage, seed):
    """The client chose it; the error is one that the test plug-in raises."""
    clocked.server.flush_cache()
    ids = random_ids(2020, seed)
    # twice: `harvest` reuses what an exact prompt left
    serve(clocked, "a donor", ids, blockreuse_mode="exact")
    before = len(clocked.server.log_text())
    params = {"blockreuse_spans": comb(21, 2021, 100), "testing_break": stage}
    answer = clocked.server.generate(
        input_ids=[5, *ids],
        rid="\x1b[2J\n" * 100_000 + stage,
        sampling_params={"max_new_tokens": 1, "custom_params": params},
    )
    clocked.num_broken += 1
    assert usage(answer)["skipped_reason"] == "internal_error"
    said = clocked.server.log_text()[before:]
    assert "testing_break" in said or "NoneType" in said
    assert len(said) < 20_000
    assert "\x1b" not in said


def state_of(clocked: Clocked) -> dict:
    return clocked.server.get("/server_info")["internal_states"][0]["blockreuse"]


def assert_lives(clocked: Clocked) -> None:
    answer = clocked.server.generate(input_ids=[5, 6, 7], sampling_params={"max_new_tokens": 1})
    assert answer["meta_info"]["finish_reason"]["type"] == "length"


def test_nothing_failed_and_nothing_is_left(clocked):
    """Stands last: no request met an error of ours, and every slot is where it belongs."""
    state = state_of(clocked)
    assert state["counts"].get("errors_total", 0) == clocked.num_broken, clocked.server.log_text()[-4000:]
    pool = state["pool"]
    assert pool["free"] + pool["evictable"] + pool["protected"] == pool["size"]
    print(
        f"{clocked.kind}: worst of the scheduler's thread, ms for 10K tokens of a prompt of more than 2,000;"
    )
    print(f"the host may take {MS_PER_10K_TOKENS:g}, and {MS_PER_REQUEST:g} for the request:")
    for stage, (per_10k, num, what) in sorted(clocked.worst.items()):
        print(f"  {stage:20s} {per_10k:6.2f}; {num} tokens, {what[:120]}")
