"""Index keys, refreshes and the clock on the real server, every index key checked against its key in every step."""

from __future__ import annotations

import random

import pytest
from looks import counts
from plans import NUM_SCORING, plan_text
from prompts import Library, ask, distance, random_ids, usage
from servers import lease
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
RNG = random.Random(5)
LONG, OTHER = random_ids(420, RNG), random_ids(300, RNG)
PLAN = plan_text(
    "final_k: 96, pool_size: 160, sink: 4, window: 32, refresh_every: 4", "scorer: {kind: int4_keys}"
)


@pytest.fixture(scope="module")
def server():
    with lease(plan=PLAN, layers={"timing": True}, env={"BLOCKREUSE_TESTING_AUDIT": "1"}) as running:
        yield running


def stale(server) -> float:
    return counts(server).get("decode_stale_keys_total", 0)


class TestCopiesFollowTheirKeys:
    def test_through_prefill_decode_radix_hits_and_slots_that_change_hands(self, server):
        before = stale(server)
        for ids in (LONG, OTHER, LONG):
            ask(server, ids, new_tokens=6)
        server.flush_cache()  # the next request gets slots of the others
        ask(server, OTHER, new_tokens=6)
        assert stale(server) == before

    def test_through_moved_blocks_repair_and_the_next_turn(self, server):
        before = stale(server)
        library = Library(seed=31)
        first, spans = library.prompt((0, 1, 2, 3))
        ask(server, first, new_tokens=2, blockreuse_spans=spans)
        second, spans = library.prompt((3, 1, 0, 2))
        answer = ask(server, second, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1)
        assert usage(answer)["reused_tokens"] > 200
        turn = second + answer["output_ids"] + random_ids(60, random.Random(6))
        found = usage(ask(server, turn, new_tokens=6, blockreuse_spans=spans, blockreuse_budget=0.1))
        assert found["prefix_tokens"] + found["reused_tokens"] > 200
        assert stale(server) == before

    @pytest.mark.parametrize("marked", [False, True], ids=["computed", "moved"])
    def test_a_writer_that_says_nothing_is_detected(self, server, marked):
        """Negative control: the same traffic into slots that others held, announced by nobody."""
        library = Library(seed=41)
        first, spans = library.prompt((0, 1, 2, 3))
        second, marks = library.prompt((2, 0, 3, 1))
        for ids in (LONG, OTHER, random_ids(900, random.Random(7))):
            ask(server, ids, new_tokens=4)
        server.flush_cache()
        if marked:
            ask(server, first, new_tokens=1, blockreuse_spans=spans)
        before = stale(server)
        ask(
            server, second, new_tokens=4, testing_mute=True, **({"blockreuse_spans": marks} if marked else {})
        )
        assert stale(server) - before >= NUM_SCORING * 100
        ask(server, OTHER, new_tokens=1)  # whoever comes next announces again


def test_exact_requests_and_other_rows_are_not_harmed(server):
    exact = ask(server, LONG, new_tokens=8, blockreuse_mode="exact")
    server.flush_cache()
    sparse = ask(server, LONG, new_tokens=8)
    server.flush_cache()
    again = ask(server, LONG, new_tokens=8, blockreuse_mode="exact")
    assert distance(exact, again) <= FULL_PREFILL_LOGPROB
    assert distance(exact, sparse) > 100 * FULL_PREFILL_LOGPROB


def test_refreshes_are_counted(server):
    before = counts(server)
    ask(server, LONG, new_tokens=12)
    after = counts(server)
    risen = {name: after[name] - before.get(name, 0) for name in after}
    assert risen["decode_rows_total sparse"] == 11
    assert risen["decode_staleness_total steps"] == 2 * (2 * (0 + 1 + 2 + 3) + 0 + 1 + 2)
    assert risen["decode_tokens_total scanned"] == 2 * sum(len(LONG) + n for n in (1, 5, 9))
    assert risen.get("decode_own_scans_total reindex", 0) == 0


def test_seconds_are_counted_by_part_and_role(server):
    ask(server, LONG, new_tokens=6)
    found = {name.split(" ", 1)[1] for name in counts(server) if name.startswith("decode_seconds_total")}
    assert {
        "scan full",
        "rerank full",
        "compaction full",
        "copy full",
        "rerank reindex",
        "attention reuse",
    } <= found


def test_memory_is_logged(server):
    assert "blockreuse: index keys take" in server.log.read_text()
