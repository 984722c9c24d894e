"""Which documents stand in front of a block at home: chosen once, of one tenant, and never the block itself."""

from __future__ import annotations

from array import array

import pytest
from home_requests import PLAIN, CountingTree, manager_of, request

from sglang_blockreuse.blocks import company as company_room
from sglang_blockreuse.blocks.arrive import MAX_COMPILE_SHARE
from sglang_blockreuse.blocks.company import Company
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.split import Front, num_shared
from sglang_blockreuse.types import Interval

LEADING = array("q", range(20))
DOCS = [array("q", range(1000 * (i + 1), 1000 * (i + 1) + 50)) for i in range(8)]


def prompt_of(*order: int, leading=LEADING):
    tokens, spans = array("q", leading), []
    for i in order:
        spans.append(Interval(len(tokens), len(tokens) + len(DOCS[i])))
        tokens += DOCS[i]
    return tokens + array("q", [7] * 10), spans


def joined(*parts):
    whole = array("q")
    for part in parts:
        whole += part
    return whole


def homes_for(manager, *order: int, leading=LEADING, **values):
    """Prefixes of the homes of a request's blocks, by document."""
    tokens, spans = prompt_of(*order, leading=leading)
    req = request(tokens, spans, **values)
    manager.accept(req, max_prompt_len=values.get("max_prompt_len", 10**6))
    return {order[home.block]: home.prefix for home in req.blockreuse.homes}


class TestWhoStandsInFront:
    def company(self, size=2, **values):
        return Company(size, pool_size=values.pop("pool_size", 10**6))

    def test_the_first_documents_stand_in_front_of_all_others_and_are_at_home_in_their_row(self):
        company = self.company()
        company.join(PLAIN, LEADING, DOCS[:5])
        front = company.front(PLAIN, LEADING)
        assert front.row == joined(LEADING, DOCS[0], DOCS[1])
        assert front.of(DOCS[0]) == LEADING
        assert front.of(DOCS[1]) == joined(LEADING, DOCS[0])
        assert all(front.of(doc) is front.row for doc in DOCS[2:])

    def test_they_are_chosen_once(self):
        company = self.company()
        company.join(PLAIN, LEADING, DOCS[:2])
        before = [company.front(PLAIN, LEADING).of(doc) for doc in DOCS]
        company.join(PLAIN, LEADING, reversed(DOCS))
        assert [company.front(PLAIN, LEADING).of(doc) for doc in DOCS] == before

    def test_no_home_moves_while_the_row_grows(self):
        company = self.company(4)
        homes = []
        for number, doc in enumerate(DOCS):
            company.join(PLAIN, LEADING, [doc])
            homes.append(company.front(PLAIN, LEADING).of(doc))
            assert [company.front(PLAIN, LEADING).of(known) for known in DOCS[: number + 1]] == homes
        assert homes[-1] == joined(LEADING, *DOCS[:4])

    @pytest.mark.parametrize("other", [Namespace("tenant", None), Namespace(None, "salt")])
    def test_another_tenant_s_documents_never_stand_in_front(self, other):
        company = self.company()
        company.join(other, LEADING, DOCS[:3])
        assert company.front(PLAIN, LEADING).of(DOCS[4]) == LEADING
        company.join(PLAIN, LEADING, DOCS[3:6])
        assert company.front(PLAIN, LEADING).row == joined(LEADING, DOCS[3], DOCS[4])
        assert company.front(other, LEADING).row == joined(LEADING, DOCS[0], DOCS[1])

    def test_each_compile_prefix_has_companions_of_its_own(self):
        company = self.company()
        company.join(PLAIN, LEADING, DOCS[:3])
        assert company.front(PLAIN, LEADING[:10]).of(DOCS[4]) == LEADING[:10]

    def test_a_text_that_goes_on_is_no_company_for_itself(self):
        company = self.company()
        company.join(PLAIN, LEADING, [DOCS[0][:40], DOCS[0], DOCS[1]])
        assert company.front(PLAIN, LEADING).row == joined(LEADING, DOCS[0][:40], DOCS[1])

    def test_of_a_long_document_a_bounded_part_stands_in_front(self, monkeypatch):
        monkeypatch.setattr(company_room, "MAX_COMPANION_TOKENS", 8)
        company = self.company()
        company.join(PLAIN, LEADING, DOCS[:3])
        front = company.front(PLAIN, LEADING)
        assert front.row == joined(LEADING, DOCS[0][:8], DOCS[1][:8])
        assert front.of(DOCS[1]) == joined(LEADING, DOCS[0][:8])

    def test_companions_take_a_bounded_share_of_the_pool(self):
        company = self.company(pool_size=640)
        company.join(PLAIN, LEADING, DOCS[:3])
        assert len(company.front(PLAIN, LEADING).row) - len(LEADING) == 640 / 16
        none = self.company(pool_size=10)
        none.join(PLAIN, LEADING, DOCS)
        assert none.front(PLAIN, LEADING).of(DOCS[5]) == LEADING

    def test_what_is_remembered_is_bounded_and_the_latest_stay(self, monkeypatch):
        monkeypatch.setattr(company_room, "MAX_ROW_TOKENS", 220)
        company = self.company()
        for i in range(4):
            company.join(PLAIN, LEADING[: 10 + i], DOCS[:3])
            company.front(PLAIN, LEADING[:10])  # asked for all the time
        known = [len(company.front(PLAIN, LEADING[: 10 + i]).row) > 10 + i for i in range(4)]
        assert known == [True, False, False, True]
        company.forget()
        assert company.front(PLAIN, LEADING[:10]).row == LEADING[:10]

    def test_the_operator_s_text_stands_in_front_of_all_tenants_documents(self):
        text = array("q", range(500, 520))
        company = Company(text, pool_size=10**6)
        company.join(PLAIN, LEADING, DOCS)
        for namespace in (PLAIN, Namespace("tenant", None)):
            front = company.front(namespace, LEADING)
            assert front.of(DOCS[0]) is front.row
            assert front.row == joined(LEADING, text)

    def test_a_home_that_its_companions_would_make_too_long_goes_without(self):
        front = Front(LEADING, DOCS[:2], max_len=20 + 100 + 49)
        assert front.of(DOCS[3]) == LEADING
        assert front.of(DOCS[3][:40]) is front.row


