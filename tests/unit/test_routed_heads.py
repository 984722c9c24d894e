"""Head routing: a few heads that are chosen per query score for all, against the law; and what it may not change."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparse_checks import DTYPES, LENS, SELECTION, check, same
from sparse_world import SCALE, D, G, H, World, make_plan

from sglang_blockreuse.kernels import cpu_route
from sglang_blockreuse.kernels import reference_route as route
from sglang_blockreuse.kernels.cpu_attention import KeyBias

FOUR = {"scan_heads": "routed", "num_routed_heads": 4}


def make_world(pattern="DFXR", lens=LENS, *, dtype=torch.float32, **scorer):
    return World(make_plan(pattern, scorer={**FOUR, **scorer}, **SELECTION), lens, dtype=dtype)


def agrees(world, dtype=torch.float32):
    for got, expected in zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True):
        check(got, expected, dtype)


class TestTheLaw:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("kind", ["exact_qk", "int4_keys"])
    def test_every_role_attends_to_what_the_law_selects(self, kind, residual, dtype):
        agrees(make_world("DFXRF", kind=kind, residual=residual, dtype=dtype), dtype)

    @pytest.mark.parametrize("residual", [False, True])
    @pytest.mark.parametrize("num_heads", [1, 3])
    def test_lists_per_kv_head_choose_heads_of_their_own(self, num_heads, residual):
        agrees(make_world("FXRF", heads="kv_head", num_routed_heads=num_heads, residual=residual))

    @pytest.mark.parametrize("residual", [False, True])
    def test_one_list_that_is_lent_sums_what_the_kv_heads_chose(self, residual):
        agrees(
            make_world("DFXRF", heads="kv_head", lend_heads="layer", num_routed_heads=2, residual=residual)
        )

    @pytest.mark.parametrize("rerank_heads", ["all", "fused"])
    def test_a_pool_by_a_few_heads_is_ranked_by_others(self, rerank_heads):
        agrees(make_world("FXRF", rerank_heads=rerank_heads))

    def test_a_scan_by_all_heads_is_ranked_by_a_few(self):
        agrees(make_world("FXRF", scan_heads="all", rerank_heads="routed"))

    @pytest.mark.parametrize("terms", [(-0.7, -2.0), (0.0, -torch.inf)], ids=str)
    def test_the_correction_counts_when_heads_are_chosen_too(self, terms):
        world = make_world(residual=True)
        world.bias = KeyBias(world.tags, *terms)
        agrees(world)

    def test_fewer_heads_are_seen_to_choose_otherwise(self):
        """Negative control: the same world scored by all, by four and by four with their residual."""
        worlds = [make_world("F"), make_world("F", residual=True), World(make_plan("F", **SELECTION), LENS)]
        outs = [world.run_all(world.decoder())[0] for world in worlds]
        assert not torch.equal(outs[0], outs[1])
        assert not torch.equal(outs[0], outs[2])
        assert not torch.equal(outs[1], outs[2])


class TestExactness:
    @pytest.mark.parametrize("residual", [False, True])
    def test_all_heads_of_nine_are_all(self, residual):
        routed = make_world("FXRF", num_routed_heads=9, residual=residual)
        plain = World(make_plan("FXRF", **SELECTION), LENS)
        for got, expected in zip(
            routed.run_all(routed.decoder()), plain.run_all(plain.decoder()), strict=True
        ):
            same(got, expected)

    def test_a_residual_of_alike_heads_is_those_heads(self):
        """Nine heads of which each KV head's three are one: one of them, counted thrice."""
        world = make_world("F", num_routed_heads=3, residual=True)
        plain = World(make_plan("F", **SELECTION), LENS)
        for one in (world, plain):
            one.q[0] = one.q[0][:, ::G].repeat_interleave(G, 1)
            one.indices.cache_clear()
        check(world.run_all(world.decoder())[0], plain.expected()[0], torch.float32)

    def test_a_pool_that_holds_the_history_gives_every_layer_its_own_selection(self):
        wide = {**SELECTION, "pool_size": max(LENS)}
        own = World(make_plan("FFF", **SELECTION), LENS)
        pooled = World(make_plan("FXX", scorer={**FOUR, "rerank_heads": "all"}, **wide), LENS)
        for got, expected in zip(pooled.run_all(pooled.decoder()), own.run_all(own.decoder()), strict=True):
            same(got, expected)

    def test_a_row_gets_the_same_bits_whatever_shares_its_batch(self):
        world = make_world(residual=True, dtype=torch.bfloat16)
        together = world.run_all(world.decoder())
        for r in range(len(LENS)):
            alone = world.run_all(world.decoder(), order=[r])
            for layer in range(1, world.plan.num_layers):
                same(alone[layer], together[layer][r : r + 1])


class TestRouter:
    def test_heads_on_sinks_and_neighbours_are_worth_nothing(self):
        """Key 0 draws heads 0 to 4, the last key 5 and 6, the middle 7 and 8: those are chosen first."""
        world = make_world("F", lens=[320], num_routed_heads=2)
        slots = world.table[world.requests[0]].long()
        world.k[0][slots[:320]] = 0
        axis = torch.eye(D)[:H] * 40
        for keys, axes in ((slice(0, 1), 0), (slice(316, 320), 1), (slice(4, 312, 16), 2)):
            world.k[0][slots[keys]] = axis[axes]
        towards = [0, 0, 0, 0, 0, 1, 1, 2, 2]
        world.q[0] = axis[towards][None]
        forced = torch.zeros(320, dtype=torch.bool)
        forced[:4] = forced[312:] = True
        keys = world.k[0][slots[:320]].double()
        logits = torch.einsum("hgd,jhd->hgj", world.q[0][0].double().unflatten(0, (H, G)), keys).flatten(0, 1)
        worth = route.worth(logits * SCALE, forced)
        assert route.choose(worth, 2).nonzero().flatten().tolist() == [7, 8]
        seen = []
        decoder = world.decoder()
        choose = cpu_route.choose
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cpu_route, "choose", lambda *a: (seen.append(choose(*a)), seen[-1])[1])
            world.run_all(decoder)
        assert np.flatnonzero(seen[0][0]).tolist() == [7, 8]

    def test_equal_heads_are_chosen_from_the_lowest(self):
        shares, counting = np.full((1, 9, 8), 1 / 8, np.float32), np.ones((1, 1, 8), np.float32)
        assert np.flatnonzero(cpu_route.choose(shares, counting, 1, 4)[0]).tolist() == [0, 1, 2, 3]
        assert route.choose(torch.ones(9), 4).nonzero().flatten().tolist() == [0, 1, 2, 3]

    def test_the_sample_is_what_is_forced_and_a_sixteenth_of_the_rest(self):
        forced = torch.zeros(700, dtype=torch.bool)
        forced[:4] = forced[692:] = True
        at = route.sample(forced).nonzero().flatten().tolist()
        assert at == [*range(4), *range(4, 692, 16), *range(692, 700)]
        world = make_world("F", lens=[700])
        rows = world.decoder().begin(world.batch()).rows
        unused = world.decoder().state.own
        _, table, counting = cpu_route.sample(rows.arrays, unused.arrays, np.zeros(1, np.uint8), 4, 8)
        assert table.positions[0, 0, : table.counts[0]].tolist() == at
        assert counting[0, 0].sum() == len(range(4, 692, 16))

    def test_it_never_reads_what_no_row_owns(self):
        world = make_world("DFXRF", residual=True, heads="kv_head", num_routed_heads=2)
        assert not any(torch.isnan(out).any() for out in world.run_all(world.decoder()))
