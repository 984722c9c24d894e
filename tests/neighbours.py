"""Requests beside each other, held to their answers alone.

A hand is a few cards of a deck (neighbour_cards.py) and a script: who is sent when, how far the scheduler gets in
between, who is aborted and how. `Game` plays it on a real server behind a gate (plugin/blockreuse_gate.py), so that
neighbours meet in the same steps each time, and compares every answer with that of the card alone on an empty server.
neighbour_run.py plays many.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import json
import re
import struct
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import requests
from hypothesis import strategies as st
from neighbour_cards import PROCESSOR, Body, Card, draw
from neighbour_compare import Difference, differences, first_token_difference
from neighbour_dealer import Dealer, ServerEnded, last_error, wait_for
from neighbour_table import Table
from plugin.blockreuse_gate import PATH, Cells
from servers import extended_server, with_test_plugin
from tolerances import FULL_PREFILL_LOGPROB

IDLE_S = 20.0
FOLDED = re.compile(r"blockreuse: (\d+) requests in (\d+) rows")
PROBING = frozenset(("deviation", "query", "head+query"))  # policies
SHORT_RID = "blockreuse"  # a prefix of the ids that the extension gives to requests of its own


@dataclass(frozen=True)
class Hand:
    """cards: by number; script: ["post", seat], ["pass", scheduler passes], ["abort", seat, how], in this order."""

    cards: tuple[int, ...]
    script: tuple[tuple[Any, ...], ...]

    def without(self, seat: int) -> Hand:
        moved = {old: new for new, old in enumerate(s for s in range(len(self.cards)) if s != seat)}
        script = [
            e if e[0] == "pass" else (e[0], moved[e[1]], *e[2:])
            for e in self.script
            if e[0] == "pass" or e[1] != seat
        ]
        return Hand(tuple(c for s, c in enumerate(self.cards) if s != seat), tuple(script))

    def aborted(self) -> set[int]:
        return {e[1] for e in self.script if e[0] == "abort"}


@st.composite
def hands(draw_from: st.DrawFn, deck_size: int, max_cards: int = 5) -> Hand:
    """Three to `max_cards` cards; most are sent at once, some a few passes later; now and then one is aborted."""
    number = st.integers(0, deck_size - 1)
    cards = draw_from(st.lists(number, min_size=3, max_size=max_cards, unique=True))
    script: list[tuple[Any, ...]] = []
    for seat in range(len(cards)):
        script.append(("post", seat))
        if draw_from(st.integers(0, 3)) == 3:
            script.append(("pass", draw_from(st.integers(1, 6))))
    if draw_from(st.integers(0, 3)) == 3:
        seat = draw_from(st.integers(0, len(cards) - 1))
        how = draw_from(st.sampled_from(("rid", "prefix", "disconnect")))
        at = draw_from(st.integers(script.index(("post", seat)) + 1, len(script)))
        script[at:at] = [("pass", draw_from(st.integers(1, 12))), ("abort", seat, how)]
    return Hand(tuple(cards), tuple(script))


@dataclass(frozen=True)
class Finding:
    """What was wrong with a hand; seat: whose answer, or None where it is the server's."""

    seat: int | None
    kind: str  # of the card
    difference: Difference

    @property
    def field(self) -> str:
        return re.sub(r"[0-9]+", "#", self.difference.where)

    @property
    def signature(self) -> str:
        return f"{self.kind}: {self.field}"

    def __str__(self) -> str:
        return f"seat {self.seat} ({self.kind}) {self.difference}"


