"""`refresh_every`: full layers that scan on some steps and live on their last pool between, against the law."""

from __future__ import annotations

import json

import pytest
import torch
from sparse_world import SCALE, World, make_plan
from test_sparse_decode import check, same

from sglang_blockreuse.kernels import reference_select as law
from sglang_blockreuse.layers.plan import PlanError
from sglang_blockreuse.layers.plan_loader import LayerPlan
from sglang_blockreuse.layers.plan_schema import read_spec
from sglang_blockreuse.layers.share_state import FIELDS

SELECTION = {"final_k": 24, "pool_size": 60, "sink": 4, "window": 8}
LENS, STEPS = [400, 90, 250], 7
FULL = 1


def grown(pattern="DFXR", *, every, steps=STEPS, **options):
    """A world whose rows have `steps` tokens still to come."""
    world = World(make_plan(pattern, refresh_every=every, **{**SELECTION, **options}), LENS)
    world.lens = [n - steps for n in LENS]
    return world


def advance(world, seed):
    """One token more for every row, other queries in every layer."""
    torch.manual_seed(seed)
    world.lens = [n + 1 for n in world.lens]
    world.q = [torch.randn_like(q) for q in world.q]
    world.indices.cache_clear()


class Law:
    """The pools of one full layer by the rule: the best of the last pool and what came since, or of everything."""

    def __init__(self, world, every):
        self.world, self.every = world, every
        self.pools = [None] * len(world.lens)
        self.scanned, self.seen = [0] * len(world.lens), [0] * len(world.lens)

    def step(self):
        """(T of every row, which rows scanned)."""
        chosen, scans = [], []
        for r, n in enumerate(self.world.lens):
            scan = self.pools[r] is None or n - self.scanned[r] >= self.every
            old = [] if scan else [*self.pools[r], *range(self.seen[r], n)]
            candidates = torch.tensor(list(range(n)) if scan else old, dtype=torch.int32)
            self.pools[r] = self._best(r, candidates, SELECTION["pool_size"])
            chosen.append(self._best(r, candidates, SELECTION["final_k"]))
            self.scanned[r], self.seen[r] = (n if scan else self.scanned[r]), n
            scans.append(scan)
        return chosen, scans

    def _best(self, r, candidates, size):
        world, n = self.world, self.world.lens[r]
        history = world.table[world.requests[r], :n]
        best, _ = law.rerank(
            world.q[FULL][r : r + 1].double(),
            world.k[FULL].double(),
            candidates[None, None],
            torch.tensor([len(candidates)]),
            history,
            torch.tensor([0, n]),
            k=size,
            scale=SCALE,
            num_sinks=SELECTION["sink"],
            window=SELECTION["window"],
        )
        return [p for p in best[0, 0].tolist() if p >= 0]


def counted(decoder, name):
    return decoder.metrics.counts.get(name, 0)


@pytest.mark.parametrize("every", [2, 3, 100])
def test_every_step_chooses_what_the_law_chooses(every):
    world = grown(every=every)
    decoder, expected = world.decoder(strict=True), Law(world, every)
    for seed in range(STEPS):
        advance(world, seed)
        before = counted(decoder, "decode_tokens_total scanned")
        world.run_all(decoder)
        chosen, scans = expected.step()
        table, _ = decoder.state.written()[FULL, "pool"]
        for r, request in enumerate(world.requests):
            assert table.positions[request, 0, : table.counts[request, 0]].tolist() == expected.pools[r]
            assert set(chosen[r]) <= set(expected.pools[r])
        scanned = sum(n for n, scan in zip(world.lens, scans, strict=True) if scan)
        assert counted(decoder, "decode_tokens_total scanned") - before == scanned


def test_output_is_attention_over_the_laws_choice():
    world = grown("DF", every=3)
    decoder, expected = world.decoder(strict=True), Law(world, 3)
    for seed in range(STEPS):
        advance(world, seed)
        got = world.run_all(decoder)[FULL]
        chosen, _ = expected.step()
        positions = torch.tensor(chosen, dtype=torch.int32)[:, None]
        check(got, world.attention(FULL, positions, torch.full((len(LENS),), 24)), torch.float32)


def test_between_scans_it_is_seen_to_differ():
    """Negative control: the same steps with a scan in each."""
    outputs = []
    for every in (1, 100):
        world = grown("DF", every=every)
        decoder = world.decoder()
        steps = []
        for seed in range(3):
            advance(world, seed)
            steps.append(world.run_all(decoder)[FULL])
        outputs.append(steps)
    same(outputs[0][0], outputs[1][0])
    assert not torch.equal(outputs[0][2], outputs[1][2])


