"""Attention to the means of what lists leave out: against the law, and means of the blocks they stand for."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from case_twin import attended
from msgspec.structs import replace
from sparse_world import SCALE, D, G, H, World, make_plan
from tiny_models import VOCAB, talking_model
from tolerances import EXACT, KERNEL_OUT

from sglang_blockreuse.kernels import cpu_tail, reference_tail
from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.layers.calibration.case import evaluate
from sglang_blockreuse.layers.calibration.judge import described
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.pattern import bound_of
from sglang_blockreuse.layers.calibration.scored_case import ScoredCase
from sglang_blockreuse.layers.plan import TAIL_BLOCK, PlanError, Scorer, Selection
from sglang_blockreuse.layers.plan_explain import KVShape, explain
from sglang_blockreuse.layers.plan_loader import LayerPlan, parse_plan
from sglang_blockreuse.layers.plan_schema import read_spec
from sglang_blockreuse.layers.plan_support import unsupported_repair
from sglang_blockreuse.layers.share_state import StaleShareState

SELECTION = {"final_k": 24, "pool_size": 60, "sink": 4, "window": 8, "tail": "block_mean"}
LENS = [700, 64, 513, 130, 300]
FULL = 1  # the layer of DFXR that scans
OWN = {"heads": "kv_head", "lend_heads": "layer"}


def close(got, expected, dtype=torch.float32):
    absolute, relative = KERNEL_OUT["cpu_tail", dtype]
    torch.testing.assert_close(got.double(), expected, atol=absolute, rtol=relative)
    assert not torch.isnan(got).any(), "a slot that no row owns was read"


def agrees(world, decoder, **batch):
    for got, expected in zip(world.run_all(decoder, **batch), world.expected(), strict=True):
        close(got, expected, world.dtype)


class TestTheLaw:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("scorer", [{}, OWN, {"heads": "kv_head"}, {"kind": "int4_keys", **OWN}], ids=str)
    def test_every_role_attends_to_lists_and_to_what_they_leave_out(self, scorer, dtype):
        world = World(make_plan("DFXRF", scorer=scorer, **SELECTION), LENS, dtype=dtype)
        agrees(world, world.decoder(strict=True))

    def test_with_lists_of_a_threshold(self):
        words = {**SELECTION, "final_k": 60, "share": 0.01}
        world = World(make_plan("FXR", scorer=OWN, **words), [700, 70, 513])
        agrees(world, world.decoder(strict=True))

    @pytest.mark.parametrize("terms", [(-0.7, -2.0), (0.0, -torch.inf), (-8.0, -0.5)], ids=str)
    def test_the_correction_weighs_the_keys_of_a_mean(self, terms):
        """Keys of a weight that is nearly nothing are in no mean."""
        world = World(make_plan("DFXR", scorer=OWN, **SELECTION), LENS)
        world.bias = KeyBias(world.tags, *terms)
        decoder = world.decoder(strict=True)
        agrees(world, decoder)
        world.tags[world.table[world.requests[0], 40:90].long()] = 1  # nobody wrote these slots
        world.indices.cache_clear()
        agrees(world, decoder)

    def test_each_layer_chooses(self):
        world = World(make_plan("FFF", tails={1: "none"}, **SELECTION), LENS)
        agrees(world, decoder := world.decoder(strict=True))
        assert set(decoder.tails.layers) == {0, 2}
        world = World(make_plan("FFF", tails={1: "block_mean"}, **{**SELECTION, "tail": "none"}), LENS)
        agrees(world, decoder := world.decoder(strict=True))
        assert set(decoder.tails.layers) == {1}

    def test_a_tail_of_equal_keys_is_exact(self):
        """Jensen's inequality is an equation where every key of a block scores alike."""
        world = World(make_plan("F", **SELECTION), LENS)
        for request, n in zip(world.requests, LENS, strict=True):
            slots = world.table[request, :n].long()
            for block in slots.split(TAIL_BLOCK):
                world.k[0][block] = torch.randn(H, D)
        close(world.run_all(world.decoder(strict=True))[0], world.dense(0))

    def test_it_weighs_no_more_than_what_it_stands_for(self):
        torch.manual_seed(0)
        k, v, q = torch.randn(200, D).double(), torch.randn(200, D).double(), torch.randn(G, D).double()
        left_out, zeros = torch.rand(200) < 0.8, torch.zeros(200).double()
        keys, _, terms = reference_tail.pseudo_keys(k, v, left_out, zeros, TAIL_BLOCK)
        tail = (q @ keys.T * SCALE + terms).exp().sum(-1)
        true = (q @ k.T * SCALE).exp()[:, left_out].sum(-1)
        assert (tail <= true).all()
        assert (tail > 0.3 * true).all()

    def test_without_a_tail_the_bits_are_those_of_before(self):
        """Negative control besides: with one the output differs."""
        words = {key: value for key, value in SELECTION.items() if key != "tail"}
        plain = World(make_plan("FXR", **words), LENS)
        other = World(make_plan("FXR", tails={0: "none"}, **SELECTION), LENS)
        without, partly = plain.run_all(plain.decoder()), other.run_all(other.decoder())
        assert torch.equal(without[0], partly[0])
        assert not torch.equal(without[1], partly[1])


