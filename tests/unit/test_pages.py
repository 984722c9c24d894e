"""Selection by pages: bounds against the law, and bounds of the keys they stand for, whatever happens to rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sparse_checks import DTYPES, LENS, SELECTION, check, same
from sparse_world import D, H, World, make_plan

from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.kernels.reference_pages import page_token_scores, row_bounds
from sglang_blockreuse.layers.share_state import StaleShareState

FULL = 1  # the layer of DFXR that scans


def make_world(pattern="DFXR", lens=LENS, *, dtype=torch.float32, page_size=16, scorer=None, **options):
    words = {"kind": "page_minmax", "page_size": page_size, **(scorer or {})}
    plan = make_plan(pattern, scorer=words, **{**SELECTION, **options})
    return World(plan, lens, dtype=dtype)


def agrees(world, decoder, dtype=torch.float32, **batch):
    for got, expected in zip(world.run_all(decoder, **batch), world.expected(), strict=True):
        check(got, expected, dtype)


def own_selection(pattern, *, kind="page_minmax", **options):
    """Output and indices of a plan whose full layers may have a pool."""
    world = World(make_plan(pattern, scorer={"kind": kind}, **options), LENS)
    decoder = world.decoder(strict=True)
    return world.run_all(decoder)


class TestTheLaw:
    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("page_size", [1, 5, 16])
    @pytest.mark.parametrize("pattern", ["FFF", "DFXRXR"])
    def test_every_role_attends_to_what_the_law_selects(self, pattern, page_size, dtype):
        world = make_world(pattern, dtype=dtype, page_size=page_size)
        outs = world.run_all(world.decoder(strict=True))
        for layer, (got, expected) in enumerate(zip(outs, world.expected(), strict=True)):
            check(got, expected, dtype)
            assert not torch.isnan(got).any(), f"layer {layer} read a slot that no row owns"

    @pytest.mark.parametrize("pattern", ["F", "FXR"])
    def test_without_a_pool_pages_choose_the_indices(self, pattern):
        options = {"pool_size": None} if pattern == "F" else {}
        world = World(
            make_plan(
                pattern,
                scorer={"kind": "page_minmax"},
                **{k: v for k, v in {**SELECTION, **options}.items() if v},
            ),
            LENS,
        )
        agrees(world, world.decoder(strict=True))

    @pytest.mark.parametrize(
        "heads", [{}, {"heads": "kv_head"}, {"heads": "kv_head", "lend_heads": "layer"}], ids=str
    )
    @pytest.mark.parametrize("scan_heads", ["all", "fused"])
    def test_lists_and_heads(self, heads, scan_heads):
        world = make_world("FXRF", scorer={**heads, "scan_heads": scan_heads})
        agrees(world, world.decoder(strict=True))

    @pytest.mark.parametrize("terms", [(-0.7, -2.0), (0.0, -torch.inf)], ids=str)
    def test_the_correction_counts_for_a_page_by_its_largest(self, terms):
        world = make_world()
        world.bias = KeyBias(world.tags, *terms)
        agrees(world, world.decoder(strict=True))

    def test_key_from_scans_another_layers_pages(self):
        world = make_world("DFFF")
        shared = World(
            make_plan("DFFXR", scorer={"kind": "page_minmax"}, key_from={2: 1, 3: 1}, **SELECTION), LENS
        )
        decoder = shared.decoder(strict=True)
        agrees(shared, decoder)
        assert set(decoder.keys.layers) == {1}
        assert set(world.decoder().keys.layers) == {1, 2, 3}

    def test_a_bound_is_never_below_a_score(self):
        world = make_world()
        slots = world.table[world.requests[0], : LENS[0]].long()
        low, high = row_bounds(world.k[FULL], slots, 16)
        keys, q = world.k[FULL][slots], world.q[FULL][0].unflatten(0, (H, -1))
        exact = torch.einsum("hgd,jhd->jhg", q, keys)
        bound = torch.maximum(q * low[:, :, None], q * high[:, :, None]).sum(-1)
        assert (exact <= bound.repeat_interleave(16, 0)[: len(slots)] + 1e-4).all()


class TestExactness:
    def test_pages_of_one_token_are_exact_scores(self):
        selection = {"final_k": 24, "sink": 4, "window": 8}
        one, exact = (
            World(make_plan("FRF", scorer=scorer, **selection), LENS)
            for scorer in ({"kind": "page_minmax", "page_size": 1}, {})
        )
        for got, expected in zip(one.run_all(one.decoder()), exact.expected(), strict=True):
            check(got, expected, torch.float32)

    def test_a_pool_that_holds_the_history_gives_every_layer_its_own_best(self):
        wide = {**SELECTION, "pool_size": max(LENS)}
        got = own_selection("FXF", **wide)
        for one, other in zip(got, own_selection("FFF", kind="exact_qk", **SELECTION), strict=True):
            same(one, other)
        narrow = own_selection("FXF", **SELECTION)
        assert not torch.equal(narrow[0], got[0]), "a smaller pool of pages would have held the same"

    def test_rows_that_read_everything_are_left_to_dense_attention(self):
        world = make_world(final_k=700, pool_size=700)
        assert world.decoder().begin(world.batch()) is None

    def test_equal_pages_go_to_the_lower_position(self):
        world = make_world("F")
        for pool in world.k:
            pool[:] = 1.0
        decoder = world.decoder()
        world.run_all(decoder)
        for request, n in zip(world.requests, LENS, strict=True):
            assert decoder.state.own.positions[request, 0].tolist() == [*range(24 - 8), *range(n - 8, n)]

    def test_whole_pages_are_chosen_and_the_last_from_its_beginning(self):
        world = World(make_plan("F", scorer={"kind": "page_minmax"}, final_k=60, sink=4, window=8), [700])
        decoder = world.decoder()
        world.run_all(decoder)
        chosen = decoder.state.own.positions[world.requests[0], 0].tolist()
        pages = {}
        for p in chosen:
            if 16 <= p < 688:  # pages without sinks and window
                pages.setdefault(p // 16, []).append(p % 16)
        cut = [inside for inside in pages.values() if len(inside) < 16]
        assert len(pages) >= 2
        assert len(cut) <= 1
        assert all(inside == [*range(len(inside))] for inside in cut)


class TestRowsGrow:
    def test_the_last_page_is_right_at_every_step(self):
        world = make_world(lens=[n + 40 for n in (60, 77)], final_k=24)
        decoder = world.decoder(strict=True)
        world.lens = [60, 77]
        for _ in range(40):
            world.lens = [n + 1 for n in world.lens]
            world.indices.cache_clear()
            agrees(world, decoder)

    def test_a_page_is_computed_when_it_is_not_full_and_once_when_it_is(self, monkeypatch):
        world = make_world("F", lens=[120])
        world.lens = [100]
        decoder = world.decoder()
        computed = []
        compute = decoder.keys._compute
        monkeypatch.setattr(
            decoder.keys, "_compute", lambda at, k: (computed.append(len(at)), compute(at, k))[1]
        )
        for n in range(100, 116):
            world.lens = [n]
            decoder.keys.written(world.table[world.requests[0], n - 1 : n].long())
            world.run_all(decoder)
        # six full pages and the open one; then the open one alone, full at 112; a new one is opened at 113
        assert computed[0] == 7
        assert set(computed[1:]) == {1}
        world.run_all(decoder)
        assert len(decoder.keys._absent_C) == 1

    def test_refreshes_rank_the_last_pool_by_the_keys(self):
        """Rows of one batch, some of which scan pages and some of which extend their pool."""
        world = make_world("DF", lens=[400, 250], refresh_every=3)
        world.lens = [380, 230]
        decoder = world.decoder(strict=True)
        for step in range(6):
            world.lens = [n + 1 for n in world.lens]
            if step == 2:  # the first row comes back as somebody else: it scans, the second does not
                world.row_ids = world.row_ids + np.array([1, 0])
            world.indices.cache_clear()
            world.run_all(decoder)
            table, _ = decoder.state.written()[FULL, "pool"]
            scanned = decoder.metrics.counts["decode_tokens_total scanned"]
            for r, request in enumerate(world.requests):
                pool = table.positions[request, 0, : table.counts[request]]
                assert (np.diff(pool) > 0).all()
                assert pool[-1] == world.lens[r] - 1
        assert scanned == (381 + 231) + 383 + 234 + 386

    def test_rows_may_move_and_leave(self):
        world = make_world()
        decoder = world.decoder(strict=True)
        first = world.run_all(decoder)
        for order in ([3, 0, 4], [1], [2, 1, 0, 3, 4]):
            for layer, got in enumerate(world.run_all(decoder, order=order)):
                if layer:
                    same(got, first[layer][order])


class TestStaleBounds:
    """Bounds are of slots and of what stands in them; each thing that changes either is one test."""

    def decoded(self, *, strict=True, **options):
        world = make_world(**options)
        decoder = world.decoder(strict=strict)
        world.run_all(decoder)
        return world, decoder

    def rewrite(self, world, slots):
        for pool in world.k:
            pool[slots] = torch.randn(len(slots), H, D) * 2
        world.indices.cache_clear()

    def third_row(self, world):
        return world.table[world.requests[2], 20:60].long()

    def test_an_announced_write_is_read_before_its_page_is_scanned(self):
        world, decoder = self.decoded()
        self.rewrite(world, self.third_row(world))
        decoder.written(self.third_row(world))
        agrees(world, decoder)

    def test_an_unannounced_write_is_detected(self):
        """Negative control."""
        world, decoder = self.decoded()
        self.rewrite(world, self.third_row(world))
        with pytest.raises(StaleShareState, match=r"layer 1: slots .* were rewritten"):
            world.run_all(decoder)

    def test_it_is_mended_within_a_period_and_counted(self, monkeypatch):
        monkeypatch.setattr("sglang_blockreuse.layers.index_keys.AUDIT_PERIOD", 8)
        world, decoder = self.decoded(strict=False, pattern="DF")
        self.rewrite(world, world.table[world.requests[2], 20:500].long())
        first = world.run_all(decoder)
        assert not torch.allclose(first[FULL][2].double(), world.expected()[FULL][2], atol=1e-3)
        for _ in range(8):
            world.run_all(decoder)
        agrees(world, decoder)
        assert decoder.metrics.counts["decode_stale_keys_total"] == 31, "20 to 500 are in pages 1 to 31"

    def test_a_request_slot_that_changes_hands_keeps_nothing(self):
        """Another row moves in, with other slots, other lengths, or the slots of a third row."""
        world, decoder = self.decoded()
        a, b = world.requests[0], world.requests[2]
        world.table[[a, b]] = world.table[[b, a]].clone()
        world.lens[0], world.lens[2] = world.lens[2], world.lens[0]
        world.row_ids = world.row_ids + 50
        world.indices.cache_clear()
        agrees(world, decoder)

    def test_one_slot_that_is_exchanged_is_enough(self):
        """A tree that had the same prefix gives the row its own slots, in the middle of a page too."""
        world, decoder = self.decoded()
        request, other = world.requests[2], world.table[world.requests[0], 600]
        for pool in (*world.k, *world.v):
            pool[int(other)] = torch.randn(H, D) * 2
        decoder.written(other[None].long())
        world.table[request, 33] = other
        world.indices.cache_clear()
        agrees(world, decoder)

    def test_planted_bounds_of_another_row_are_detected(self):
        """Negative control: swapped rows, and a bound that is too low."""
        for spoil in (
            lambda bounds, a, b: bounds.__setitem__([a, b], bounds[[b, a]].clone()),
            lambda bounds, a, b: bounds.__setitem__(a, bounds[a] - 1),
        ):
            world, decoder = self.decoded()
            table = decoder.keys._table_BN
            a, b = (int(table[world.requests[r], 1]) for r in (0, 2))
            spoil(decoder.keys._bounds[FULL], a, b)
            with pytest.raises(StaleShareState, match="layer 1"):
                world.run_all(decoder)

    def test_a_step_that_was_cut_short_leaves_its_pages_absent(self):
        world = make_world("DFFX")
        decoder = world.decoder(strict=True)
        step = decoder.begin(world.batch())
        for layer in (0, 1):
            world.run(decoder, step, layer)
        agrees(world, decoder)
        decoder.begin(world.batch())
        assert len(decoder.keys._absent_C) == sum(n % 16 > 0 for n in LENS)

    def test_rows_that_share_slots_hold_pages_of_their_own(self):
        """A shared prefix, with a page that is shared in part; the arena grows past one page per slot."""
        world = make_world(lens=[200, 200, 200], final_k=24)
        first = world.table[world.requests[0], :150]
        world.table[world.requests[1], :150] = world.table[world.requests[2], :150] = first
        decoder = world.decoder(strict=True)
        agrees(world, decoder)
        agrees(world, decoder)

    @pytest.mark.parametrize("together", [False, True], ids=["given to others", "and more are made"])
    def test_pages_of_rows_that_left(self, together):
        """There is room for the longest row alone: enough where the rows take turns, too little for all at once."""
        world = make_world(page_size=16)
        decoder = world.decoder(strict=True)
        index, size = decoder.keys, -(-max(LENS) // 16)
        index._arena = type(index._arena)(*(part[:size] for part in index._arena))
        for layer, bounds in index._bounds.items():
            index._bounds[layer] = bounds[:size]
        index._free = list(range(size))
        if together:
            agrees(world, decoder)
        for r in range(len(LENS)):
            got = world.run_all(decoder, order=[r])
            check(got[FULL], world.expected()[FULL][r : r + 1], torch.float32)
        held = [e for request, n in index._held.items() for e in index._table_BN[request, :n].tolist()]
        assert sorted(held + index._free) == list(range(len(index._arena.stamp_C)))
        assert (len(index._arena.stamp_C) > size) is together


def test_a_row_gets_the_same_bits_whatever_shares_its_batch():
    world = make_world(dtype=torch.bfloat16)
    together = world.run_all(world.decoder())
    for r in range(len(LENS)):
        alone = world.run_all(world.decoder(), order=[r])
        for layer in range(1, world.plan.num_layers):
            same(alone[layer], together[layer][r : r + 1])


def test_the_law_by_tokens_is_the_law_by_pages():
    """`page_scores` of the pages themselves, spread over their tokens."""
    from sglang_blockreuse.kernels.reference_select import PageBounds, page_scores

    world = make_world(lens=[64])
    slots = world.table[world.requests[0], :64].long()
    bounds = PageBounds(*(part.double() for part in row_bounds(world.k[0], slots, 16)))
    q = world.q[0].double()
    pages = page_scores(q, bounds, torch.arange(4), torch.tensor([0, 4]), scale=0.125)
    tokens = page_token_scores(
        q, world.k[0].double(), slots, torch.tensor([0, 64]), page_size=16, scale=0.125
    )
    torch.testing.assert_close(tokens[0, 0, ::16], pages[0, 0])