def test_what_leaves_the_window_stays_a_candidate():
    """A token that came after the scan, with a key that all queries want, is chosen when the window has passed it."""
    world = grown("DF", every=100, steps=16)
    at = world.lens[0] + 2  # it comes with the third token
    decoder, found = world.decoder(strict=True), []
    for seed in range(15):
        advance(world, seed)
        world.q[FULL][:] = 1.0
        world.k[FULL][world.table[world.requests[0], at].long()] = 5.0
        world.run_all(decoder)
        found.append(at in decoder.state.own.positions[world.requests[0], 0].tolist())
    assert found == [False, False, *[True] * 13]
    assert at < world.lens[0] - SELECTION["window"]
    # negative control: nobody wants it, so it is dropped behind the window
    world.k[FULL][world.table[world.requests[0], at].long()] = -5.0
    advance(world, 99)
    world.q[FULL][:] = 1.0
    world.run_all(decoder)
    assert at not in decoder.state.own.positions[world.requests[0], 0].tolist()


def test_staleness_is_counted_in_both_directions():
    world = grown("DFXR", every=3)
    decoder = world.decoder()
    for seed in range(6):
        advance(world, seed)
        world.run_all(decoder)
    rows = len(LENS)
    assert counted(decoder, "decode_staleness_total steps") == rows * 2 * (0 + 1 + 2)
    assert counted(decoder, "decode_staleness_total layers") == rows * 6 * (1 + 1)


class TestState:
    """Whatever breaks the chain of a row makes that row scan, and no other."""

    def scans(self, change, *, order=None):
        """Tokens that were scanned in the step after `change`, by row."""
        world = grown("DF", every=100)
        decoder = world.decoder()
        for seed in range(2):
            advance(world, seed)
            world.run_all(decoder)
        change(world, decoder)
        before = counted(decoder, "decode_tokens_total scanned")
        advance(world, 2)
        world.run_all(decoder, **({} if order is None else {"order": order}))
        return counted(decoder, "decode_tokens_total scanned") - before, world

    def test_nothing_broken_nothing_scanned(self):
        assert self.scans(lambda world, decoder: None)[0] == 0

    def test_rows_may_move_and_leave(self):
        assert self.scans(lambda world, decoder: None, order=[2, 0])[0] == 0

    def test_a_slot_that_changed_hands(self):
        def change(world, decoder):
            world.row_ids[1] += 1000

        scanned, world = self.scans(change)
        assert scanned == world.lens[1]

    @pytest.mark.parametrize("told", [True, False])
    def test_a_row_that_was_rolled_back(self, told):
        def change(world, decoder):
            world.lens[1] -= 1
            if told:
                decoder.state.truncate(world.requests[1], world.lens[1])

        scanned, world = self.scans(change)
        assert scanned == world.lens[1]

    def test_an_ended_row(self):
        scanned, world = self.scans(lambda world, decoder: decoder.state.invalidate([world.requests[1]]))
        assert scanned == world.lens[1]

    @pytest.mark.parametrize("field", ["row", "kv", "keys", "digest"])
    def test_a_spoilt_stamp(self, field):
        def change(world, decoder):
            _, stamps = decoder.state.written()[FULL, "pool"]
            stamps[world.requests[1], FIELDS.index(field)] += 1

        scanned, world = self.scans(change)
        assert scanned == world.lens[1]

    @pytest.mark.parametrize("array", ["positions", "slots", "counts"])
    def test_a_spoilt_table(self, array):
        def change(world, decoder):
            table, _ = decoder.state.written()[FULL, "pool"]
            getattr(table, array)[world.requests[1]] += 1

        scanned, world = self.scans(change)
        assert scanned == world.lens[1]

    def test_a_slot_table_that_was_rewritten_is_followed(self):
        """The host may move a row's prefix to other slots; positions are what is kept."""

        def change(world, decoder):
            old = world.table[world.requests[1], :40].long()
            new = torch.arange(len(world.k[0]))[~torch.isin(torch.arange(len(world.k[0])), world.table)][:40]
            for pool in (*world.k, *world.v):
                pool[new] = pool[old]
                pool[old] = torch.nan
            world.table[world.requests[1], :40] = new.int()

        scanned, world = self.scans(change)
        assert scanned == 0
        out = world.run_all(world.decoder())[FULL]
        assert not torch.isnan(out).any()


def test_it_needs_a_pool():
    raw = {"version": 1, "name": "x", "layers": [{"layers": 0, "role": "full"}]}
    raw["selection"] = {"final_k": 100, "refresh_every": 4}
    with pytest.raises(PlanError, match=r"selection\.pool_size"):
        LayerPlan(read_spec(json.dumps(raw), "test.json"), "test")