class TestCountingTwice:
    """Negative control: a tail that holds a position which the list holds too."""

    def test_a_mean_of_everything_is_seen_to_differ(self, monkeypatch):
        pseudo_keys = reference_tail.pseudo_keys
        monkeypatch.setattr(
            reference_tail,
            "pseudo_keys",
            lambda k, v, left_out, *rest: pseudo_keys(k, v, left_out | True, *rest),
        )
        world = World(make_plan("F", **SELECTION), LENS)
        with pytest.raises(AssertionError, match="not close"):
            agrees(world, world.decoder(strict=True))

    def test_a_list_of_everything_but_one_leaves_that_one(self):
        """Nothing is left of the other blocks, whatever rounding leaves of their sums."""
        world = World(make_plan("F", final_k=299, sink=4, window=8, tail="block_mean"), [300])
        close(world.run_all(world.decoder(strict=True))[0], world.dense(0))


class TestStaleMeans:
    """Means are of slots and of what stands in them; each thing that changes either is one test."""

    def decoded(self, *, strict=True, pattern="DFXR"):
        world = World(make_plan(pattern, **SELECTION), LENS)
        decoder = world.decoder(strict=strict)
        world.run_all(decoder)
        return world, decoder

    def rewrite(self, world, slots, pools=None):
        for pool in pools or (*world.k, *world.v):
            pool[slots] = torch.randn(len(slots), H, D) * 2
        world.indices.cache_clear()

    def third_row(self, world):
        return world.table[world.requests[2], 20:60].long()

    @pytest.mark.parametrize("what", ["k", "v"])
    def test_an_unannounced_write_is_detected(self, what):
        """Negative control: a stale block sum."""
        world, decoder = self.decoded()
        self.rewrite(world, self.third_row(world), getattr(world, what))
        with pytest.raises(StaleShareState, match=r"layer 1: slots .* were rewritten and their page was not"):
            world.run_all(decoder)

    def test_an_announced_write_is_read_before_its_block_is_attended_to(self):
        world, decoder = self.decoded()
        self.rewrite(world, self.third_row(world))
        decoder.written(self.third_row(world))
        agrees(world, decoder)

    def test_it_is_mended_within_a_period_and_counted(self, monkeypatch):
        monkeypatch.setattr("sglang_blockreuse.layers.index_keys.AUDIT_PERIOD", 4)
        world, decoder = self.decoded(strict=False, pattern="DF")
        self.rewrite(world, world.table[world.requests[2], 20:500].long())
        first = world.run_all(decoder)
        assert not torch.allclose(first[FULL][2].double(), world.expected()[FULL][2], atol=1e-3)
        for _ in range(4):
            world.run_all(decoder)
        agrees(world, decoder)
        assert decoder.metrics.counts["decode_stale_keys_total"] == 8, "20 to 500 are in blocks 0 to 7"

    def test_a_request_slot_that_changes_hands_keeps_nothing(self):
        world, decoder = self.decoded()
        a, b = world.requests[0], world.requests[2]
        world.table[[a, b]] = world.table[[b, a]].clone()
        world.lens[0], world.lens[2] = world.lens[2], world.lens[0]
        world.row_ids = world.row_ids + 50
        world.indices.cache_clear()
        agrees(world, decoder)

    def test_one_slot_that_is_exchanged_is_enough(self):
        world, decoder = self.decoded()
        request, other = world.requests[2], world.table[world.requests[0], 600]
        self.rewrite(world, other[None].long())
        decoder.written(other[None].long())
        world.table[request, 33] = other
        agrees(world, decoder)

    def test_means_of_another_row_are_detected(self):
        """Negative control: swapped rows."""
        world, decoder = self.decoded()
        a, b = (int(decoder.tails._table_BN[world.requests[r], 1]) for r in (0, 2))
        means = decoder.tails._stored[FULL]
        means[[a, b]] = means[[b, a]].clone()
        with pytest.raises(StaleShareState, match="layer 1"):
            world.run_all(decoder)

    def test_a_step_that_was_cut_short_leaves_its_blocks_absent(self):
        world = World(make_plan("FF", **SELECTION), LENS)
        decoder = world.decoder(strict=True)
        world.run(decoder, decoder.begin(world.batch()), 0)
        agrees(world, decoder)
        decoder.begin(world.batch())
        assert len(decoder.tails._wanted.absent_C) == 0

    def test_a_block_is_summed_up_once_when_it_is_full(self, monkeypatch):
        world = World(make_plan("F", **SELECTION), [200])
        world.lens = [100]
        decoder = world.decoder()
        summed = []
        means = cpu_tail.means
        monkeypatch.setattr(
            cpu_tail, "means", lambda *words: (summed.append(len(words[4])), means(*words))[1]
        )
        for n in range(100, 200):
            world.lens = [n]
            decoder.written(world.table[world.requests[0], n - 1 : n].long())
            world.indices.cache_clear()
            agrees(world, decoder)
        assert [at for at, n in enumerate(summed) if n] == [0, 128 - 100, 192 - 100]
        assert sum(summed) == 3

    def test_rows_that_share_slots_or_return_hold_blocks_of_their_own(self):
        """A shared prefix; a row that rolls back; the arena grows past one block per slot."""
        world = World(make_plan("F", **SELECTION), [200, 200, 200])
        first = world.table[world.requests[0], :150]
        world.table[world.requests[1], :150] = world.table[world.requests[2], :150] = first
        decoder = world.decoder(strict=True)
        for lens in ([200, 200, 200], [120, 200, 66], [200, 200, 200]):
            world.lens = lens
            world.indices.cache_clear()
            agrees(world, decoder)
        tails = decoder.tails
        held = [e for request, n in tails._held.items() for e in tails._table_BN[request, :n].tolist()]
        assert sorted(held + tails._free) == list(range(len(tails._arena.stamp_C)))

    def test_layers_on_one_kv_have_one_copy(self):
        world = World(make_plan("FFF", kv_from={1: 0, 2: 0}, tails={0: "none"}, **SELECTION), LENS)
        for pools in (world.k, world.v):
            pools[1] = pools[2] = pools[0]
        decoder = world.decoder(strict=True)
        assert set(decoder.tails.layers) == {1}
        agrees(world, decoder)

    def test_a_row_gets_the_same_bits_whatever_shares_its_batch(self):
        world = World(make_plan("DFXR", **SELECTION), LENS, dtype=torch.bfloat16)
        together = world.run_all(world.decoder())
        for r in range(len(LENS)):
            for layer, alone in enumerate(world.run_all(world.decoder(), order=[r])):
                if layer:
                    torch.testing.assert_close(
                        alone, together[layer][r : r + 1], atol=EXACT[0], rtol=EXACT[1]
                    )