class Game:
    """One server, one deck, and what its cards answer alone."""

    def __init__(
        self, dealer: Dealer, table: Table, *, seed: int, known: dict[str, Body] | None = None
    ) -> None:
        self.dealer, self.table, self.seed = dealer, table, seed
        self.cards: dict[int, Card] = {}
        # answers by card, also of an earlier server of the table
        self._alone = {} if known is None else known
        self._log_at, self._num_errors, self._num_plays = 0, 0, 0
        self.met = False  # the last hand had a folded step with two requests or more
        self.num_met = 0  # hands that had
        self.num_fallbacks = 0  # answers whose policy could not measure: neighbours left it half a step

    def card(self, number: int) -> Card:
        if number not in self.cards:
            self.cards[number] = draw(self.table, self.seed, number)
        return self.cards[number]

    def alone(self, card: Card) -> Body:
        key = json.dumps(asdict(card), sort_keys=True)
        if key not in self._alone:
            try:
                self._alone[key] = self._play([card], (("post", 0),), gated=False)[0]
            except ServerEnded as error:
                error.card = card
                raise
        return self._alone[key]

    def play(self, hand: Hand) -> list[Finding]:
        found = self.play_cards([self.card(n) for n in hand.cards], hand)
        self.num_met += self.met
        return found

    def is_the_hosts(self, cards: Sequence[Card], hand: Hand, found: Sequence[Finding]) -> bool:
        """Whether the same fields of the same seats differ where no card asks anything of the extension."""
        if any(f.seat is None for f in found):
            return False
        again = self.play_cards([c.unmarked() for c in cards], hand)
        return {(f.seat, f.field) for f in found} <= {(f.seat, f.field) for f in again}

    def play_cards(
        self, cards: Sequence[Card], hand: Hand, *, law: Sequence[Card] | None = None
    ) -> list[Finding]:
        """Everything in which the hand's answers differ from those alone, and what the server did besides.

        law: cards whose answers alone are the right ones; None: those that are played.
        """
        expected = [self.alone(card) for card in law or cards]
        self._folds()
        got = self._play(cards, hand.script, gated=True)
        found = []
        shared_prefix = self.table.blocks.get("compile_prefix") in ("none", "bos")
        for seat in sorted(set(range(len(cards))) - hand.aborted()):
            shared = shared_prefix or cards[seat].kind != "moved"
            wrong = differences(expected[seat], got[seat], shared_homes=shared)
            if 0 in (expected[seat]["status"], got[seat]["status"]):
                wrong = [Difference("no answer", expected[seat]["answer"], got[seat]["answer"])]
                found += [Finding(seat, cards[seat].kind, wrong[0])]
            elif wrong and _fell_back(cards[seat], expected[seat], got[seat]):
                self.num_fallbacks += 1
            elif wrong and not self._is_a_tie(cards[seat], expected[seat], got[seat]):
                found += [Finding(seat, cards[seat].kind, d) for d in wrong]
        found += self._server_findings()
        self.met = any(num > 1 for num in self._folds())
        return found

    def _play(self, cards: Sequence[Card], script: Sequence[tuple[Any, ...]], *, gated: bool) -> list[Body]:
        dealer = self.dealer
        dealer.open()
        self._leave_empty()
        for card in cards:
            for body in card.before:
                dealer.post("/generate", body)
        aborts = {e[1]: e[2] for e in script if e[0] == "abort"}
        # never the same twice: the host aborts the id of a streamed request once more when it has long ended
        self._num_plays += 1
        rids = [f"play-{self._num_plays}-{i}." for i in range(len(cards))]
        rids = [SHORT_RID if aborts.get(i) == "prefix" else rid for i, rid in enumerate(rids)]
        sessions = [self._first_turn(card) for card in cards]
        bodies = [_body(c, rid, s) for c, rid, s in zip(cards, rids, sessions, strict=True)]
        if gated:
            dealer.close()
        futures: dict[int, concurrent.futures.Future[Body]] = {}
        try:
            for what, *rest in script:
                if what == "post":
                    futures[rest[0]] = dealer.send(bodies[rest[0]], seat=rest[0])
                elif what == "pass":
                    dealer.let_pass(rest[0])
                else:
                    dealer.abort(rest[0], rids[rest[0]], rest[1])
        finally:
            dealer.open()
        answers = [_nameless(futures[i].result(), rids[i]) for i in range(len(cards))]
        for session in filter(None, sessions):
            dealer.post("/close_session", {"session_id": session})
        if any(a["status"] == 0 and not aborts.get(i) for i, a in enumerate(answers)):
            dealer.state()  # raises where the server is gone
        return answers

    def _first_turn(self, card: Card) -> str | None:
        if card.session is None:
            return None
        opened = self.dealer.post("/open_session", {"capacity_of_str_len": 1000, **card.session})
        name = opened["answer"] if isinstance(opened["answer"], str) else None
        if name is None:
            return None
        ids = [9, *range(40, 60)]
        params = {"temperature": 0, "max_new_tokens": 4, "ignore_eos": True}
        body = {"input_ids": ids, "sampling_params": params, "rid": f"first-{card.name}"}
        same = {k: card.body[k] for k in ("extra_key", "cache_salt") if k in card.body}
        self.dealer.post("/generate", {**body, **same, "session_params": {"id": name}})
        return name

    def _leave_empty(self) -> None:
        try:
            self.dealer.server.flush_cache(wait_s=IDLE_S)
        except requests.RequestException as error:
            raise ServerEnded(f"it cannot be emptied: {error}; {last_error(self.dealer.server)}") from error

    def _server_findings(self) -> list[Finding]:
        """Slots that an idle server has lost, and errors of ours since the last hand."""
        state: dict[str, Any] = {}

        def lost() -> int:
            state.update(self.dealer.state())
            pool = state["pool"]
            return int(pool["size"] - pool["free"] - pool["evictable"])

        found = []
        if not wait_for(lambda: lost() == 0, IDLE_S, poll_s=0.02):
            found.append(Finding(None, "server", Difference("slots lost when idle", 0, lost())))
        errors = int(state["counts"].get("errors_total", 0))
        if errors > self._num_errors:
            found.append(Finding(None, "server", Difference("errors_total", self._num_errors, errors)))
        self._num_errors = errors
        return found

    def _folds(self) -> list[int]:
        """How many requests the folded steps since the last call held."""
        text = self.dealer.server.log_text()[self._log_at :]
        self._log_at += len(text)
        return [int(n) for n, _ in FOLDED.findall(text)]

    def _is_a_tie(self, card: Card, alone: Body, among: Body) -> bool:
        """Whether the answers part at a token that is as likely as another one, up to rounding."""
        at = first_token_difference(alone, among)
        if at is None or card.session is not None:
            return False
        body = {**card.body, "return_logprob": True, "top_logprobs_num": 2}
        body.pop("logprob_start_len", None)
        told = self.alone(replace(card, body=body))["answer"]
        told = told[0] if isinstance(told, list) else told
        steps = (told.get("meta_info") or {}).get("output_top_logprobs") if isinstance(told, dict) else None
        if not steps or at >= len(steps) or len(steps[at]) < 2:
            return False
        return abs(steps[at][0][0] - steps[at][1][0]) <= 2 * FULL_PREFILL_LOGPROB


