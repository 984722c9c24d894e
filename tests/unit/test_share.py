"""Lists of a threshold: every position whose share of a list's queries exceeds it, as many as the row needs."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from sparse_world import G, H, World, make_plan
from tolerances import EXACT, KERNEL_OUT

from sglang_blockreuse.kernels import reference_select as law
from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.layers.plan import PlanError
from sglang_blockreuse.layers.plan_loader import LayerPlan, parse_plan
from sglang_blockreuse.layers.plan_schema import read_spec
from sglang_blockreuse.layers.share_state import StaleShareState

# a cap that no list reaches here, and a share that random rows give to some positions
SELECTION = {"final_k": 60, "pool_size": 90, "sink": 4, "window": 8, "share": 0.01}
LENS = [700, 70, 513, 130, 300]
LISTS = {
    "layer": {"heads": "layer"},
    "kv_head": {"heads": "kv_head"},
    "kv_head, lends layer": {"heads": "kv_head", "lend_heads": "layer"},
}


def agrees(world, decoder, **batch):
    for layer, (got, expected) in enumerate(
        zip(world.run_all(decoder, **batch), world.expected(), strict=True)
    ):
        absolute, relative = KERNEL_OUT["cpu_attention", world.dtype]
        torch.testing.assert_close(got.double(), expected, atol=absolute, rtol=relative)
        assert not torch.isnan(got).any(), f"layer {layer} read a slot that no row owns"


def own_counts(world):
    """[R, X] positions of the lists of a plan of one layer."""
    decoder = world.decoder(strict=True)
    world.run_all(decoder)
    return decoder.state.own.counts[world.requests]


class TestTheLaw:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
    def test_every_role_attends_to_what_the_law_keeps(self, lists, dtype):
        world = World(make_plan("DFXRFXX", scorer=lists, **SELECTION), LENS, dtype=dtype)
        agrees(world, world.decoder(strict=True))

    @pytest.mark.parametrize(
        "scorer",
        [
            {"kind": "int4_keys", **LISTS["kv_head, lends layer"]},
            {"kind": "page_minmax"},
            {"scan_heads": "fused", "rerank_heads": "all"},
            {"scan_heads": "routed", "num_routed_heads": 2, **LISTS["kv_head"]},
            {"scan_heads": "routed", "num_routed_heads": 4, "residual": True},
        ],
        ids=str,
    )
    def test_whatever_scores(self, scorer):
        world = World(make_plan("FXR", scorer=scorer, **SELECTION), LENS)
        agrees(world, world.decoder(strict=True))

    def test_the_correction_counts_before_the_threshold(self):
        world = World(make_plan("DFXR", **SELECTION), LENS)
        world.bias = KeyBias(world.tags, -0.7, -2.0)
        agrees(world, world.decoder())

    def test_a_pool_that_is_refreshed_is_ranked_by_the_threshold_too(self):
        world = World(make_plan("F", refresh_every=3, **{**SELECTION, "pool_size": 690}), [680, 660])
        decoder = world.decoder(strict=True)
        for _ in range(3):  # a pool that holds the history and what came since is the history
            world.lens = [n + 1 for n in world.lens]
            for request, n in zip(world.requests, world.lens, strict=True):
                world.table[request, n - 1] = world.table[request, 0]
            world.indices.cache_clear()
            agrees(world, decoder)


class TestLists:
    def test_they_are_ragged_in_rows_and_heads(self):
        counts = own_counts(World(make_plan("F", heads="kv_head", **SELECTION), LENS))
        assert counts.shape == (len(LENS), H)
        assert len(set(counts.flatten().tolist())) > 3
        assert (counts >= 12).all()

    def test_they_hold_what_exceeds_the_share_and_sinks_and_window_once(self):
        world = World(make_plan("F", heads="kv_head", **SELECTION), LENS)
        decoder = world.decoder(strict=True)
        world.run_all(decoder)
        q = world.q[0].unflatten(1, (H, G))
        for r, request in enumerate(world.requests):
            keys = world.k[0][world.table[request, : LENS[r]].long()]
            shares_HJ = torch.einsum("hgd,jhd->hgj", q[r], keys).mul(64**-0.5).softmax(-1).mean(1)
            for x in range(H):
                mine = set(torch.nonzero(shares_HJ[x] > SELECTION["share"])[:, 0].tolist())
                mine |= {0, 1, 2, 3, *range(LENS[r] - 8, LENS[r])}
                table = decoder.state.own
                assert table.positions[request, x, : table.counts[request, x]].tolist() == sorted(mine)

    def test_the_cap_keeps_the_best(self):
        """A share that everything exceeds is a count."""
        words = {key: value for key, value in SELECTION.items() if key != "share"}
        outs = []
        for selection in (words, {**words, "share": 1e-9}):
            world = World(make_plan("FXR", heads="kv_head", **selection), LENS)
            outs.append(world.run_all(world.decoder(strict=True)))
        for got, expected in zip(*outs, strict=True):
            torch.testing.assert_close(got, expected, atol=EXACT[0], rtol=EXACT[1])

    def test_a_higher_share_is_seen_to_keep_less(self):
        """Negative control: a tau of another plan gives other lists."""
        less, more = (
            own_counts(World(make_plan("F", heads="kv_head", **{**SELECTION, "share": share}), LENS))
            for share in (0.02, 0.01)
        )
        assert (less <= more).all()
        assert less.sum() < more.sum()

    def test_nothing_but_sinks_and_window_where_nothing_exceeds_it(self):
        assert (own_counts(World(make_plan("F", **{**SELECTION, "share": 0.99}), LENS)) == 12).all()

    def test_one_list_needs_the_mean_over_all_heads(self):
        """What one head alone looks at must hold the share for all of them."""
        world = World(make_plan("F", heads="layer", **SELECTION), [300])
        world.k[0].nan_to_num_().zero_()
        world.q[0][:] = 0
        slot = int(world.table[world.requests[0], 100])
        world.k[0][slot, 0] = 1
        world.q[0][0, 0] = 4  # one query of nine: about .99 of its mass
        assert own_counts(world).tolist() == [[13]]
        for share, count in ((0.1, 13), (0.12, 12)):  # .99 / 9 = .11
            other = World(make_plan("F", heads="layer", **{**SELECTION, "share": share}), [300])
            other.k, other.q, other.table = world.k, world.q, world.table
            assert own_counts(other).tolist() == [[count]]

    def test_what_was_read_is_counted(self):
        world = World(make_plan("DFXR", heads="kv_head", **SELECTION), LENS)
        decoder = world.decoder(strict=True)
        world.run_all(decoder)
        expected = sum(float(world.indices(layer)[1].float().mean(1).sum()) for layer in (1, 2, 3))
        assert abs(decoder.metrics.counts["decode_tokens_total attended"] - expected) <= 3 * 0.5


def test_lengths_that_are_swapped_between_lists_are_detected():
    """Negative control: two lists of a row exchange their lengths."""
    world = World(make_plan("FR", heads="kv_head", **SELECTION), LENS)
    decoder = world.decoder(strict=True)
    step = decoder.begin(world.batch())
    world.run(decoder, step, 0)
    counts = decoder.state.written()[0, "indices"][0].counts[world.requests[0]]
    counts[[0, 1]] = counts[[1, 0]]
    assert counts[0] != counts[1]
    with pytest.raises(StaleShareState, match="digest"):
        world.run(decoder, step, 1)


def test_the_law_is_top_k_less_what_is_below():
    torch.manual_seed(0)
    scores, lens = torch.rand(3, 2, 40), torch.tensor([40, 31, 5])
    words = {"num_sinks": 2, "window": 3}
    everything, counts = law.above(scores, lens, -1.0, 9, **words)
    best, sizes = law.top_k(scores, lens, 9, **words)
    assert torch.equal(everything, best)
    assert torch.equal(counts, sizes[:, None].expand(-1, 2))
    kept, counts = law.above(scores, lens, 0.8, 40, **words)
    for r, x in np.ndindex(3, 2):
        n = int(lens[r])
        wanted = [j for j in range(n) if scores[r, x, j] > 0.8 or j < 2 or j >= n - 3]
        assert kept[r, x, : counts[r, x]].tolist() == wanted


class TestThePlan:
    RAW = {"version": 1, "name": "x", "layers": [{"layers": "all", "role": "full"}]}  # noqa: RUF012

    def plan(self, **selection):
        raw = {**self.RAW, "selection": {"final_k": 100, **selection}}
        return LayerPlan(read_spec(json.dumps(raw), "test.json"), "test")

    @pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, "0.1"])
    def test_a_share_lies_between_0_and_1(self, share):
        with pytest.raises(PlanError, match=r"selection\.share: got .*a number"):
            self.plan(share=share)

    def test_it_needs_something_that_is_always_listed(self):
        with pytest.raises(PlanError, match=r"selection\.share.*empty list.*Give at least 1 sink or window"):
            self.plan(share=0.1, sink=0, window=0)

    def test_it_is_part_of_the_fingerprint_and_of_the_file(self):
        """Negative control: a tau of another plan is another plan."""
        prints = {self.plan(**words).fingerprint for words in ({}, {"share": 0.0005}, {"share": 0.0006})}
        assert len(prints) == 3
        plan = self.plan(share=0.0005)
        assert parse_plan(plan.to_yaml(), "x.yaml").fingerprint == plan.fingerprint
