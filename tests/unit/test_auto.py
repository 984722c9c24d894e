"""The index of blocks that nobody marked, against a model that compares every stretch with every other."""

from __future__ import annotations

import itertools
import random
from array import array

import numpy as np
import pytest
from drawn import examples
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from sglang_blockreuse.blocks import auto
from sglang_blockreuse.blocks.auto import AutoIndex
from sglang_blockreuse.blocks.discover import MIN_SHARE, Discovery
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.windows import NOWHERE, PRIME, compiled, point_of
from sglang_blockreuse.types import Interval

MIN_HIT = 4
SECRET = 2**127 - 1
POINT = point_of(SECRET)
HERE, THERE = Namespace(None, "here"), Namespace(None, "there")


def index_of(*donors, min_hit: int = MIN_HIT, space=HERE, **options) -> AutoIndex:
    index = AutoIndex(min_hit=min_hit, secret=SECRET, **options)
    for donor in donors:
        index.register(array("q", donor), space)
    return index


def found(index: AutoIndex, prompt, space=HERE, *rooms) -> list[tuple[int, int, int]]:
    return [(h.span.start, h.span.end, h.offset) for h in index.find(array("q", prompt), space, *rooms)]


def matches(prompt: list[int], donor: list[int], low: int, high: int):
    """Brute force: maximal equal stretches (start, length, offset) of prompt[low:high] and the donor."""
    for offset in range(len(donor)):
        for start in range(low, high):
            if start > low and offset and prompt[start - 1] == donor[offset - 1]:
                continue
            length = 0
            while (
                start + length < high
                and offset + length < len(donor)
                and prompt[start + length] == donor[offset + length]
            ):
                length += 1
            if length:
                yield start, length, offset


# few different ids, so that stretches recur by chance
ids = st.lists(st.integers(0, 2), max_size=30)


@st.composite
def cases(draw: st.DrawFn):
    """Donors, and a prompt that is put together from pieces of them and from pieces of its own."""
    donors = draw(st.lists(ids, max_size=4))
    prompt: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        if donors and draw(st.booleans()):
            donor = draw(st.sampled_from(donors))
            cut = draw(st.integers(0, len(donor)))
            prompt += donor[cut : cut + draw(st.integers(0, 20))]
        else:
            prompt += draw(st.lists(st.integers(0, 5), max_size=8))
    return donors, prompt


@examples(400)
@given(cases())
def test_every_hit_is_true_maximal_and_no_exact_prefix(case):
    donors, prompt = case
    hits = index_of(*donors).find(array("q", prompt), HERE)
    # a hit begins behind the one before it, and behind what the tree serves as an exact prefix
    prefixes = {common(prompt, donor) for donor in donors}
    free = 0
    for hit in hits:
        donor = hit.donor.tokens_T.tolist()
        start, end, offset = hit.span.start, hit.span.end, hit.offset
        assert start >= free
        assert len(hit.span) >= MIN_HIT
        assert donor in donors
        assert prompt[start:end] == donor[offset : offset + end - start]
        assert list(hit.donor.first(len(hit))) == donor[: offset + end - start]
        bounded = start == free or start in prefixes or offset == 0
        assert bounded or prompt[start - 1] != donor[offset - 1], "could begin earlier"
        after = offset + end - start
        assert end == len(prompt) or after == len(donor) or prompt[end] != donor[after], "could go on"
        assert not (start == offset and prompt[:end] == donor[:end]), "an exact prefix"
        free = end


