"""Sparse decode on the CPU: every role against the law, and what must not change a row's result."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from numba.core import event
from sparse_checks import DTYPES, LENS, LISTS, SELECTION, check, same
from sparse_world import World, make_plan

from sglang_blockreuse.kernels import (
    cpu_codes,
    cpu_pages,
    cpu_route,
    cpu_scan,
    cpu_select,
    cpu_sparse,
    ops_cpu,
)
from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.layers.plan_support import unsupported_plan
from sglang_blockreuse.layers.sparse_decode import warm_up
from sglang_blockreuse.layers.step_clock import PARTS


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("pattern", ["FFF", "FRR", "FXX", "DFXRXR", "FXRFXX"])
def test_every_role_attends_to_what_the_law_selects(pattern, lists, dtype):
    world = World(make_plan(pattern, scorer=lists, **SELECTION), LENS, dtype=dtype)
    decoder = world.decoder(strict=True)
    for layer, (got, expected) in enumerate(zip(world.run_all(decoder), world.expected(), strict=True)):
        check(got, expected, dtype)
        assert not torch.isnan(got).any(), f"layer {layer} read a slot that no row owns"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("terms", [(-0.7, -2.0), (-0.7, 0.0), (0.0, -torch.inf)], ids=str)
def test_the_correction_is_gathered_along(terms, dtype):
    world = World(make_plan("DFXR", **SELECTION), LENS, dtype=dtype)
    world.bias = KeyBias(world.tags, *terms)
    plain = world.run_all(World(world.plan, LENS, dtype=dtype).decoder())
    for got, expected in zip(world.run_all(world.decoder()), world.expected(), strict=True):
        check(got, expected, dtype)
    world.bias = None
    assert not torch.equal(plain[1], got)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lists", LISTS.values(), ids=LISTS)
@pytest.mark.parametrize("bias", [None, (-0.7, -2.0)], ids=["plain", "corrected"])
def test_an_oracle_layer_attends_to_all_and_still_writes_indices(bias, lists, dtype):
    """Its scan leaves the weights of its attention, so dense attention is computed for no sparse row."""
    world = World(make_plan("FRX", attend_all=[0], scorer=lists, **SELECTION), [*LENS, 20], dtype=dtype)
    world.bias = bias and KeyBias(world.tags, *bias)
    got = world.run_all(world.decoder(strict=True))
    for layer, expected in enumerate(world.expected()):
        check(got[layer][: len(LENS)], expected[: len(LENS)], dtype)
        check(got[layer][len(LENS) :], world.dense(layer)[len(LENS) :], dtype)


@pytest.mark.parametrize("scorer", [{"kind": "int4_keys"}, {"scan_heads": "fused"}], ids=str)
def test_scores_that_are_no_attention_leave_an_oracle_to_dense_attention(scorer):
    """Negative control: by the shares of these scans its output would be wrong."""
    world = World(make_plan("FRX", attend_all=[0], scorer=scorer, **SELECTION), LENS)
    for got, expected in zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True):
        check(got, expected, torch.float32)


@pytest.mark.parametrize("kind", ["int4_keys", "page_minmax"])
def test_every_kind_of_scorer_can_lend_one_list_for_all_heads(kind):
    scorer = {"kind": kind, **LISTS["kv_head, lends layer"]}
    world = World(make_plan("FXRFXX", scorer=scorer, **SELECTION), LENS)
    for got, expected in zip(world.run_all(world.decoder(strict=True)), world.expected(), strict=True):
        check(got, expected, torch.float32)


def test_lists_per_kv_head_that_are_lent_are_not_those_of_the_layer():
    """Negative control: followers of another layer's heads read other positions than those of its sum."""
    outs = []
    for lists in ("kv_head", "kv_head, lends layer"):
        world = World(make_plan("FR", scorer=LISTS[lists], **SELECTION), LENS)
        outs.append(world.run_all(world.decoder(strict=True)))
    same(outs[0][0], outs[1][0])
    assert not torch.equal(outs[0][1], outs[1][1])


