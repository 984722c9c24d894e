"""Many hands at many tables: `python tests/neighbour_run.py --batches 2000 --seed 1`.

Prints each kind of difference once with the smallest hand that shows it, counts them all, and ends with status 1 if
there was one. `--replay FILE` plays one printed hand again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings
from neighbour_cards import Card
from neighbour_compare import Difference
from neighbour_dealer import ServerEnded
from neighbour_table import TABLES, write_model
from neighbours import Finding, Game, Hand, hands, playing

MIN_DECK = 24
HANDS_PER_CARD = 4  # how often a card is dealt about, so that its answer alone is paid for once
PROGRESS_S = 20.0
MAX_TRIES = 40  # plays that making a hand smaller may take


@dataclass
class Tally:
    """What one table's hands came to."""

    num_hands: int = 0
    num_met: int = 0  # hands of which a folded step held two requests or more
    num_aborted: int = 0
    num_fallbacks: int = 0  # answers whose measuring policy was replaced, see Game
    num_host: int = 0  # hands that differ in the same way where nothing is marked
    found: Counter[str] = field(default_factory=Counter)  # hands by signature

    def __str__(self) -> str:
        return (
            f"{self.num_hands} batches, {self.num_met} with neighbours in a folded step, {self.num_aborted} with "
            f"aborts, {self.num_host} differing without the extension too, {self.num_fallbacks} policies replaced"
        )


