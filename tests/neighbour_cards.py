"""A deck of requests: one with every option that `/generate` knows somewhere, beside those that fold a step.

A card is a request and what must have happened before it. Its answer alone on an empty server is the law for its
answer among neighbours, so a card is made so that no neighbour may change it:

    plain   nothing of the prompt is reused but what is exact; marks, where it has some, are off, exact or refused
    rows    the prompt is computed in virtual rows (a knob of the test plug-in), which equals a full prefill
    place   a block is copied to the place where it was computed, which equals a full prefill
    moved   blocks are moved and repaired in part; nobody else's prompt begins as this one does
    found   nothing is marked; the index finds what an earlier prompt of this card held
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from neighbour_table import CONTEXT, FIRST_BYTE, Table
from tiny_models import VOCAB

Body = dict[str, Any]
PROCESSOR = "$processor"  # stands for a serialized custom logit processor that forbids FORBIDDEN
FORBIDDEN = [20, 21, 22, 300, 301]
POLICIES = ("seam", "head", "deviation", "query", "head+query", "random")
REGEXES = ("[a-d]{2,9}", "(yes|no)[.!]*", "[0-9]+")
GRAMMARS = ('root ::= "a" root | "b"', 'root ::= [c-f]+ "."')
SCHEMAS = ('{"type": "integer"}', '{"type": "object", "properties": {"a": {"type": "boolean"}}}')


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(FIRST_BYTE, VOCAB) for _ in range(num)]


SHARED_LEAD = tokens(random.Random("lead"), 30)
DOCS = [tokens(random.Random(f"doc {i}"), 24 + 9 * i) for i in range(6)]


@dataclass(frozen=True)
class Card:
    """One request; everything is JSON.

    before: requests that end before it is sent, so that its blocks are known.
    session: of the session whose second turn it is, {"streaming": bool}; None: it is in none.
    """

    name: str
    kind: str
    body: Body
    before: list[Body] = field(default_factory=list)
    session: Body | None = None

    @property
    def folds(self) -> bool:
        return self.kind in ("rows", "place", "moved", "found")

    def unmarked(self) -> Card:
        """The same request of somebody who has never heard of blocks."""
        params = dict(self.body["sampling_params"])
        custom = params.pop("custom_params", None) or {}
        kept = {k: v for k, v in custom.items() if k in ("token_ids", "testing_embeds")} if custom else {}
        if kept:
            params["custom_params"] = kept
        return replace(self, body={**self.body, "sampling_params": params}, before=[])


def draw(table: Table, seed: int, number: int) -> Card:
    """Card `number` of the deck `seed`."""
    rng = random.Random(f"{seed}/{number}")
    kind = rng.choice(table.kinds)
    # two tokens that begin no other card's prompt
    lead = [*divmod(number, VOCAB - FIRST_BYTE)]
    lead = [FIRST_BYTE + lead[1], FIRST_BYTE + lead[0], *tokens(rng, rng.randint(1, 40))]
    card = _KINDS[kind](f"{kind}-{number}", rng, lead)
    _options(card, rng, table)
    if table.blocks.get("compile") == "background" and card.folds:
        card.before.append(compile_first(card.body))
    if _may_be_a_turn(card, table) and rng.random() < 0.1:
        card = replace(card, session={"streaming": rng.random() < 0.5})
    return card


def _card(name: str, kind: str, ids: list[int], **custom_params: Any) -> Card:
    params: Body = {"temperature": 0}
    if custom_params:
        params["custom_params"] = custom_params
    return Card(name, kind, {"input_ids": ids, "sampling_params": params})


def _plain(name: str, rng: random.Random, lead: list[int]) -> Card:
    lead = rng.choice((lead, SHARED_LEAD))
    card = _card(name, "plain", lead + tokens(rng, rng.choice((1, 8, 30, 70, 130, 220))))
    ids = card.body["input_ids"]
    if rng.random() < 0.15:
        card.body["text"] = " ".join(
            rng.choice(("the", "rain", "on", "tin")) for _ in range(rng.randint(1, 60))
        )
        del card.body["input_ids"]
    elif rng.random() < 0.3 and len(ids) > 40:
        mode = rng.choice(("off", "exact", "off", "exact", "compile"))
        marks = {"blockreuse_mode": mode, "blockreuse_spans": [5, 25, 25, len(ids) - 2]}
        card.body["sampling_params"]["custom_params"] = marks
    return card


def _rows(name: str, rng: random.Random, lead: list[int]) -> Card:
    ids = rng.choice((lead, SHARED_LEAD)) + tokens(rng, rng.choice((12, 60, 120, 200)))
    cuts = sorted({0, len(ids), *(rng.randrange(1, len(ids)) for _ in range(rng.randint(1, 6)))})
    rows = [x for pair in itertools.pairwise(cuts) for x in pair]
    return _card(name, "rows", ids, testing_rows=rows)


def _place(name: str, rng: random.Random, lead: list[int]) -> Card:
    lead = rng.choice((lead, SHARED_LEAD))
    doc = rng.choice(DOCS)
    marks = {"blockreuse_spans": [len(lead), len(lead) + len(doc)], "blockreuse_tau": rng.choice((0, 2, 5))}
    ids = lead + doc + tokens(rng, rng.randint(3, 30))
    return _card(name, "place", ids, testing_all_homes=True, testing_max_prefix=len(lead), **marks)


def _moved(name: str, rng: random.Random, lead: list[int]) -> Card:
    ids, spans = list(lead), []
    for doc in rng.sample(DOCS, rng.randint(2, 4)):
        spans += [len(ids), len(ids) + len(doc)]
        ids += doc
        if rng.random() < 0.2:
            ids += tokens(rng, 5)
    marks: Body = {"blockreuse_spans": spans}
    if rng.random() < 0.5:
        marks["blockreuse_tau"] = rng.choice((0, 1, 4, 1000))
    elif rng.random() < 0.7:
        marks["blockreuse_budget"] = rng.choice((0.0, 0.1, 0.5, 1.0, 40))
    if rng.random() < 0.5:
        marks["blockreuse_policy"] = rng.choice(POLICIES)
    return _card(name, "moved", ids + tokens(rng, rng.randint(2, 25)), **marks)


def _found(name: str, rng: random.Random, lead: list[int]) -> Card:
    own = [tokens(rng, rng.randint(30, 70)) for _ in range(2)]
    card = _card(name, "found", lead + own[0] + own[1] + tokens(rng, rng.randint(2, 25)))
    seen = _card("", "plain", tokens(rng, 20) + own[1] + own[0] + tokens(rng, 5)).body
    seen["sampling_params"]["max_new_tokens"] = 1
    card.before.append(seen)
    return card


_KINDS: dict[str, Callable[[str, random.Random, list[int]], Card]] = {
    "plain": _plain,
    "rows": _rows,
    "place": _place,
    "moved": _moved,
    "found": _found,
}


def compile_first(body: Body) -> Body:
    """A request that makes the blocks of `body` known."""
    marks = {
        k: v for k, v in body["sampling_params"].get("custom_params", {}).items() if k == "blockreuse_spans"
    }
    params = {"temperature": 0, "max_new_tokens": 1}
    params["custom_params"] = {**marks, "blockreuse_mode": "compile"} if marks else None
    same = {k: body[k] for k in ("input_ids", "extra_key", "cache_salt") if k in body}
    return {**same, "sampling_params": params}


# -- options ---------------------------------------------------------------------------------------


def _options(card: Card, rng: random.Random, table: Table) -> None:
    """Give the card options of the host, each drawn by itself."""
    body, params = card.body, card.body["sampling_params"]
    some = rng.random
    params["max_new_tokens"] = rng.choice((1, 2, 3, 5, 8))
    num_tokens = len(body.get("input_ids") or [0])
    _sampling(params, rng, in_turn=table.in_turn)
    if some() < 0.5:
        body["return_logprob"] = True
        if some() < 0.6:
            body["logprob_start_len"] = rng.choice(
                (0, 0, -1, num_tokens // 2, num_tokens - 1, rng.randrange(num_tokens))
            )
        if some() < 0.6:
            body["top_logprobs_num"] = rng.choice((1, 3))
        if some() < 0.4:
            body["token_ids_logprob"] = sorted(rng.sample(range(VOCAB), rng.randint(1, 4)))
        if some() < 0.2:
            body["return_text_in_logprobs"] = True
        if some() < 0.1:
            body["return_flat_raw_top_logprobs"] = True
    for key, value, odds in (
        ("return_prompt_token_ids", True, 0.2),
        ("return_entropy", True, 0.05),
        ("stream", True, 0.15),
        ("extra_key", rng.choice("xy"), 0.1),
        ("cache_salt", rng.choice("xy"), 0.1),
        ("routing_key", "k", 0.05),
        ("priority", rng.choice((0, 1, 5)), 0.7 if "priority" in table.extras else 0.0),
    ):
        if some() < odds:
            body[key] = value
    if "n" in params:
        body.pop("stream", None)  # its last piece belongs to either sample
    if "processor" in table.extras and some() < 0.15:
        body["custom_logit_processor"] = PROCESSOR
        params["custom_params"] = {**params.get("custom_params", {}), "token_ids": FORBIDDEN}
    # what the knobs of `rows` and `place` must not be combined with, because they ask no one
    if card.kind not in ("rows", "place"):
        _alone(card, rng, table)
    if card.kind == "plain" and some() < 0.08:
        _wrong(body, rng)


def _sampling(params: Body, rng: random.Random, *, in_turn: bool) -> None:
    """in_turn: the scheduler does not overlap steps; where it does, the host's penalties come a step late, and which
    step that is depends on the neighbours.
    """
    some = rng.random
    late = 0.12 if in_turn else 0.0
    for key, value, odds in (
        ("n", 2, 0.08),
        ("ignore_eos", True, 0.4),
        ("stop", rng.choice(("e", ["th", "zz"])), 0.08),
        ("stop_token_ids", rng.sample(range(VOCAB), 40), 0.1),
        ("stop_regex", "[aeiou][a-z]", 0.05),
        ("no_stop_trim", True, 0.1),
        ("skip_special_tokens", False, 0.1),
        ("frequency_penalty", 1.5, late),
        ("presence_penalty", 1.5, late),
        ("repetition_penalty", 1.8, late),
        ("min_new_tokens", 1, late),
        ("logit_bias", {str(rng.randrange(VOCAB)): 4.0, str(rng.randrange(VOCAB)): -4.0}, 0.1),
        ("stream_interval", 3, 0.05),
    ):
        if some() < odds:
            params[key] = value
    if some() < 0.1:
        params |= {"temperature": 0.7, "top_k": 1}
    if some() < 0.04:
        params["max_new_tokens"] = 0
        params.pop("min_new_tokens", None)
    grammar = rng.choice((("regex", REGEXES), ("ebnf", GRAMMARS), ("json_schema", SCHEMAS)))
    if some() < 0.12:
        params[grammar[0]] = rng.choice(grammar[1])


def _alone(card: Card, rng: random.Random, table: Table) -> None:
    """Options with which a request itself is not folded, or that only the host's guards may judge."""
    body, params = card.body, card.body["sampling_params"]
    ids = body.get("input_ids")
    if "hidden" in table.extras and rng.random() < 0.3:
        body["return_hidden_states"] = rng.choice((True, True, "last"))
        # rows of a prefix that others have computed are not returned, so nobody may share it
        body["cache_salt"] = card.name
    if ids is None or "n" in params:
        return
    if rng.random() < 0.08:
        custom = params.get("custom_params", {})
        params["custom_params"] = {
            **custom,
            "testing_embeds": sorted(rng.sample(range(len(ids)), min(3, len(ids)))),
        }