def test_a_follower_with_stale_state_scans_for_lists_of_its_own():
    plan = make_plan("FXR", scorer=LISTS["kv_head, lends layer"], **SELECTION)
    world = World(plan, LENS)
    decoder = world.decoder()
    step = decoder.begin(world.batch())
    world.run(decoder, step, 0)
    decoder.state.written()[0, "pool"][1][world.requests[1], 1] -= 1
    expected = World(make_plan("FFF", scorer=LISTS["kv_head, lends layer"], **SELECTION), LENS)
    check(world.run(decoder, step, 1)[1], expected.expected()[1][1], torch.float32)
    assert decoder.metrics.counts["decode_own_scans_total reindex"] == 1


class TestExactness:
    def test_a_pool_that_holds_the_history_gives_every_layer_its_own_selection(self):
        """Equation 7 with C = 1: the same bits as if the layer had scanned for itself."""
        own = World(make_plan("FFF", **SELECTION), LENS)
        pooled = World(make_plan("FXX", **{**SELECTION, "pool_size": max(LENS)}), LENS)
        for got, expected in zip(pooled.run_all(pooled.decoder()), own.run_all(own.decoder()), strict=True):
            same(got, expected)

    def test_a_smaller_pool_is_seen_to_differ(self):
        own = World(make_plan("FFF", **SELECTION), LENS)
        pooled = World(make_plan("FXX", **SELECTION), LENS)
        got, expected = pooled.run_all(pooled.decoder()), own.run_all(own.decoder())
        same(got[0], expected[0])
        assert not torch.equal(got[1], expected[1])

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_selecting_all_but_one_hidden_key_equals_dense(self, dtype):
        """k >= N runs dense; one key less must equal dense attention once that key has no weight."""
        world = World(make_plan("FR", final_k=60, sink=4, window=8), [61, 61], dtype=dtype)
        world.tags[:] = 0
        for request in world.requests:
            world.tags[world.table[request, 20].long()] = 1
        world.bias = KeyBias(world.tags, -torch.inf, 0.0)
        got = world.run_all(world.decoder())
        for layer in range(2):
            check(got[layer], world.dense(layer), dtype)

    @pytest.mark.parametrize(
        ("selection", "lens"),
        [
            pytest.param({**SELECTION, "final_k": 700, "pool_size": 700}, LENS, id="k"),
            pytest.param({**SELECTION, "min_seq_len": 701}, LENS, id="min_seq_len"),
        ],
    )
    def test_rows_that_read_everything_are_left_to_dense_attention(self, selection, lens):
        world = World(make_plan("FX", **selection), lens)
        decoder = world.decoder()
        assert decoder.begin(world.batch()) is None
        assert decoder.metrics.counts["decode_rows_total short"] == len(lens)


WARM = {
    "oracle": {"attend_all": [0], "scorer": LISTS["kv_head, lends layer"]},
    "refresh": {"refresh_every": 3, "scorer": {"kind": "int4_keys"}},
    "pages": {"scorer": {"kind": "page_minmax"}},
}


class TestWarmUp:
    """No request waits for a compiler. Kernels that other tests compiled are forgotten first, on disk too."""

    @pytest.fixture(autouse=True)
    def no_compiled_kernels(self, tmp_path, monkeypatch):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compiled(self, words, *, warm):
        for module in (cpu_codes, cpu_pages, cpu_route, cpu_scan, cpu_select, cpu_sparse, ops_cpu):
            for made in vars(module).values():
                if hasattr(made, "cache_clear") and made.__module__ == module.__name__:
                    made.cache_clear()
        world = World(make_plan("FXR", **words, **SELECTION), LENS)
        decoder = world.decoder()
        if warm:
            warm_up(decoder, world.k[0], 9)
        with event.install_recorder("numba:compile") as recorder:
            world.run_all(decoder)
            world.lens = [n + 1 for n in world.lens]  # a refreshed pool is extended from the second step on
            for request, n in zip(world.requests, world.lens, strict=True):
                world.table[request, n - 1] = world.table[request, 0]
            world.run_all(decoder)
        return {found.data["dispatcher"].py_func.__qualname__ for _, found in recorder.buffer}

    @pytest.mark.parametrize("words", WARM.values(), ids=WARM)
    def test_steps_compile_nothing(self, words):
        assert self.compiled(words, warm=True) == set()

    def test_without_it_the_first_step_is_seen_to_compile(self):
        assert "_shares_kernel.<locals>.attend" in self.compiled(WARM["oracle"], warm=False)