class TestThePlan:
    def plan(self, *entries, **words):
        layers = [{"layers": i, "role": "full", **entry} for i, entry in enumerate(entries)]
        raw = {"version": 1, "name": "x", "layers": layers, "selection": {"final_k": 100, **words}}
        return LayerPlan(read_spec(json.dumps(raw), "test.json"), "test")

    def test_all_layers_or_some(self):
        everywhere = self.plan({}, {}, tail="block_mean")
        spelled = self.plan({"tail": "block_mean"}, {"tail": "block_mean"})
        one = self.plan({"tail": "none"}, {}, tail="block_mean")
        assert everywhere.fingerprint == spelled.fingerprint
        assert len({plan.fingerprint for plan in (everywhere, one, self.plan({}, {}))}) == 3
        assert [at.tail for at in one.bind(2, None).layers] == ["none", "block_mean"]
        for plan in (everywhere, spelled, one):
            assert parse_plan(plan.to_yaml(), "x.yaml").fingerprint == plan.fingerprint

    def test_layers_that_attend_to_everything_have_none(self):
        plan = self.plan({"attend": "all"}, {"role": "dense"}, {}, tail="block_mean").bind(3, None)
        assert [at.tail for at in plan.layers] == ["none", "none", "block_mean"]
        for entry in ({"attend": "all"}, {"role": "dense"}):
            with pytest.raises(
                PlanError, match=r"layers\[1\]\.tail: got 'block_mean'.*nothing is left for a tail"
            ):
                self.plan({}, {"tail": "block_mean", **entry})

    def test_sparse_repair_is_refused_by_name(self):
        (reason,) = unsupported_repair(self.plan({}, tail="block_mean").bind(1, None))
        assert reason.startswith("prefill: sparse is not served with a tail")