# -- how a card is sent and read ---------------------------------------------------------------------


def _body(card: Card, rid: str, session: str | None) -> Body:
    body = {**card.body, "rid": rid}
    if body.get("custom_logit_processor") == PROCESSOR:
        body["custom_logit_processor"] = _processor()
    if session is not None:
        streaming = (card.session or {}).get("streaming")
        body["session_params"] = {"id": session, **({} if streaming else {"rid": f"first-{card.name}"})}
    return body


@functools.cache
def _processor() -> str:
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    return DisallowedTokensLogitsProcessor.to_str()


def _fell_back(card: Card, alone: Body, among: Body) -> bool:
    """Whether a policy that measures was replaced, and said so: it does where its prompt lies in no single step."""
    asked = (card.body["sampling_params"].get("custom_params") or {}).get("blockreuse_policy")
    policies = {usage["policy"] for answer in (alone, among) for usage in _usages(answer["answer"])}
    return asked in PROBING and len(policies) > 1


def _usages(answer: Any) -> list[Body]:
    answers = answer if isinstance(answer, list) else [answer]
    found = [(a.get("meta_info") or {}).get("blockreuse") or [] for a in answers if isinstance(a, dict)]
    return [usage for one in found for usage in one]


def _nameless(answer: Body, rid: str) -> Body:
    return json.loads(json.dumps(answer).replace(rid, "RID"))  # type: ignore[no-any-return]


@contextlib.contextmanager
def playing(
    model: Path, table: Table, folder: Path, *, seed: int, known: dict[str, Body] | None = None
) -> Iterator[Game]:
    """A server for `table` behind a gate."""
    folder.mkdir(parents=True, exist_ok=True)
    gate = folder / "gate"
    gate.write_bytes(struct.pack("qq", -1, 0))
    env = {**with_test_plugin(), PATH: str(gate)}
    with (
        extended_server(model, *table.arguments(folder), log=folder / "server.log", env=env) as server,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        yield Game(Dealer(server, Cells(str(gate)), pool), table, seed=seed, known=known)