class TestRows:
    PLAN = make_plan("DFXR", **SELECTION)

    def test_a_row_gets_the_same_bits_whatever_shares_its_batch(self):
        world = World(self.PLAN, LENS, dtype=torch.bfloat16)
        together = world.run_all(world.decoder())
        for r in range(len(LENS)):
            alone = world.run_all(world.decoder(), order=[r])
            for layer in range(1, self.PLAN.num_layers):
                same(alone[layer], together[layer][r : r + 1])

    def test_dense_and_sparse_rows_share_a_batch(self):
        world = World(self.PLAN, [*LENS, 20])
        exact = [0, 3]
        mixed = world.run_all(world.decoder(), dense=exact)
        sparse = world.run_all(world.decoder())
        for layer in range(self.PLAN.num_layers):
            for r in range(len(world.lens)):
                is_dense = r in exact or r == len(LENS)
                if is_dense:
                    check(mixed[layer][r], world.dense(layer)[r], torch.float32)
                elif layer:
                    same(mixed[layer][r], sparse[layer][r])

    def test_rows_may_move_inside_the_batch_between_steps(self):
        world = World(self.PLAN, LENS)
        decoder = world.decoder(strict=True)
        first = world.run_all(decoder)
        order = [3, 0, 4]
        second = world.run_all(decoder, order=order)
        for layer in range(1, self.PLAN.num_layers):
            same(second[layer], first[layer][order])

    def test_tokens_behind_the_batch_become_zero(self):
        world = World(self.PLAN, LENS)
        for dense in ([], [1]):
            decoder = world.decoder()
            step = decoder.begin(world.batch(dense=dense))
            for layer in range(self.PLAN.num_layers):
                q = torch.cat([world.q[layer], torch.full((2, 9, 64), torch.nan)])
                out = torch.full_like(q, torch.nan)
                decoder.run(step, layer, q, world.k[layer], world.v[layer], out, scale=0.125)
                assert torch.equal(out[len(LENS) :], torch.zeros(2, 9, 64))

    def test_reads_are_counted(self):
        world = World(self.PLAN, [*LENS, 20])
        decoder = world.decoder()
        decoder.begin(world.batch(dense=[0]))
        sparse = LENS[1:]
        assert dict(decoder.metrics.counts) == {
            "decode_rows_total sparse": 4,
            "decode_rows_total short": 1,
            "decode_rows_total exact": 1,
            "decode_tokens_total dense": sum(sparse),
            "decode_tokens_total scanned": sum(sparse),
            "decode_tokens_total reranked": 60 * 4,
            "decode_tokens_total attended": 3 * 4 * 24,
            "decode_staleness_total layers": 2 * 4,
        }