class TestHomesOfRequests:
    """The leading text, 50 tokens a document, two companions."""

    def test_at_first_sight_companions_cost_what_the_prompt_computes_anyway(self):
        manager = manager_of(CountingTree(), company=2)
        tokens, spans = prompt_of(0, 1, 2, 3, 4)
        req = request(tokens, spans)
        jobs = manager.accept(req, max_prompt_len=10**6)
        # the first three stand as they do at home: the prompt computes them exactly
        assert [job.home.span for job in jobs] == spans[3:]
        assert all(job.home.prefix == tokens[: spans[1].end] for job in jobs)
        assert req.blockreuse.usage.compiled_tokens == 100

    def test_later_every_block_has_a_home_behind_those_that_came_before_it(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2, 3, 4)
        row = joined(LEADING, DOCS[0], DOCS[1])
        found = homes_for(manager, 4, 1, 5, 0)
        assert found == {4: row, 5: row, 1: joined(LEADING, DOCS[0]), 0: LEADING}

    def test_a_home_is_where_it_was_whatever_comes_later(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2, 3)
        before = homes_for(manager, 5, 4, 1, 0)
        homes_for(manager, 7, 6, 3, 2)
        assert homes_for(manager, 5, 4, 1, 0) == before

    def test_a_block_alone_in_its_prompt_is_exact_behind_the_leading_text(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2, 3)
        assert homes_for(manager, 5) == {}
        # and as nothing stands behind it there, it is nobody's companion
        alone = manager_of(CountingTree(), company=2)
        homes_for(alone, 5)
        assert homes_for(alone, 0, 1, 2, 3) == {3: joined(LEADING, DOCS[0], DOCS[1])}

    def test_a_foreign_tenant_s_documents_are_in_no_home(self):
        manager = manager_of(CountingTree(), company=2)
        for foreign in ({"cache_salt": "b"}, {"extra_key": "b"}):
            homes_for(manager, 0, 1, 2, 3, **foreign)
        assert homes_for(manager, 4, 5, 6, 7) == {7: joined(LEADING, DOCS[4], DOCS[5])}

    def test_without_company_nothing_stands_between(self):
        found = homes_for(manager_of(CountingTree(), company=0), 0, 1, 2, 3)
        assert found == {1: LEADING, 2: LEADING, 3: LEADING}

    def test_a_prompt_without_leading_text_has_company_too(self):
        manager = manager_of(CountingTree(), company=2)
        nothing = array("q")
        row = joined(DOCS[0], DOCS[1])
        # with no text in front the prompt begins as the homes do
        assert homes_for(manager, 0, 1, 2, 3, leading=nothing) == {3: row}
        assert homes_for(manager, 4, 3, 1, leading=nothing) == {3: row, 1: DOCS[0]}

    @pytest.mark.parametrize("compile", ["off", "manual"])
    def test_requests_that_compile_nothing_choose_nobody(self, compile):
        manager = manager_of(CountingTree(), company=2, compile=compile)
        assert set(map(len, homes_for(manager, 0, 1, 2, 3).values())) == {len(LEADING)}

    def test_what_compile_requests_compile_one_by_one_is_where_others_look_for_it(self):
        manager = manager_of(CountingTree(), company=2, compile="manual")
        made = {}
        for doc in range(4):
            tokens, spans = prompt_of(doc)
            jobs = manager.accept(request(tokens, spans, mode="compile", rid=f"c{doc}"), max_prompt_len=10**6)
            (made[doc],) = [job.home.prefix for job in jobs]
        assert homes_for(manager, 3, 2, 1, 0) == made

    def test_an_emptied_tree_chooses_anew(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2, 3)
        manager.arrivals.tree_emptied()
        assert homes_for(manager, 4, 5, 6, 7) == {7: joined(LEADING, DOCS[4], DOCS[5])}

    def test_homes_wait_for_whoever_computes_what_stands_in_front_of_them(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2)
        tokens, spans = prompt_of(4, 1, 5, 6)
        first, companion, *others = manager.accept(request(tokens, spans, rid="later"), max_prompt_len=10**6)
        assert first.waits_for == ()
        assert companion.home.body == DOCS[1]
        assert {job.waits_for for job in (companion, *others)} == {(first.request_id,)}

    def test_however_many_requests_come_at_once_one_home_computes_the_row(self):
        manager = manager_of(CountingTree(), company=2)
        homes_for(manager, 0, 1, 2)
        jobs = []
        for number, order in enumerate(((4, 3), (5, 6), (7, 4))):
            tokens, spans = prompt_of(*order)
            jobs += manager.accept(request(tokens, spans, rid=f"at once {number}"), max_prompt_len=10**6)
        leader, *others = jobs
        assert len(others) == 4
        assert {job.waits_for for job in others} == {(leader.request_id,)}
        # were it aborted, another one would
        manager.compiler.ended(leader.request_id, "aborted")
        tokens, spans = prompt_of(0, 4, 1)
        again = manager.accept(request(tokens, spans, rid="after"), max_prompt_len=10**6)
        assert again[0].waits_for == ()

    @pytest.mark.parametrize(("room", "expected"), [(1, (2, None)), (-1, (0, "pool_too_small"))])
    def test_the_pool_is_asked_for_companions_too(self, room, expected):
        tokens, spans = prompt_of(4, 5)
        # the prompt, the first 9 tokens of each of two companions (a 32nd of the pool), two blocks
        pool_size = int((len(tokens) + 2 * 9 + 100) / MAX_COMPILE_SHARE) + room
        manager = manager_of(CountingTree(), company=2, pool_size=pool_size)
        homes_for(manager, 0, 1)  # too much for this pool, but known from here on
        req = request(tokens, spans)
        assert (len(manager.accept(req, max_prompt_len=10**6)), req.blockreuse.not_compiled) == expected


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [((), (1,), 0), ((1, 2), (1, 2, 3), 2), ((1, 2, 3), (1, 5, 3), 1), ((4,), (5,), 0), ((1, 2), (1, 2), 2)],
)
def test_what_two_sequences_share(a, b, expected):
    assert num_shared(array("q", a), array("q", b)) == expected