@examples(400)
@given(cases())
def test_what_lies_between_hits_holds_no_long_match(case):
    """Completeness: a stretch of 2W - 1 tokens contains an entered window, so it cannot be missed."""
    donors, prompt = case
    index = index_of(*donors, max_places=1000)  # fewer places would be a bound and no promise
    sure = max(MIN_HIT, 2 * index.window - 1)
    hits = index.find(array("q", prompt), HERE)
    prefix = max((common(prompt, donor) for donor in donors), default=0)
    edges = [(0, 0), *((h.span.start, h.span.end) for h in hits), (len(prompt), len(prompt))]
    for (_, low), (high, _) in itertools.pairwise(edges):
        # what continues an exact prefix is left to the tree
        low = max(low, min(prefix, high))
        for donor in donors:
            for start, length, offset in matches(prompt, donor, low, high):
                prefix_of_it = start - offset == 0 and prompt[:start] == donor[:offset]
                assert length < sure or prefix_of_it, (start, length, offset)


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class PlainIndex:
    """The same rules in plain words: windows themselves as keys, every comparison made."""

    def __init__(self, donors, max_places: int):
        self.window = (MIN_HIT + 1) // 2
        self.places: dict[tuple[int, ...], list[tuple[list[int], int]]] = {}
        held: list[list[int]] = []
        for donor in (d for d in donors if len(d) >= MIN_HIT):
            held = [h for h in held if donor[: len(h)] != h] + [donor]
            for places in self.places.values():
                places[:] = [p for p in places if any(p[0] is h for h in held)]
            for place in range(0, len(donor) - self.window + 1, self.window):
                places = self.places.setdefault(tuple(donor[place : place + self.window]), [])
                places.append((donor, place))
                del places[:-max_places]

    def find(self, prompt: list[int], low: int, high: int):
        position = low
        while position + self.window <= high:
            places = self.places.get(tuple(prompt[position : position + self.window]), ())
            stretches = [self.stretch(prompt, position, low, high, *p) for p in reversed(places)]
            best = max(stretches, key=lambda s: s[1] - s[0], default=(0, 0, 0))
            if best[1] - best[0] < MIN_HIT:
                position += 1
                continue
            start, low, offset, donor = best
            position = low
            if offset != start or prompt[:start] != donor[:offset]:
                yield start, low, offset

    @staticmethod
    def stretch(prompt, position, low, high, donor, place):
        ahead = common(prompt[position:high], donor[place:])
        behind = common(prompt[low:position][::-1], donor[:place][::-1])
        return position - behind, position + ahead, place - behind, donor


@settings(max_examples=400, deadline=None)
@given(cases(), st.integers(1, 3), st.data())
def test_hits_are_those_of_an_index_that_compares_everything(case, max_places, data):
    donors, prompt = case
    index = index_of(*donors, max_places=max_places)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(prompt)), max_size=4)))
    rooms = [Interval(a, b) for a, b in zip(cuts[::2], cuts[1::2], strict=False)] or None
    plain = PlainIndex(donors, max_places)
    expected = [
        hit for r in rooms or [Interval(0, len(prompt))] for hit in plain.find(prompt, r.start, r.end)
    ]
    assert found(index, prompt, HERE, rooms) == expected


def test_many_hits_with_holes_between_them():
    first, second, third = (list(range(k, k + 40)) for k in (1000, 2000, 3000))
    index = index_of([1, 2, *first, *second], [7, *third], min_hit=16)
    prompt = [5, 5, 5, *third, 6, 6, *first, *second[:20], 8, *second[10:30], 9]
    assert found(index, prompt) == [(3, 43, 1), (45, 105, 2), (106, 126, 52)]


def test_a_wrong_token_in_the_middle_cuts_the_hit_in_two():
    document = list(range(100, 160))
    wrong = [*document[:29], 7, *document[30:]]
    index = index_of([1, *document], min_hit=16)
    assert found(index, [2, 2, *document]) == [(2, 62, 1)]
    assert found(index, [2, 2, *wrong]) == [(2, 31, 1), (32, 62, 31)]


def test_an_exact_prefix_is_no_hit_but_the_same_text_elsewhere_is():
    document = list(range(100, 160))
    index = index_of(document, min_hit=16)
    assert found(index, [*document, 1, 2]) == []
    assert found(index, [*document, 1, *document]) == [(61, 121, 0)]
    # behind the part of it that the tree holds, too
    assert found(index, [*document, 1, 2], HERE, [Interval(20, 62)]) == []


def test_short_stretches_are_no_hits():
    document = list(range(100, 116))
    index = index_of([1, *document, 2], min_hit=16)
    assert found(index, [3, *document]) == [(1, 17, 1)]
    assert found(index, [3, *document[:15]]) == []


def test_another_namespace_finds_nothing():
    """Negative control of tenant isolation: the very same prompt, asked under another salt."""
    document = list(range(100, 160))
    index = index_of([1, *document], min_hit=16)
    assert found(index, [2, *document]) == [(1, 61, 1)]
    assert found(index, [2, *document], space=THERE) == []


