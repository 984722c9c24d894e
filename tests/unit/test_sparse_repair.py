"""Sparse repair on the CPU: tokens of virtual rows against the law of decode rows at their positions."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch
from sparse_world import SCALE, D, G, H, World, make_plan
from tolerances import EXACT, KERNEL_OUT

from sglang_blockreuse.blocks.rows import repair_mask
from sglang_blockreuse.kernels import cpu_select
from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.layers import repair_step
from sglang_blockreuse.layers.plan import Selection
from sglang_blockreuse.layers.plan_support import unsupported_plan
from sglang_blockreuse.layers.repair_step import ExtendBatch, windows
from sglang_blockreuse.layers.share_state import FIELDS
from sglang_blockreuse.layers.sparse_repair import SparseRepair
from sglang_blockreuse.types import BlockPlan, Copy, Interval, LocalSegment

SELECTION = {"final_k": 24, "pool_size": 60, "sink": 4, "window": 8}
DTYPES = [torch.float32, torch.bfloat16]
# (request, first position, end); runs no longer than the window, so that they force nothing beyond it
RUNS = [(0, 40, 46), (0, 300, 308), (0, 400, 405), (0, 692, 700), (1, 90, 97), (1, 122, 130)]
LENS = [700, 130]
# the last run is a question, and a part of the third was in no cache
REPAIR = [(0, 40, 46), (0, 300, 308), (0, 402, 405), (1, 90, 97)]


class RepairWorld(World):
    """Two histories; a row of the law is a token of a run, whether it is sparse or not."""

    def __init__(self, plan, *, dtype=torch.float32):
        super().__init__(plan, LENS, dtype=dtype)
        for pool in self.v:
            pool *= 0.5  # unit variance, as tolerances ask
        self.slots = self.requests
        positions = [(self.slots[r], p) for r, a, b in RUNS for p in range(a, b)]
        repair = {(self.slots[r], p) for r, a, b in REPAIR for p in range(a, b)}
        self.repair_T = np.array([at in repair for at in positions])
        self.requests, self.lens = [request for request, _ in positions], [p + 1 for _, p in positions]
        self.row_ids = np.arange(100, 100 + len(positions))
        self.q = [torch.randn(len(positions), H * G, D).to(dtype) for _ in plan.layers]

    def extend(self):
        return ExtendBatch(
            slot_table=self.table,
            requests=[self.slots[r] for r, _, _ in RUNS],
            prefix_lens=[a for _, a, _ in RUNS],
            extend_lens=[b - a for _, a, b in RUNS],
            repair_T=self.repair_T,
            row_ids=np.array([7 + r for r, _, _ in RUNS]),
            bias=self.bias,
        )

    def run_repair(self, repair, *, spoil=lambda layer, step: None):
        step = repair.begin(self.extend())
        outs = []
        for layer in range(self.plan.num_layers):
            out = torch.full_like(self.q[layer], torch.nan)
            repair.run(step, layer, self.q[layer], self.k[layer], self.v[layer], out, scale=SCALE)
            spoil(layer, step)
            outs.append(out)
        return outs

    def check(self, outs):
        sparse = torch.from_numpy(self.repair_T & (np.array(self.lens) > self.plan.selection.final_k))
        absolute, relative = KERNEL_OUT["cpu_attention", self.dtype]
        for layer, (got, expected) in enumerate(zip(outs, self.expected(), strict=True)):
            law = torch.where(sparse[:, None, None], expected, self.dense(layer))
            torch.testing.assert_close(got.double(), law, atol=absolute, rtol=relative)


def repair_of(world, **options):
    return SparseRepair(world.decoder(**{"strict": True, **options}))


def same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, atol=EXACT[0], rtol=EXACT[1])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", ["layer", "kv_head"])
@pytest.mark.parametrize("pattern", ["FRR", "DFXRXR"])
def test_a_repair_token_attends_as_a_decode_row_of_its_position_and_the_others_to_everything(
    pattern, heads, dtype
):
    world = RepairWorld(make_plan(pattern, heads=heads, **SELECTION), dtype=dtype)
    world.check(world.run_repair(repair_of(world)))


def test_a_token_that_is_no_repair_is_seen_to_differ_when_it_is_taken_for_one():
    world = RepairWorld(make_plan("FR", **SELECTION))
    world.repair_T[:] = True
    outs = world.run_repair(repair_of(world))
    world.check(outs)
    world.repair_T[-1] = False
    with pytest.raises(AssertionError):
        world.check(outs)


def test_an_oracle_layer_attends_to_all_and_still_writes_indices():
    world = RepairWorld(make_plan("FRX", attend_all=[0], **SELECTION))
    world.check(world.run_repair(repair_of(world)))


def test_the_correction_is_gathered_along():
    world = RepairWorld(make_plan("DFXR", **SELECTION))
    plain = world.run_repair(repair_of(world))
    world.bias = KeyBias(world.tags, -0.7, -2.0)
    world.indices.cache_clear()
    outs = world.run_repair(repair_of(world))
    world.check(outs)
    assert not torch.equal(plain[1], outs[1])


def test_copies_of_keys_are_made_for_what_repair_scores():
    world = RepairWorld(make_plan("FXR", scorer={"kind": "int4_keys"}, **SELECTION))
    repair = repair_of(world)
    for _ in range(2):
        world.check(world.run_repair(repair))


@pytest.mark.parametrize(
    "scorer",
    [
        {"heads": "kv_head", "lend_heads": "layer"},
        {"scan_heads": "fused", "rerank_heads": "all"},
        {"scan_heads": "routed", "num_routed_heads": 2},
    ],
    ids=str,
)
def test_scorers_work_as_in_decode(scorer):
    """A repair token against decode of a row of its length: the same bits where windows are the same."""
    world = RepairWorld(make_plan("FXR", scorer=scorer, **SELECTION))
    outs = world.run_repair(repair_of(world))
    sparse = np.flatnonzero(world.repair_T)
    for token in sparse.tolist():
        alone = world.run_all(world.decoder(), order=[token])
        same([out[token : token + 1] for out in outs], alone)


def test_pages_of_rows_are_refused_by_name():
    world = RepairWorld(make_plan("FXR", scorer={"kind": "page_minmax"}, **SELECTION))
    assert not list(unsupported_plan(world.plan, world.k[0]))
    refused = msgspec.structs.replace(world.plan, prefill="sparse")
    assert any("page_minmax" in reason for reason in unsupported_plan(refused, world.k[0]))


def test_a_plan_that_refreshes_scans_for_every_repair_token():
    world = RepairWorld(make_plan("FXR", refresh_every=4, **SELECTION))
    repair = repair_of(world)
    for _ in range(2):
        world.check(world.run_repair(repair))


def test_pieces_change_no_bit(monkeypatch):
    world = RepairWorld(make_plan("DFXR", **SELECTION))
    whole = world.run_repair(repair_of(world))
    monkeypatch.setattr(repair_step, "SCORE_BYTES", 5 * 4 * H * G * 405)
    pieces = []
    same(world.run_repair(repair_of(world), spoil=lambda layer, step: pieces.append(len(step.pieces))), whole)
    assert pieces == [5] * 4, "of 5 rows, and 24 rows are sparse"


class TestStaleState:
    """A row whose state is spoilt scans for itself; no other row changes by a bit."""

    ROW = 9

    def outs(self, spoil, **options):
        world = RepairWorld(make_plan("FRX", **SELECTION))
        repair = repair_of(world, strict=False, **options)
        return world, repair, world.run_repair(repair, spoil=spoil)

    @pytest.mark.parametrize("field", [*FIELDS, "positions", "slots", "counts"])
    def test_of_one_row(self, field):
        def spoil(layer, step):
            if layer:
                return
            (piece,) = step.pieces
            for table, stamps in piece.state.written().values():
                if field in FIELDS:
                    stamps[self.ROW, FIELDS.index(field)] += 1
                else:
                    getattr(table, field)[self.ROW] += 1

        _, _, good = self.outs(lambda layer, step: None)
        world, repair, outs = self.outs(spoil)
        token = np.flatnonzero(world.repair_T)[self.ROW]
        others = [t for t in range(len(world.lens)) if t != token]
        same([out[others] for out in outs], [out[others] for out in good])
        counts = repair.begin(world.extend()) and repair._decoder.metrics.counts
        assert counts["decode_own_scans_total reuse"] == counts["decode_own_scans_total reindex"] == 1
        # its own scan: what a full layer in the consumer's place would have selected
        own = RepairWorld(make_plan("FFF", **SELECTION))
        expected = own.run_repair(repair_of(own))
        absolute, relative = KERNEL_OUT["cpu_attention", torch.float32]
        for layer in range(3):
            torch.testing.assert_close(
                outs[layer][token], expected[layer][token], atol=absolute, rtol=relative
            )

    def test_of_another_row_of_the_same_request(self):
        """Rows of one request are told apart: the tables of two tokens exchanged, with their stamps."""

        def spoil(layer, step):
            if layer == 0:
                for table, stamps in step.pieces[0].state.written().values():
                    for array in (*table, stamps):
                        array[[7, 8]] = array[[8, 7]]

        _, repair, _ = self.outs(spoil)
        assert repair._decoder.metrics.counts["decode_own_scans_total reuse"] == 2


class TestRows:
    @pytest.mark.parametrize("selection", [{**SELECTION, "final_k": 700, "pool_size": 700}, None])
    def test_short_ones_run_dense_and_are_counted(self, selection):
        world = RepairWorld(make_plan("FX", **(selection or {**SELECTION, "min_seq_len": 701})))
        repair = repair_of(world)
        assert repair.begin(world.extend()) is None
        assert dict(repair._decoder.metrics.counts) == {"repair_rows_total short": world.repair_T.sum()}

    def test_sparse_ones_are_counted(self):
        world = RepairWorld(make_plan("FX", **{**SELECTION, "min_seq_len": 100}))
        repair = repair_of(world)
        assert repair.begin(world.extend()) is not None
        counts = repair._decoder.metrics.counts
        assert counts["repair_rows_total short"] == 6 + 7
        assert counts["repair_rows_total sparse"] == 8 + 3

    def test_a_row_s_own_run_is_read_back_to_its_first_token(self):
        selection = Selection(final_k=40, sink=4, window=8)
        assert windows(selection, np.array([1, 8, 9, 20, 22, 23, 500])).tolist() == [8, 8, 9, 20, 22, 22, 22]
        lens = np.array([300, 300], np.int32)
        rows = cpu_select.Rows(
            np.arange(2, dtype=np.int32),
            lens,
            np.arange(600, dtype=np.int32).reshape(2, 300),
            np.zeros(0, np.uint8),
            np.zeros(4, np.float32),
        )
        table = cpu_select.Table.empty(2, 1, 40)
        scores = np.tile(np.linspace(1, 0, 300, dtype=np.float32), (2, 1, 1))
        cpu_select.keep(
            rows, table, np.zeros(2, np.uint8), scores, 4, windows(selection, np.array([1, 20])), table
        )
        assert table.positions[0, 0].tolist() == [*range(32), *range(292, 300)]
        assert table.positions[1, 0].tolist() == [*range(20), *range(280, 300)]


class TestWhichTokens:
    """[0, 10) exact; a block [10, 40) whose head is computed, a block [50, 80), a question."""

    PLAN = BlockPlan(
        start=10,
        end=90,
        segments=(
            LocalSegment(Interval(10, 40), 5, 1, 10),
            LocalSegment(Interval(50, 80), 5, 2, 50),
        ),
        copies=(Copy(Interval(14, 38), 0), Copy(Interval(55, 70), 1)),
        runs=(Interval(10, 14), Interval(38, 55), Interval(70, 90)),
        num_repaired=21,
        block_end=80,
    )

    def repairs(self, plan, low, high):
        return [(r.start, r.end) for r in plan.repairs_within(low, high)]

    def test_computed_tokens_of_blocks_behind_the_first_copy(self):
        assert self.repairs(self.PLAN, 10, 90) == [(38, 40), (50, 55), (70, 80)]
        assert self.repairs(self.PLAN, 10, 53) == [(38, 40), (50, 53)]
        assert self.repairs(self.PLAN, 53, 90) == [(53, 55), (70, 80)]

    def test_what_sees_only_exact_kv_is_published_as_exact_and_stays_dense(self):
        assert all(start >= self.PLAN.first_local for start, _ in self.repairs(self.PLAN, 10, 90))
        everything = BlockPlan(10, 90, self.PLAN.segments, (), (Interval(10, 90),), 60, 80)
        assert self.repairs(everything, 10, 90) == []

    def test_the_token_that_is_sampled_from_stays_dense(self):
        plan = BlockPlan(
            10, 80, self.PLAN.segments, self.PLAN.copies, (*self.PLAN.runs[:2], Interval(70, 80)), 21, 80
        )
        assert self.repairs(plan, 10, 80)[-1] == (70, 79)

    def test_of_a_local_path_none(self):
        path = LocalSegment(Interval(10, 80), 0, -1, 10)
        plan = BlockPlan(10, 90, (path,), (Copy(Interval(10, 70), 0),), (Interval(70, 90),), 10, 80)
        assert self.repairs(plan, 10, 90) == []

    def test_the_mask_lies_over_the_computed_tokens(self):
        runs = [[Interval(0, 3)], self.PLAN.runs_within(10, 90)]
        mask = repair_mask(runs, [[], list(self.PLAN.repairs_within(10, 90))])
        positions = [p for run in runs[1] for p in range(run.start, run.end)]
        assert mask[:3].tolist() == [False] * 3
        assert [p for p, flag in zip(positions, mask[3:].tolist(), strict=True) if flag] == [
            *range(38, 40),
            *range(50, 55),
            *range(70, 80),
        ]
        assert repair_mask(runs, [[], []]) is None
