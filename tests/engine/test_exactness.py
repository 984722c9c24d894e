"""Exactness on the real engine in float32: what must equal a full prefill does, and what differs is seen.

One server serves all tests of this file.
"""

from __future__ import annotations

import concurrent.futures
import itertools

import pytest
from looks import counts
from prompts import Library, ask, distance, know, usage
from servers import lease
from tolerances import FULL_PREFILL_LOGPROB

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=1)
ORDER, OTHER = (0, 1, 2, 3), (2, 0, 3, 1)
CHUNK = 128  # tokens of one prefill step, so that most prompts here take several


@pytest.fixture(scope="module")
def server():
    with lease() as running:
        yield running


def reference(server, ids, **options):
    """A full prefill on an empty tree, which it leaves empty again."""
    server.flush_cache()
    answer = ask(server, ids, blockreuse_mode="off", **options)
    server.flush_cache()
    return answer


class TestVirtualRows:
    def test_several_rows_equal_one_full_prefill(self, server):
        ids, _ = LIBRARY.prompt(ORDER)
        full = reference(server, ids)
        cuts = [0, 17, 60, 61, 140, 141, 300, len(ids) - 1, len(ids)]
        rows = [x for pair in itertools.pairwise(cuts) for x in pair]
        split = ask(server, ids, testing_rows=rows)
        assert split["output_ids"] == full["output_ids"]
        assert distance(split, full) <= FULL_PREFILL_LOGPROB

    def test_rows_behind_a_cached_prefix_equal_one_full_prefill(self, server):
        ids, _ = LIBRARY.prompt(ORDER)
        full = reference(server, ids)
        ask(server, [*ids[:100], 7], new_tokens=1)
        split = ask(server, ids, testing_rows=[100, 130, 130, 131, 131, len(ids)])
        assert split["meta_info"]["cached_tokens"] == 100
        assert distance(split, full) <= FULL_PREFILL_LOGPROB

    def test_input_logprobs_come_through_rows_unchanged(self, server):
        ids, spans = LIBRARY.prompt(OTHER)
        start = spans[-2] + 5
        full = reference(server, ids, logprob_start_len=start)
        know(server, LIBRARY)
        reused = ask(server, ids, blockreuse_spans=spans, logprob_start_len=start, blockreuse_tau=1000)
        rows = ask(
            server, ids, testing_rows=[0, 9, 9, start - 3, start - 3, len(ids)], logprob_start_len=start
        )
        want = [v for v, *_ in full["meta_info"]["input_token_logprobs"] if v is not None]
        for answer in (reused, rows):
            got = [v for v, *_ in answer["meta_info"]["input_token_logprobs"] if v is not None]
            assert len(got) == len(want) == len(ids) - start - 1
            assert max(abs(x - y) for x, y in zip(got, want, strict=True)) <= FULL_PREFILL_LOGPROB

    def test_positions_with_wanted_logprobs_are_computed(self, server):
        know(server, LIBRARY)
        ids, spans = LIBRARY.prompt(OTHER)
        start = spans[2] + 10
        found = usage(ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2, logprob_start_len=start))
        assert 0 < found["reused_tokens"] + found["prefix_tokens"] <= start


class TestDegeneration:
    @pytest.mark.parametrize(
        "options", [{"blockreuse_tau": 1000}, {"blockreuse_budget": 1.0}], ids=["tau", "budget"]
    )
    def test_repairing_every_block_equals_full_prefill(self, server, options):
        ids, spans = LIBRARY.prompt(OTHER)
        full = reference(server, ids)
        know(server, LIBRARY)
        answer = ask(server, ids, blockreuse_spans=spans, **options)
        assert usage(answer)["reused_tokens"] == 0
        assert distance(answer, full) <= FULL_PREFILL_LOGPROB
        assert answer["output_ids"] == full["output_ids"]

    def test_moved_blocks_without_repair_are_seen_to_differ(self, server):
        """Negative control for all of the above: the comparison can fail."""
        ids, spans = LIBRARY.prompt(OTHER)
        full = reference(server, ids)
        know(server, LIBRARY)
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
        assert usage(answer)["reused_tokens"] > 300
        assert distance(answer, full) > 100 * FULL_PREFILL_LOGPROB

    def test_same_place_and_context_has_difference_zero(self, server):
        """A copied block equals the computed one in every bit, so the answer does too.

        The first request computes the block and the question in two chunks of one forward each; the second
        copies the block and computes the question in a forward of the same shape.
        """
        library = Library(seed=2, doc_lens=(CHUNK,))
        ids, spans = library.prompt((0,))
        ask(server, [*library.system, 7], new_tokens=1)
        computed = ask(server, ids)
        copied = ask(
            server,
            ids,
            testing_max_prefix=spans[0],
            testing_all_homes=True,
            blockreuse_spans=spans,
            blockreuse_tau=0,
        )
        assert computed["meta_info"]["cached_tokens"] == copied["meta_info"]["cached_tokens"] == spans[0]
        assert usage(copied)["reused_tokens"] == CHUNK
        assert copied["output_ids"] == computed["output_ids"]
        assert distance(copied, computed) == 0.0


