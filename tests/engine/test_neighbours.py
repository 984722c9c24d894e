"""Nobody's answer depends on who else is in the step: a few dozen hands at one table, the same ones each time.

Thousands of hands at every table: tests/nightly/test_neighbours_long.py and `python tests/neighbour_run.py`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from neighbour_cards import DOCS, Card, compile_first
from neighbour_run import to_json
from neighbour_table import CHUNK, TABLES, write_model
from neighbours import Game, Hand, hands, playing

pytestmark = pytest.mark.engine
DECK, NUM_HANDS = 24, 36
TOGETHER = Hand((0, 1), (("post", 0), ("post", 1)))
LEAD, QUESTION = [31, 41, 59, 26, 53], [58, 97, 93, 23]


@pytest.fixture(scope="module")
def game(tmp_path_factory):
    folder = tmp_path_factory.mktemp("neighbours")
    with playing(write_model(folder / "model"), TABLES["hidden"], folder, seed=7) as running:
        yield running


def card(name: str, ids: list[int], *, kind: str = "plain", custom: dict | None = None, **body) -> Card:
    params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
    if custom:
        params["custom_params"] = custom
    return Card(name, kind, {"input_ids": ids, "sampling_params": params, **body})


def folding(*, known: bool = True, **knobs) -> Card:
    """Two of three documents are copied; known: their homes stand before the request comes, so it waits for none."""
    ids, spans = list(LEAD), []
    for doc in DOCS[:3]:
        spans += [len(ids), len(ids) + len(doc)]
        ids = ids + doc
    marks = {"blockreuse_spans": spans, "blockreuse_tau": 0, **knobs}
    one = card("folding", ids + QUESTION, kind="moved", custom=marks, return_logprob=True)
    return replace(one, before=[compile_first(one.body)]) if known else one


def short(**body) -> Card:
    return card("short", [200 + i for i in range(20)], return_logprob=True, **body)


def test_neighbours_do_not_change_an_answer(game):
    met = game.num_met

    @settings(
        max_examples=NUM_HANDS,
        derandomize=True,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(hands(DECK))
    def holds(hand: Hand) -> None:
        cards = [game.card(n) for n in hand.cards]
        found = game.play(hand)
        if found and not game.is_the_hosts(cards, hand, found):
            raise AssertionError("\n".join(map(str, [*found, to_json("hidden", cards, hand)])))

    holds()
    assert game.num_met - met >= NUM_HANDS // 4, "too few hands had neighbours in a folded step"


def test_a_neighbours_hidden_states_are_its_own(game):
    """Rows that are copied are missing in a folded step, and everything behind them would move up."""
    asking = short(return_hidden_states=True)
    assert game.play_cards([folding(), asking], TOGETHER) == []
    assert game.met
    assert len(game.alone(asking)["answer"]["meta_info"]["hidden_states"]) == 4


def test_a_policy_that_measures_is_not_replaced_because_of_a_neighbour(game):
    """It needs its whole prompt in one step; cut by what a neighbour left of one, it could not measure."""
    asking = folding(blockreuse_policy="deviation", blockreuse_tau=None, blockreuse_budget=0.2)
    wide = card("wide", [300 + i for i in range(CHUNK - 8)], return_logprob=True)
    replaced = game.num_fallbacks
    assert game.play_cards([wide, asking], TOGETHER) == []
    assert game.num_fallbacks == replaced
    assert game.alone(asking)["answer"]["meta_info"]["blockreuse"][0]["policy"] == "deviation"


@pytest.mark.parametrize("how", ["rid", "prefix", "disconnect"])
@pytest.mark.parametrize("passes", [0, 1, 2, 4], ids=lambda n: f"after {n} passes")
def test_an_abort_ends_one_request_only(game, how, passes):
    hand = Hand((0, 1), (("post", 0), ("post", 1), ("pass", passes), ("abort", 1, how)))
    assert game.play_cards([folding(known=False), short()], hand) == []


class TestItSeesFaults:
    """Negative controls: each planted fault acts on one request, or on a step that holds two."""

    def found(self, game: Game, cards: list[Card], planted: list[Card]) -> set[tuple[int | None, str]]:
        """Seats and fields that differ where `planted` are played and `cards` are the law."""
        return {(f.seat, f.field) for f in game.play_cards(planted, TOGETHER, law=cards)}

    def test_rows_that_changed_places(self, game):
        cards = [folding(), short()]
        mixed = replace(cards[1], body=with_knob(cards[1], testing_mix=True))
        seats = {seat for seat, _ in self.found(game, cards, [cards[0], mixed])}
        assert game.met
        assert seats == {0, 1}

    def test_a_block_read_at_anothers_home(self, game):
        same = [40 + i for i in range(24)], [90 + i for i in range(24)]
        ids = LEAD + DOCS[0] + same[0] + same[1] + QUESTION
        spans = [5, 29, 29, 53, 53, 77]
        marks = {"blockreuse_spans": spans, "blockreuse_tau": 0}
        right = card("right", ids, kind="moved", custom=marks, return_logprob=True)
        wrong = replace(right, body=with_knob(right, testing_swap_homes=True))
        assert any("logprobs" in where for _, where in self.found(game, [right, short()], [wrong, short()]))

    def test_without_a_fault_nothing_is_found(self, game):
        cards = [folding(), short()]
        assert self.found(game, cards, list(cards)) == set()


def with_knob(one: Card, **knobs) -> dict:
    params = one.body["sampling_params"]
    return {
        **one.body,
        "sampling_params": {**params, "custom_params": {**params.get("custom_params", {}), **knobs}},
    }