class TestTies:
    def test_equal_scores_go_to_the_lower_position(self):
        """All keys alike: after sinks and window the list fills up from the left."""
        world = World(make_plan("FX", **SELECTION), LENS)
        for pool in world.k:
            pool[:] = 1.0
        decoder = world.decoder()
        world.run_all(decoder)
        table = decoder.state.own
        for request, n in zip(world.requests, LENS, strict=True):
            expected = [*range(24 - 8), *range(n - 8, n)]
            assert table.positions[request, 0].tolist() == expected

    def test_lists_ascend_and_hold_sinks_and_window_once(self):
        world = World(make_plan("F", heads="kv_head", **SELECTION), LENS)
        decoder = world.decoder()
        world.run_all(decoder)
        for request, n in zip(world.requests, LENS, strict=True):
            assert decoder.state.own.counts[request] == 24
            for positions in decoder.state.own.positions[request]:
                assert (np.diff(positions) > 0).all()
                assert {0, 1, 2, 3, *range(n - 8, n)} <= set(positions.tolist())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"scorer": {"kind": "model_indexer"}}, "served are exact_qk, int4_keys, label_channels"),
        ({"scorer": {"kind": "label_channels"}}, "label_channels needs scorer.weights"),
        ({"scorer": {"kind": "learned"}}, "learned needs scorer.weights"),
        (
            {
                "scorer": {"kind": "label_channels", "weights": "w", "weights_sha256": "0"},
                "layers": [{"layers": 0, "role": "full"}, {"layers": 1, "role": "full", "key_from": 0}],
            },
            r"key_from on layers [1]",
        ),
        (
            {"scorer": {"kind": "learned", "weights": "w", "weights_sha256": "0", "rerank_heads": "fused"}},
            "one key for all heads",
        ),
        ({"scorer": {"scan_heads": "routed", "num_routed_heads": 10}}, "scored by 9 query heads"),
        (
            {"scorer": {"scan_heads": "routed", "num_routed_heads": 4, "heads": "kv_head"}},
            "num_routed_heads is 4, but a list of this model is scored by 3 query heads",
        ),
    ],
    ids=str,
)
def test_a_plan_it_would_compute_wrongly_is_refused_by_name(changes, reason):
    from sglang_blockreuse.layers.plan_loader import LayerPlan
    from sglang_blockreuse.layers.plan_schema import read_spec

    raw = {
        "version": 1,
        "name": "x",
        "layers": [{"layers": 0, "role": "full"}],
        "selection": SELECTION,
        **changes,
    }
    plan = LayerPlan(read_spec(json.dumps(raw), "test.json"), "test").bind(len(raw["layers"]), None)
    pool = torch.zeros(4, 3, 64)
    (message,) = unsupported_plan(plan, pool, 9)
    assert reason in message
    assert list(unsupported_plan(make_plan("F", **SELECTION), pool)) == []
    shares = {"version": 1, "name": "x", "layers": [{"layers": i, "role": "dense"} for i in range(2)]}
    shares["layers"][1] |= {"kv_from": 0, "own_window": 8}
    plan = LayerPlan(read_spec(json.dumps(shares), "test.json"), "test").bind(2, None)
    assert "own_window on layers [1]" in "".join(unsupported_plan(plan, pool))
    assert "float16" in "".join(unsupported_plan(make_plan("F", **SELECTION), pool.half()))


class TestClock:
    def seconds(self, **options):
        world = World(make_plan("DFXR", scorer={"kind": "int4_keys"}, **SELECTION), LENS)
        decoder = world.decoder(**options)
        for _ in range(2):  # a step is counted when the next one begins
            world.run_all(decoder)
        return {
            tuple(name.split()[1:]): value
            for name, value in decoder.metrics.counts.items()
            if name.startswith("decode_seconds_total")
        }

    def test_every_part_of_every_role_is_timed(self):
        found = self.seconds(timing=True)
        assert all(value > 0 for value in found.values())
        parts = {
            role: {part for part, at in found if at == role} for role in ("dense", "full", "reindex", "reuse")
        }
        assert parts["dense"] == {"dense", "rest"}
        assert parts["full"] >= {"scan", "copy", "compaction", "top_k", "attention", "rest", "between"}
        assert parts["reindex"] == parts["full"] - {"scan", "compaction"} | {"rerank"}
        assert parts["reuse"] == {"attention", "dense", "rest", "between"}
        assert set().union(*parts.values()) <= set(PARTS)

    def test_off_it_never_looks_at_a_clock(self, monkeypatch):
        def clock():
            raise AssertionError("a clock was read")

        monkeypatch.setattr("sglang_blockreuse.layers.step_clock.time.perf_counter", clock)
        assert self.seconds() == {}
        with pytest.raises(AssertionError, match="a clock was read"):
            self.seconds(timing=True)
