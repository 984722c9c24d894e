"""`kv_from` without a server: the pool, what walks over its layers, the plan's records, decode, calibration."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from sharing_twin import SharingTwin
from sparse_world import World, make_plan
from tolerances import EXACT, FULL_PREFILL_LOGPROB, KERNEL_OUT

import sglang_blockreuse.host
from sglang_blockreuse.blocks.load import KvLoader, moved_once
from sglang_blockreuse.blocks.probe import Probe, Subject
from sglang_blockreuse.blocks.request import RequestError
from sglang_blockreuse.blocks.rope import RopeGroup, UnsupportedRope
from sglang_blockreuse.blocks.shared_kv import SharedKv
from sglang_blockreuse.kernels.dispatch import Dispatcher
from sglang_blockreuse.layers.calibration.case import Case, evaluate
from sglang_blockreuse.layers.calibration.judge import judge
from sglang_blockreuse.layers.calibration.llama import Llama
from sglang_blockreuse.layers.calibration.replay import replay
from sglang_blockreuse.layers.calibration.report import Report
from sglang_blockreuse.layers.calibration.texts import Texts
from sglang_blockreuse.layers.plan import Scorer, Selection
from sglang_blockreuse.layers.plan_explain import KVShape, explain
from sglang_blockreuse.layers.plan_loader import parse_plan
from sglang_blockreuse.layers.plan_support import unsupported_plan, unsupported_sharing
from sglang_blockreuse.layers.presets import clsa, hybrid_oracle, yoco
from sglang_blockreuse.layers.share_state import NotTheWriterError, StaleShareState, pointers
from sglang_blockreuse.types import BlockPlan, Copy, Interval, LocalSegment

KV_LAYERS = (0, 1, 1, 3, 1, 3)
OWNERS = (0, 1, 3)
SIZE, HEADS, HEAD_DIM = 40, 2, 8
SELECTION = {"final_k": 24, "pool_size": 60, "sink": 4, "window": 8}
LENS = [300, 61, 130]


def make_pool(kv_layers=KV_LAYERS):
    from sglang_blockreuse.layers.shared_pool import pool_class

    return pool_class(kv_layers)(
        SIZE,
        page_size=1,
        dtype=torch.float32,
        head_num=HEADS,
        head_dim=HEAD_DIM,
        layer_num=len(kv_layers),
        device="cpu",
        enable_memory_saver=False,
    )


def filled_pool():
    pool = make_pool()
    torch.manual_seed(0)
    for layer in OWNERS:
        pool.k_buffer[layer].normal_()
        pool.v_buffer[layer].normal_()
    return pool


def shared_plan(pattern, kv_from, **words):
    """`make_plan` with sources of main KV."""
    plan = make_plan(pattern, **words)
    raw = {"version": 1, "name": pattern, "layers": []}
    for layer in plan.layers:
        entry = {"layers": layer.layer, "role": layer.role}
        for key, value in (("anchor", layer.anchor), ("key_from", layer.key_from)):
            entry |= {} if value is None else {key: value}
        entry |= {"attend": "all"} if layer.attend == "all" else {}
        entry |= {"kv_from": kv_from[layer.layer]} if layer.layer in kv_from else {}
        raw["layers"].append(entry)
    raw["scorer"] = {"kind": plan.scorer.kind, "heads": plan.scorer.heads}
    if plan.selection is not None:
        raw["selection"] = {key: words[key] for key in SELECTION}
    return parse_plan(json.dumps(raw), "test.json").bind(len(pattern), None)


class TestPool:
    def test_layers_that_share_are_the_same_memory_and_the_pool_is_smaller(self):
        pool, whole = make_pool(), make_pool(tuple(range(len(KV_LAYERS))))
        for buffers in (pool.k_buffer, pool.v_buffer):
            assert [x.data_ptr() for x in buffers] == [buffers[source].data_ptr() for source in KV_LAYERS]
            assert len({x.data_ptr() for x in buffers}) == len(OWNERS)
        assert sum(pool.get_kv_size_bytes()) * len(KV_LAYERS) == sum(whole.get_kv_size_bytes()) * len(OWNERS)
        assert pool.mem_usage * len(KV_LAYERS) == pytest.approx(whole.mem_usage * len(OWNERS))
        assert pool.get_key_buffer(4).data_ptr() == pool.get_key_buffer(1).data_ptr()

    def test_only_owners_write(self):
        pool, slots = filled_pool(), torch.tensor([3, 4])
        new = torch.ones(2, HEADS, HEAD_DIM)
        before = [x.clone() for x in pool.k_buffer]
        pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, new, new)
        assert torch.equal(pool.k_buffer[4][slots], new)
        with pytest.raises(NotTheWriterError, match=r"layer 4 reads the KV of layer 1 .*\[0, 1, 3\]"):
            pool.set_kv_buffer(SimpleNamespace(layer_id=4), slots, 2 * new, 2 * new)
        assert torch.equal(pool.k_buffer[1][slots], new)
        assert torch.equal(pool.k_buffer[3], before[3])

    def test_a_move_of_slots_is_made_once(self):
        """A chain 1 -> 2 -> 3 made twice carries slot 1 to slot 3."""
        pool = filled_pool()
        pool.use_native_move_kv_cache = True
        source, target = torch.tensor([1, 2]), torch.tensor([2, 3])
        old = pool.k_buffer[1].clone()
        pool.move_kv_cache(target, source)
        assert torch.equal(pool.k_buffer[4][target], old[source])
        twice = old.clone()
        for _ in range(2):
            twice[target] = twice[source]
        assert not torch.equal(twice, pool.k_buffer[4])
        assert len(pool.data_ptrs) == 2 * len(OWNERS)

    def test_a_backup_in_host_memory_holds_each_buffer_once_and_comes_back(self):
        pool, slots = filled_pool(), torch.tensor([5, 7, 8])
        kept = [x[slots].clone() for x in pool.v_buffer]
        backup = pool.get_cpu_copy(slots)
        assert len(backup) == len(OWNERS)
        for layer in OWNERS:
            pool.v_buffer[layer].zero_()
        pool.load_cpu_copy(backup, slots)
        for buffer, rows in zip(pool.v_buffer, kept, strict=True):
            assert torch.equal(buffer[slots], rows)

    def test_a_plan_of_another_model_is_refused(self):
        from sglang_blockreuse.layers.shared_pool import pool_class

        words = {"page_size": 1, "dtype": torch.float32, "head_num": 1, "head_dim": 8, "device": "cpu"}
        with pytest.raises(ValueError, match="names 6 layers and this pool holds layers 0 to 3"):
            pool_class(KV_LAYERS)(SIZE, layer_num=4, enable_memory_saver=False, **words)

    def test_the_host_sizes_the_pool_by_what_a_token_takes(self):
        """Its own sizing, with the bytes of a token set to those of all layers."""
        from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

        from sglang_blockreuse.layers.shared_pool import sizing

        token_bytes = len(KV_LAYERS) * 2 * HEADS * HEAD_DIM * 4
        host = DefaultPoolConfigurator.__new__(DefaultPoolConfigurator)
        host._cell_size, host._fixed_overhead_bytes = token_bytes, 0
        whole = host.calculate_pool_sizes(1000 * token_bytes, 1).max_total_num_tokens
        found = sizing(KV_LAYERS)(DefaultPoolConfigurator.calculate_pool_sizes, host, 1000 * token_bytes, 1)
        assert (whole, found.max_total_num_tokens) == (1000, 1000 * len(KV_LAYERS) // len(OWNERS))

    def test_every_door_stands_in_the_contract(self):
        targets = {name.target.rpartition(".")[2] for name in sglang_blockreuse.host.CONTRACT}
        assert targets >= {"get_kv_pool_cls", "post_load_model", "_create_buffers", "calculate_pool_sizes"}


class TestMovingBlocks:
    GROUPS = (RopeGroup("rope", tuple(range(len(KV_LAYERS))), torch.rand(64, HEAD_DIM), True),)

    def load(self, groups):
        """Positions 0..9 of a home move to 20..29 of a row; what the pool holds afterwards."""
        pool = filled_pool()
        home, row = torch.arange(1, 11), torch.arange(40)
        segment = LocalSegment(Interval(20, 30), 20, 0, 20)
        plan = BlockPlan(
            0, 40, (segment,), (Copy(Interval(20, 30), 0),), (Interval(0, 20), Interval(30, 40)), 0, 30
        )
        loader = KvLoader(pool.k_buffer, pool.v_buffer, groups, Dispatcher("reference"))
        loader.load([loader.find(SimpleNamespace(plan=plan, home_slots=[home]), 0, 0, 40)], row[None])
        return pool, row[20:30]

    def test_each_buffer_is_rotated_once(self):
        (group,) = moved_once(self.GROUPS, KV_LAYERS)
        assert group.layers == OWNERS
        old, new = torch.arange(10), torch.arange(20, 30)
        pool, target = self.load([group])
        fresh = filled_pool()
        cos, sin = group.cos_sin(old, new)
        for layer in OWNERS:
            buffers = ([fresh.k_buffer[layer]], [fresh.v_buffer[layer]])
            Dispatcher("reference").rotate_copy(*buffers, torch.arange(1, 11), target, cos, sin, is_neox=True)
            assert torch.equal(pool.k_buffer[layer], fresh.k_buffer[layer])
        # negative control: a walk over layers that rotated what it rotated before, in a buffer with two readers
        again = torch.arange(30, 40)
        Dispatcher("reference").rotate_copy(*buffers, target, again, cos, sin, is_neox=True)
        assert not torch.allclose(buffers[0][0][again], buffers[0][0][target], atol=1e-3)

    def test_a_group_whose_layers_all_read_others_moves_nothing(self):
        assert [g.layers for g in moved_once(self.GROUPS, (0,) * 6)] == [(0,)]

    def test_keys_of_another_rotary_embedding_are_refused(self):
        groups = [replace(self.GROUPS[0], layers=part) for part in ((0, 1, 3), (2, 4, 5))]
        with pytest.raises(UnsupportedRope, match="layer 2 reads the KV of layer 1"):
            moved_once(groups, KV_LAYERS)

    @pytest.mark.parametrize(
        ("shared", "layer"),
        [((), 1), ((1, 2), 3), (range(1, 6), 0)],
        ids=["none", "the first two", "all others"],
    )
    def test_a_probe_compares_keys_of_a_layer_that_keeps_them(self, shared, layer):
        subject = Subject("deviation", torch.arange(4), (Interval(0, 4),), 0)
        assert Probe([subject], 6, shared_layers=frozenset(shared))._compared == {"deviation": layer}


class TestPlan:
    def test_who_reads_whose_kv(self):
        plan = yoco(6, 3).bind(6, None)
        assert plan.kv_layers == (0, 1, 2, 2, 2, 2)
        assert plan.shared_layers == (3, 4, 5)
        assert not plan.is_dense
        assert not plan.is_sparse

    @pytest.mark.parametrize(
        ("plan", "lossless"),
        [
            (yoco(6, 3), False),
            (yoco(6, 3, trained_sharing=True), True),
            (yoco(6, 6), True),
            (clsa(6, 3, Selection(**SELECTION), trained_sharing=True), False),
        ],
        ids=["untrained", "trained", "no sharing", "selects"],
    )
    def test_what_is_lossless(self, plan, lossless):
        assert plan.bind(6, None).is_lossless == lossless

    def test_the_warning_is_said_once_for_main_kv(self):
        assert len(yoco(6, 3).bind(6, None).warnings) == 1
        assert yoco(6, 3, trained_sharing=True).bind(6, None).warnings == ()

    def test_an_own_window_is_refused_with_the_reason(self):
        plan = hybrid_oracle(6, [0, 3], Selection(**SELECTION), own_window=16).bind(6, None)
        (reason,) = unsupported_sharing(plan)
        assert reason.startswith("own_window on layers [1, 2, 4, 5] is not served: a prefix hit")
        plan = hybrid_oracle(6, [0, 3], Selection(**SELECTION), own_window=0).bind(6, None)
        assert list(unsupported_plan(plan, torch.zeros(8, 3, 64))) == []

    def test_a_map_of_a_layer_s_own_keys_is_refused_for_shared_ones(self):
        plan = shared_plan("DFF", {2: 1}, **SELECTION)
        mapped = replace_plan(plan, scorer=Scorer(kind="learned"), weights_file="w")
        assert any(
            reason.startswith("kv_from on layers [2]")
            for reason in unsupported_plan(mapped, torch.zeros(8, 3, 64))
        )

    def test_requests_live_in_a_namespace_of_the_plan(self):
        one, other = (SharedKv(plan="p", fingerprint=digit * 64, trained=False) for digit in "ab")
        assert one.extra_key(None).startswith("blockreuse:kv:")
        assert len({one.extra_key(None), other.extra_key(None), one.extra_key("tenant"), None}) == 4

    @pytest.mark.parametrize("mode", ["off", "reuse", "compile", "exact"])
    def test_exact_requests_need_a_checkpoint_that_was_trained_for_the_plan(self, mode):
        SharedKv(plan="p", fingerprint="a", trained=True).check_mode(mode)
        untrained = SharedKv(plan="p", fingerprint="a", trained=False)
        if mode != "exact":
            untrained.check_mode(mode)
            return
        with pytest.raises(RequestError, match="layer plan p, whose layers share KV"):
            untrained.check_mode(mode)


def replace_plan(plan, **fields):
    from msgspec.structs import replace as replaced

    return replaced(plan, **fields)


class TestBytes:
    SHAPE = KVShape(num_kv_heads=3, head_dim=64)

    def test_resident_kv_is_that_of_the_layers_that_keep_it(self):
        shared, whole = (
            explain(yoco(6, n).bind(6, None), self.SHAPE, num_tokens=1000, batch=2) for n in (2, 6)
        )
        assert shared.kv_bytes_per_token == 2 * 2 * self.SHAPE.key_bytes
        assert whole.kv_bytes_per_token == 6 * 2 * self.SHAPE.key_bytes
        # a step reads the shared rows once for each layer: sharing saves memory, not traffic
        assert shared.total_bytes == whole.total_bytes == whole.dense_bytes
        assert "4 layers keep no KV of their own: 1,536 bytes per token in place of 4,608" in shared.to_text()
        assert "keep no KV" not in whole.to_text()
        assert shared.to_dict()["shared_layers"] == (2, 3, 4, 5)

    def test_layers_that_score_the_same_keys_keep_one_copy(self):
        copies = []
        for kv_from in ({}, {2: 1}):
            plan = replace_plan(shared_plan("DFF", kv_from, **SELECTION), scorer=Scorer(kind="int4_keys"))
            copies.append(explain(plan, self.SHAPE, num_tokens=1000, batch=1).copy_bytes_per_token)
        key_bytes = 3 * (64 / 2 + 8)
        assert copies == [2 * key_bytes + 1, key_bytes + 1]

    def test_scores_of_the_keys_that_are_read_are_fetched_once(self):
        for key_from, times in (({}, 1), ({3: 1}, 1), ({3: 2}, 2)):
            plan = shared_plan("DFFF", {3: 1}, key_from=key_from, **SELECTION)
            cost = explain(plan, self.SHAPE, num_tokens=1000, batch=1).layers[3]
            assert cost.main_bytes == times * self.SHAPE.key_bytes * SELECTION["final_k"]


class SharedWorld(World):
    """Layers that share are one tensor, as in the pool."""

    def __init__(self, plan, lens, **words):
        super().__init__(plan, lens, **words)
        self.k = [self.k[source] for source in plan.kv_layers]
        self.v = [self.v[source] for source in plan.kv_layers]


@pytest.mark.parametrize("kind", ["exact_qk", "int4_keys", "page_minmax"])
@pytest.mark.parametrize(
    ("pattern", "kv_from", "attend_all"),
    [("DFRR", {1: 0, 2: 0, 3: 0}, []), ("FRRFXR", {1: 0, 2: 0, 3: 0, 5: 4}, [0]), ("FXFX", {2: 0, 3: 1}, [])],
    ids=["clsa", "oracle", "mixed"],
)
def test_sparse_decode_over_shared_keys_is_what_the_law_selects(kind, pattern, kv_from, attend_all):
    words = {"scorer": {"kind": kind}, "attend_all": attend_all, **SELECTION}
    world = SharedWorld(shared_plan(pattern, kv_from, **words), LENS)
    decoder = world.decoder(strict=True)
    absolute, relative = KERNEL_OUT["cpu_attention", torch.float32]
    for got, expected in zip(world.run_all(decoder), world.expected(), strict=True):
        torch.testing.assert_close(got.double(), expected, atol=absolute, rtol=relative)
    if kind == "int4_keys":
        scoring = [layer for layer in world.plan.layers if layer.scores]
        assert set(decoder.keys.copies) == {world.plan.key_layers[layer.layer] for layer in scoring}
        assert len(decoder.keys.copies) < len(scoring) or pattern == "DFRR"


def test_a_copy_of_shared_keys_is_refreshed_and_audited_once():
    """Two scoring layers, one copy: a rewritten slot that nobody announced is found and mended once."""
    plan = shared_plan("FF", {1: 0}, scorer={"kind": "int4_keys"}, **SELECTION)
    world = SharedWorld(plan, [200])
    decoder = world.decoder()
    world.run_all(decoder)
    import sglang_blockreuse.layers.index_keys as index_keys

    period, index_keys.AUDIT_PERIOD = index_keys.AUDIT_PERIOD, 1
    try:
        world.k[0][world.table[world.requests[0], 50].long()] += 5.0
        world.run_all(decoder)
        assert decoder.metrics.counts["decode_stale_keys_total"] == 1
        world.run_all(decoder)
        assert decoder.metrics.counts["decode_stale_keys_total"] == 1
    finally:
        index_keys.AUDIT_PERIOD = period


class TestShareState:
    PLAN = shared_plan("DFR", {1: 0, 2: 0}, **SELECTION)

    def test_what_a_layer_writes_names_the_layer_whose_kv_its_positions_are_of(self):
        assert pointers(self.PLAN.layers[1]) == (0, 1)

    def test_state_of_another_source_is_stale(self):
        """The stamp of a plan without sharing is no stamp of this one."""
        world = SharedWorld(self.PLAN, [200])
        decoder = world.decoder(strict=True)
        step = decoder.begin(world.batch())
        for layer in (0, 1):
            world.run(decoder, step, layer)
        _, stamps = decoder.state.written()[1, "indices"]
        stamps[world.requests, 3] = 1
        with pytest.raises(StaleShareState, match="kv"):
            world.run(decoder, step, 2)


class TestCalibration:
    NUM_OWN = 25  # with fewer an untrained model's log-probabilities are so low that float32 is too coarse
    PLAN = yoco(30, NUM_OWN).bind(30, None)

    @pytest.fixture(scope="class")
    def ids(self, model_path):
        return Texts(model_path).make("prose", 0, 200)

    @pytest.fixture(scope="class")
    def case(self, model_path, ids):
        return Case(Llama(model_path), "prose", ids, 12)

    def test_the_evaluator_equals_the_twin(self, case, model_path, ids):
        log_probs, _ = case.log_probs(self.PLAN)
        got = [float(log_probs[row, ids[len(ids) - 12 + row]]) for row in range(12)]
        expected = SharingTwin(model_path, self.PLAN.kv_layers).log_probs(ids)[-12:]
        assert max(abs(a - b) for a, b in zip(got, expected, strict=True)) <= FULL_PREFILL_LOGPROB
        wrong = SharingTwin(model_path, (*range(25), *[23] * 5)).log_probs(ids)[-12:]
        assert max(abs(a - b) for a, b in zip(got, wrong, strict=True)) > 100 * FULL_PREFILL_LOGPROB

    def test_a_plan_without_sharing_is_judged_as_before_in_between(self, case):
        dense, _ = case.log_probs(None)
        torch.testing.assert_close(dense, case.dense, atol=EXACT[0], rtol=EXACT[1])

    def test_it_is_judged_and_not_called_lossless(self, case):
        judged = judge("shares", self.PLAN, [case], KVShape(num_kv_heads=3, head_dim=64), num_tokens=200)
        assert judged.total.kl > 100 * FULL_PREFILL_LOGPROB
        assert judged.row()["lossless"] is False
        report = Report("model", {}, {}, [judged], replays={"shares": replay(case, self.PLAN)})
        assert "shares is not lossless, whatever its figures: layers [25, 26" in report.to_markdown()
        assert json.loads(json.dumps(report.to_dict()))["held_out"][0]["shared_layers"] == list(range(25, 30))

    def test_a_trained_checkpoint_is_compared_with_itself(self, case):
        trained = yoco(30, self.NUM_OWN, trained_sharing=True).bind(30, None)
        judged = judge("trained", trained, [case], KVShape(num_kv_heads=3, head_dim=64), num_tokens=200)
        assert judged.total.kl <= FULL_PREFILL_LOGPROB
        assert (judged.row()["lossless"], judged.caveat) == (True, None)
        assert max(replay(case, trained).total) <= FULL_PREFILL_LOGPROB

    def test_what_it_does_not_compute_is_refused(self, case):
        selection = Selection(**SELECTION)
        plan = hybrid_oracle(30, [0, 15], selection, own_window=16).bind(30, None)
        with pytest.raises(ValueError, match="own_window on layers"):
            evaluate([case], plan)