class TestBytes:
    """Llama-3.1-8B: 2,048 bytes of K per token and layer."""

    SHAPE = KVShape(num_kv_heads=8, head_dim=128)

    def cost(self, scorer, **words):
        plan = bound_of("F", Selection(final_k=200, **words), scorer)
        listed = 120 if "share" in words else None
        return explain(plan, self.SHAPE, num_tokens=6400, batch=1, listed=listed)

    def test_a_tail_reads_two_means_per_block_and_what_is_listed_again(self):
        without, plain = (
            self.cost(Scorer(kind="int4_keys"), tail=tail).layers[0] for tail in ("none", "block_mean")
        )
        assert without.main_bytes == 2 * 2048 * 200
        assert plain.main_bytes - without.main_bytes == 2 * 2048 * 100
        exact = self.cost(Scorer(), tail="block_mean").layers[0]
        assert exact.main_bytes == 2 * 2048 * (200 + 100)

    def test_what_is_kept_is_told(self):
        found = self.cost(Scorer(), tail="block_mean")
        assert found.copy_bytes_per_token == 2 * 2048 / 64 + 13 + 0.25
        assert "block means keep 77 bytes per token" in found.to_text()

    def test_lists_of_a_threshold_are_full_or_as_long_as_was_said(self):
        said = self.cost(Scorer(), share=0.01)
        assert said.layers[0].main_bytes == 2048 * 120
        assert "full here" not in said.to_text()


class TestTheEvaluator:
    """Calibration judges a tail as it is served."""

    SELECTION = Selection(final_k=150, pool_size=200, sink=4, window=16, tail="block_mean")

    @pytest.fixture(scope="class")
    def case(self):
        rng = random.Random(1)
        ids = [rng.randrange(10, VOCAB) for _ in range(150)] * 2
        return ScoredCase(Llama(talking_model()), "copy", ids, 6)

    @pytest.mark.parametrize("scorer", [Scorer(), Scorer(**OWN), Scorer(kind="int4_keys", **OWN)], ids=str)
    @pytest.mark.parametrize("share", [None, 0.006], ids=["count", "share"])
    def test_a_layers_attention_is_that_of_the_decoder(self, case, scorer, share):
        plan = bound_of("FXRFFF", replace(self.SELECTION, share=share), scorer)
        case.check(plan)
        _, trace = case.log_probs(plan)
        for layer, row in ((0, 0), (3, 5)):
            attention = []

            def finish(at, hidden, out, attention=attention):
                attention.append(out)
                return hidden

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(case.model, "finish", finish)
                case._layer(layer, trace.hidden[layer], plan, {}, None)
            got = attended(case, plan, layer, row)
            close(got, attention[0][:, row].double())

    def test_without_it_the_figures_are_others(self, case):
        """Negative control; and a tail of some layers is one of its own."""
        plans = [
            bound_of("F" * 6, replace(self.SELECTION, tail=tail), Scorer(**OWN))
            for tail in ("none", "block_mean")
        ]
        some = [*plans[0].layers[:3], *plans[1].layers[3:]]
        plans.append(replace(plans[0], layers=tuple(some)))
        assert len({round(evaluate([case], plan)[0].kl, 6) for plan in plans}) == 3
        assert [described(plan).split(", ")[-1] for plan in plans] == [
            "one lent for all",
            "block means for the rest",
            "block means for the rest in 3 layers",
        ]


def test_a_mean_is_kept_in_as_many_bytes_as_a_key_has():
    for pool, kept in cpu_tail.STORED.items():
        assert pool.itemsize == kept.itemsize
    weights = cpu_tail.tag_weights(np.array([0, -1, -7, -9], np.float32))
    assert np.allclose(weights, [1, np.exp(-1), 0, 0])