def _may_be_a_turn(card: Card, table: Table) -> bool:
    params = card.body["sampling_params"]
    return (
        card.kind in ("plain", "moved")
        and "input_ids" in card.body
        and "n" not in params
        and not table.layer_plan
    )


def _wrong(body: Body, rng: random.Random) -> None:
    """Something that is refused, by the host or by us."""
    params = body["sampling_params"]
    num = len(body.get("input_ids") or [0])
    marks: list[Body] = [
        {"blockreuse_spans": [5, 3]},
        {"blockreuse_spans": [0, num + 9]},
        {"blockreuse_mode": "nonsense"},
        {"blockreuse_tau": -1},
        {"blockreuse_budget": 5},
        {"blockreuse_nothing": 1},
    ]
    bodies: list[Body] = [
        {"lora_path": "nobody"},
        {"input_embeds": [[0.5] * 128] * 8, "input_ids": None},
        {"input_ids": []},
        {"input_ids": [3] * (CONTEXT + 50)},
        {"input_ids": [7] * 9 + [VOCAB + 7]},
        {"logprob_start_len": num + 50, "return_logprob": True},
        {"token_ids_logprob": [VOCAB + 1], "return_logprob": True},
        {"return_routed_experts": True},
    ]
    if rng.random() < 0.4:
        params["custom_params"] = rng.choice(marks)
    elif rng.random() < 0.8:
        body.pop("text", None)
        body |= rng.choice(bodies)
    else:
        params |= rng.choice(
            ({"top_p": 7.0}, {"n": -1}, {"regex": "("}, {"beam_width": 2}, {"min_new_tokens": 99})
        )