@pytest.fixture
def same_hash(monkeypatch):
    """A hash that always collides."""
    loops = auto.compiled()._replace(
        windows=lambda ids_T, window, point: np.zeros(max(0, len(ids_T) - window + 1), dtype=np.int64),
        prefixes=lambda ids_T, point: np.zeros(len(ids_T) + 1, dtype=np.int64),
    )
    monkeypatch.setattr(auto, "compiled", lambda: loops)


def test_equal_hashes_of_different_windows_are_told_apart(same_hash):
    """Negative control: token ids alone decide."""
    document = list(range(100, 160))
    index = index_of([1, *document], min_hit=16)
    assert found(index, [2, *range(500, 560)]) == []
    # only the latest places of a window are kept; the last window of the donor is among them
    assert found(index, [2, *document]) == [(1, 61, 1)]


donations = st.lists(st.tuples(ids, st.booleans()), max_size=20)


@examples(100)
@example([([0] * 5, True), ([0] * 4, True)])  # a shorter prompt of the same token is another one
@given(donations)
def test_the_memory_bound_holds_and_nothing_is_left_of_what_went(donors):
    fill_and_empty(donors)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example([([0, 1] * 4, True), ([1, 0] * 4, True)])  # forgetting the second took the namespace of the first
@given(donations)
def test_prompts_of_one_hash_leave_nothing_behind_either(same_hash, donors):
    fill_and_empty(donors)


def fill_and_empty(donors):
    index = AutoIndex(min_hit=MIN_HIT, secret=SECRET, max_tokens=60)
    for donor, other in donors:
        index.register(array("q", donor), THERE if other else HERE)
        held = list(index._recent)
        assert index.num_tokens == sum(len(d.tokens_T) for d in held) <= 60
        assert [d for d in index._donors if d is not None] == sorted(held, key=lambda d: d.number)
        assert sum(s.num_donors for s in index._spaces.values()) == len(held)
        assert {d for s in index._spaces.values() for d in s.wholes.values()} <= set(held)
        slots = [slot for s in index._spaces.values() for slot in s.slots.values()]
        assert sorted([*slots, *index._free_slots]) == list(range(len(index._hashes)))
        numbers = {d.number for d in held}
        assert all(index._donor_SM[slot][0] in numbers for slot in slots), "empty slots are given back"
        assert set(index._donor_SM[slots].flatten()) <= {NOWHERE, *numbers}
        assert (index._donor_SM[index._free_slots] == NOWHERE).all()
    for donor in list(index._recent):
        index.forget(donor)
    assert (index.num_tokens, index._spaces, set(index._donors) - {None}) == (0, {}, set())


def test_the_least_recently_used_donor_leaves_first():
    first, second, third = (list(range(k, k + 40)) for k in (1000, 2000, 3000))
    index = index_of([1, *first], [2, *second], min_hit=16, max_tokens=90)
    assert found(index, [9, *first])  # used, hence younger than the second
    index.register(array("q", [3, *third]), HERE)
    assert found(index, [9, *first]) == [(1, 41, 1)]
    assert found(index, [9, *second]) == []


def test_a_prompt_replaces_the_donor_that_it_continues():
    """The turns of one chat are one donor, not as many as there are turns."""
    turns = list(range(100, 400))
    index = index_of(*(turns[:n] for n in (100, 200, 300)), min_hit=16)
    assert (len(index), index.num_tokens) == (1, 300)
    assert found(index, [1, *turns[50:250]]) == [(1, 201, 50)]


class Tree:
    """What the tree holds, as a list of sequences."""

    def __init__(self, *held):
        self.held = [(list(tokens), namespace) for tokens, namespace in held]

    def lookup(self, tokens, namespace):
        lengths = [common(list(tokens), held) for held, where in self.held if where == namespace]
        return max(lengths, default=0), None


def test_stale_donors_are_harmless_and_forgotten():
    document = list(range(100, 160))
    donor = [1, *document]
    tree = Tree((donor, HERE))
    discovery = Discovery(tree, min_block_tokens=16, secret=SECRET)
    discovery.published(donor, HERE)
    prompt = array("q", [2, 2, *document, 3])
    homes, reason = discovery.unmarked(prompt, HERE)
    assert reason is None
    assert [(h.span, h.delta, h.prefix_len, list(h.tokens)) for h in homes] == [
        (Interval(2, 62), 1, 1, donor)
    ]
    tree.held = [(donor[:41], HERE)]  # the tree evicted the end
    homes, _ = discovery.unmarked(prompt, HERE)
    assert [h.span for h in homes] == [Interval(2, 42)]
    tree.held = []
    assert discovery.unmarked(prompt, HERE) == ([], "auto_no_hits")
    assert len(discovery.index) == 0