def deal(num: int, *, deck_size: int, number: int) -> list[Hand]:
    """`num` hands, the same ones for the same number."""
    found: list[Hand] = []

    @seed(number)
    @settings(
        max_examples=num,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(hands(deck_size))
    def collect(hand: Hand) -> None:
        found.append(hand)

    collect()
    return found[:num]


def run(model: Path, name: str, *, num: int, number: int, folder: Path, say: Callable[[str], None]) -> Tally:
    """Play `num` hands at a table; a server that ends is a finding, and another one takes its place."""
    tally, known, retired = Tally(), {}, set()
    left = deal(num, deck_size=max(MIN_DECK, num // HANDS_PER_CARD), number=number)[::-1]
    last_said = time.monotonic()
    for start in itertools.count():
        if not left:
            return tally
        with playing(model, TABLES[name], folder / f"server-{start}", seed=number, known=known) as game:
            while left:
                hand = left.pop()
                for seat in reversed(range(len(hand.cards))):
                    hand = hand.without(seat) if hand.cards[seat] in retired else hand
                if len(hand.cards) < 2:
                    continue
                cards = [game.card(n) for n in hand.cards]
                tally.num_hands += 1
                tally.num_aborted += bool(hand.aborted())
                try:
                    found = game.play(hand)
                    if found and game.is_the_hosts(cards, hand, found):
                        tally.num_host += 1
                        continue
                    _tell(game, name, hand, found, tally, say)
                except ServerEnded as error:
                    shown, kind = hand, "server"
                    if error.card is not None:
                        cards, shown, kind = [error.card], Hand((0,), (("post", 0),)), error.card.kind
                    gone = Finding(None, kind, Difference(f"ended: {error}", "alive", "gone"))
                    _tell(None, name, shown, [gone], tally, say, cards=cards)
                    # it would end every server that it is dealt to
                    retired |= {n for n in hand.cards if game.card(n) == error.card}
                    break
                if time.monotonic() - last_said > PROGRESS_S:
                    last_said = time.monotonic()
                    say(f"{name}: {tally.num_hands} of {num}, differing {sum(tally.found.values())}")
            tally.num_met += game.num_met
            tally.num_fallbacks += game.num_fallbacks


def _tell(
    game: Game | None,
    name: str,
    hand: Hand,
    found: list[Finding],
    tally: Tally,
    say: Callable[[str], None],
    *,
    cards: list[Card] | None = None,
) -> None:
    new = {f.signature for f in found} - tally.found.keys()
    tally.found.update({f.signature for f in found})
    if not new:
        return
    say(f"\n{name}: a difference")
    for finding in found:
        say(f"  {finding}")
    cards = cards or [game.card(n) for n in hand.cards]  # type: ignore[union-attr]
    if game is not None:
        cards, hand, again = reduce(game, cards, hand, new)
        say(f"  seen again in {again} of 2 repetitions; the smallest hand that shows it:")
    say("  " + to_json(name, cards, hand))


def reduce(game: Game, cards: list[Card], hand: Hand, wanted: set[str]) -> tuple[list[Card], Hand, int]:
    """Fewer cards, passes and options that still show one of the signatures, and how often the first did again."""

    def shows(cards: list[Card], hand: Hand) -> bool:
        return any(f.signature in wanted for f in game.play_cards(cards, hand))

    again = sum(shows(cards, hand) for _ in range(2))
    if not again:
        return cards, hand, 0
    tries = iter(range(MAX_TRIES))
    for smaller in (_fewer_cards, _fewer_events, _fewer_options):
        progress = True
        while progress:
            progress = False
            for candidate in smaller(cards, hand):
                if next(tries, None) is None:
                    return cards, hand, again
                if shows(*candidate):
                    (cards, hand), progress = candidate, True
                    break
    return cards, hand, again


def _fewer_cards(cards: list[Card], hand: Hand) -> Iterator[tuple[list[Card], Hand]]:
    for seat in range(len(cards)) if len(cards) > 1 else ():
        yield cards[:seat] + cards[seat + 1 :], hand.without(seat)


def _fewer_events(cards: list[Card], hand: Hand) -> Iterator[tuple[list[Card], Hand]]:
    for i, event in enumerate(hand.script):
        if event[0] != "post":
            yield cards, replace(hand, script=hand.script[:i] + hand.script[i + 1 :])


def _fewer_options(cards: list[Card], hand: Hand) -> Iterator[tuple[list[Card], Hand]]:
    for seat, card in enumerate(cards):
        params = card.body["sampling_params"]
        smaller = [{k: v for k, v in card.body.items() if k != key} for key in card.body.keys() - KEPT]
        smaller += [
            {**card.body, "sampling_params": {k: v for k, v in params.items() if k != key}}
            for key in params.keys() - KEPT
        ]
        for body in smaller:
            yield [*cards[:seat], replace(card, body=body), *cards[seat + 1 :]], hand


KEPT = frozenset(("input_ids", "text", "sampling_params", "temperature", "custom_params", "max_new_tokens"))


def to_json(name: str, cards: list[Card], hand: Hand) -> str:
    return json.dumps({"table": name, "script": hand.script, "cards": [asdict(c) for c in cards]})


def replay(model: Path, text: str, folder: Path, say: Callable[[str], None]) -> int:
    told: dict[str, Any] = json.loads(text)
    cards = [Card(**card) for card in told["cards"]]
    hand = Hand(tuple(range(len(cards))), tuple(tuple(event) for event in told["script"]))
    with playing(model, TABLES[told["table"]], folder, seed=0) as game:
        found = game.play_cards(cards, hand)
    for finding in found:
        say(f"  {finding}")
    return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tables", nargs="*", default=list(TABLES), choices=list(TABLES))
    parser.add_argument("--replay", type=Path, help="a file with one printed hand")
    parser.add_argument("--logs", type=Path, help="keep the servers' logs here")
    options = parser.parse_args()

    def say(text: str) -> None:
        print(text, flush=True)

    with contextlib.ExitStack() as stack:
        folder = options.logs or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = folder / "model"
        if not model.exists():
            write_model(model)
        if options.replay:
            return replay(model, options.replay.read_text(), folder / "replay", say)
        total = Tally()
        share = -(-options.batches // len(options.tables))
        for i, name in enumerate(options.tables):
            where = folder / name.replace(" ", "-")
            tally = run(model, name, num=share, number=options.seed * 100 + i, folder=where, say=say)
            say(f"{name}: {tally}")
            for signature, count in tally.found.most_common():
                say(f"    {count:5d} {signature}")
            total.num_hands += tally.num_hands
            total.num_met += tally.num_met
            total.num_aborted += tally.num_aborted
            total.num_host += tally.num_host
            total.num_fallbacks += tally.num_fallbacks
            total.found.update({f"{name}: {s}": n for s, n in tally.found.items()})
        say(f"in all: {total}; {len(total.found)} kinds of difference in {sum(total.found.values())} places")
    return bool(total.found)


if __name__ == "__main__":
    sys.exit(main())