class TestErrorsOfOurs:
    @pytest.mark.parametrize("stage", ["plan", "load"])
    def test_an_error_costs_the_request_its_reuse_only(self, server, stage):
        ids, spans = LIBRARY.prompt(OTHER)
        full = reference(server, ids)
        know(server, LIBRARY)
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0, testing_break=stage)
        assert usage(answer)["skipped_reason"] == "internal_error"
        assert usage(answer)["reused_tokens"] == 0
        assert answer["output_ids"] == full["output_ids"]
        assert distance(answer, full) <= FULL_PREFILL_LOGPROB
        assert usage(ask(server, ids, blockreuse_spans=spans, blockreuse_mode="exact"))["prefix_tokens"] > 100
        server.flush_cache()  # the server lives, and nothing is locked any more


class TestIdentity:
    def test_exact_requests_never_read_local_kv(self, server):
        ids, spans = LIBRARY.prompt(OTHER)
        full = reference(server, ids)
        know(server, LIBRARY)
        ask(server, ids, blockreuse_spans=spans, blockreuse_tau=2)
        exact = ask(server, ids, blockreuse_spans=spans, blockreuse_mode="exact")
        unmarked = ask(server, ids)
        for answer in (exact, unmarked):
            assert distance(answer, full) <= FULL_PREFILL_LOGPROB
            assert answer["output_ids"] == full["output_ids"]
        assert usage(exact)["skipped_reason"] == "mode_exact"

    def test_another_compile_prefix_has_homes_of_its_own(self, server):
        know(server, LIBRARY)
        stranger = Library(seed=1)
        stranger.system = [t + 1 for t in stranger.system]
        ids, spans = stranger.prompt(OTHER)
        homes_before = counts(server)["homes_total"]
        found = usage(ask(server, ids, blockreuse_spans=spans))
        homes = counts(server)["homes_total"]
        assert homes - homes_before == 3, "nothing compiled behind the other prefix may serve"
        assert found["prefix_tokens"] <= len(stranger.system)

    @pytest.mark.parametrize(
        "namespace", [{"cache_salt": "tenant-b"}, {"extra_key": "tenant-b"}], ids=["salt", "key"]
    )
    def test_a_foreign_tenant_finds_nothing(self, server, namespace):
        know(server, LIBRARY)
        ids, spans = LIBRARY.prompt(OTHER)
        homes = counts(server)["homes_total"]
        foreign = usage(ask(server, ids, blockreuse_spans=spans, **namespace))
        assert foreign["prefix_tokens"] <= len(LIBRARY.system), (
            "the system prompt its own homes computed, at most"
        )
        assert counts(server)["homes_total"] - homes == 3
        own = usage(ask(server, ids, blockreuse_spans=spans))
        assert own["reused_tokens"] > 0
        assert own["prefix_tokens"] >= len(LIBRARY.system) + len(LIBRARY.docs[2])

    def test_a_block_with_one_token_changed_is_reused_up_to_that_token(self, server):
        know(server, LIBRARY)
        changed = Library(seed=1)
        changed.docs[3] = list(changed.docs[3])
        changed.docs[3][50] += 1
        ids, spans = changed.prompt((2, 3))
        full = reference(server, ids)
        know(server, LIBRARY)
        homes = counts(server)["homes_total"]
        answer = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=0)
        # the changed block is another block: it was compiled anew from its first strange token on
        assert counts(server)["homes_total"] - homes == 1
        assert usage(answer)["reused_tokens"] == len(changed.docs[3])
        repaired = ask(server, ids, blockreuse_spans=spans, blockreuse_tau=1000)
        assert distance(repaired, full) <= FULL_PREFILL_LOGPROB

    def test_two_live_requests_share_a_document_at_different_offsets(self, server):
        know(server, LIBRARY)
        cases = [LIBRARY.prompt(order) for order in ((1, 0, 2), (2, 1), (3, 2, 1, 0))]

        def run(case):
            # without repair, because a repaired head is exact and lengthens the prefix of the next such request
            return ask(server, case[0], new_tokens=24, blockreuse_spans=case[1], blockreuse_tau=0)

        for case in cases:
            run(case)
        alone = [run(case) for case in cases]
        with concurrent.futures.ThreadPoolExecutor(len(cases)) as pool:
            together = list(pool.map(run, cases))
        for one, other in zip(alone, together, strict=True):
            assert usage(other)["reused_tokens"] > 0
            assert one["output_ids"] == other["output_ids"]
            assert distance(one, other) <= FULL_PREFILL_LOGPROB