def test_the_exact_prefix_is_left_to_the_tree():
    document, system = list(range(100, 160)), list(range(500, 540))
    donor, other = [*system, *document], [*system, 7, *document]
    discovery = Discovery(Tree((donor, HERE), (other, HERE)), min_block_tokens=16, secret=SECRET)
    discovery.published(donor, HERE)
    discovery.published(other, HERE)
    (home,), _ = discovery.unmarked(array("q", [*system, 8, 8, *document, 9]), HERE)
    assert home.span == Interval(42, 102), "nothing of the system prompt is moved"


def test_few_hits_leave_a_prompt_exact():
    document = list(range(100, 140))
    discovery = Discovery(Tree(([1, *document], HERE)), min_block_tokens=16, secret=SECRET)
    discovery.published([1, *document], HERE)
    rest = list(range(1000, 1000 + int(len(document) / MIN_SHARE)))
    assert discovery.unmarked(array("q", [2, *document, *rest]), HERE) == ([], "auto_few_hits")


def test_marked_blocks_are_harvested_from_prompts():
    first, second = list(range(100, 160)), list(range(200, 260))
    donor = [1, *first, *second]
    discovery = Discovery(Tree((donor, HERE)), min_block_tokens=16, secret=SECRET)
    discovery.published(donor, HERE)
    prompt = array("q", [2, *second, *first, 3])
    spans = [Interval(1, 61), Interval(61, 121)]
    homes, reason = discovery.marked(prompt, spans, HERE)
    assert reason is None
    assert [(h.block, h.span, h.prefix_len) for h in homes] == [(0, spans[0], 61), (1, spans[1], 1)]
    assert discovery.marked(prompt, spans, THERE) == ([], "harvest_no_hits")


@pytest.mark.parametrize("size", [0, 1, 2, 1023])
def test_a_window_has_the_same_hash_wherever_it_stands(size):
    rng = random.Random(size)
    window = [rng.randrange(50_000) for _ in range(16)]
    prompt = np.array([rng.randrange(50_000) for _ in range(size)] + window, dtype=np.int64)
    hashes = compiled().windows(prompt, 16, POINT)
    assert len(hashes) == size + 1
    assert hashes[size] == compiled().windows(np.array(window, dtype=np.int64), 16, POINT)[0]
    assert len(set(hashes.tolist())) == size + 1, "and other windows have others"


@given(st.lists(st.integers(0, 2**63 - 1), max_size=40), st.integers(1, 9), st.integers(0, 2**128))
def test_a_hash_is_a_polynomial_over_the_prime(ids, window, secret):
    point = point_of(secret)

    def polynomial(tokens):
        value = 0
        for token in tokens:
            value = (value * point + token % 2**61 + 1) % PRIME
        return value

    ids_T = np.array(ids, dtype=np.int64)
    expected = [polynomial(ids[i : i + window]) for i in range(len(ids) - window + 1)]
    assert compiled().windows(ids_T, window, point).tolist() == expected
    expected = [polynomial(ids[:n]) for n in range(len(ids) + 1)]
    assert compiled().prefixes(ids_T, point).tolist() == expected


def thue_morse(first: int, num: int) -> list[int]:
    return [(i.bit_count() + first) % 2 for i in range(num)]


def test_sequences_that_collide_at_every_point_modulo_a_power_of_two_do_not_here():
    """Both prompts had one hash whatever the point, and forgetting one of them broke the index for the other."""
    ones, zeros = thue_morse(1, 4096), thue_morse(0, 4096)
    difference = 1
    for i in range(12):  # the two polynomials differ by the product of point^(2^i) - 1
        difference = difference * (pow(POINT | 1, 2**i, 2**64) - 1) % 2**64
    assert difference == 0, "negative control: they collide modulo 2^64"
    hashes = [compiled().prefixes(np.array(x, dtype=np.int64), POINT)[-1] for x in (ones, zeros)]
    assert hashes[0] != hashes[1]
    index = index_of(ones, zeros, min_hit=32)
    assert len(index) == 2
    for donor in list(index._recent):
        index.forget(donor)
    assert len(index) == 0
