"""Decode under a layer plan on the host's Triton, FlashInfer and FlashAttention 3 backends, against the law.

One decoder runs here as on the CPU; the law is that decoder over `ops_law`.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from capture import recording
from rehearsed import run_layer
from sparse_world import make_plan
from tolerances import KERNEL_OUT
from world import CONTEXT, NUM_Q_HEADS, SCALE, Drawn, World

from sglang_blockreuse.kernels.cpu_rows import KeyBias
from sglang_blockreuse.kernels.ops_law import LawOps
from sglang_blockreuse.kernels.reference_index import IndexMap, label_map
from sglang_blockreuse.layers.decode_step import Batch
from sglang_blockreuse.layers.index_weights import IndexWeights, model_identity
from sglang_blockreuse.layers.share_state import FIELDS
from sglang_blockreuse.layers.sparse_decode import SparseDecoder
from sglang_blockreuse.types import Interval

SELECTION = {"final_k": 16, "pool_size": 32, "sink": 2, "window": 4}
LENS = (90, 14, 61)


def world_of(host, lens=LENS, seed=7):
    """Requests of these lengths, whose last token is decoded."""
    runs = tuple((n, (Interval(n - 1, n),)) for n in lens)
    world = World(host, Drawn(runs, seed))
    world.compute_all()
    return world


def backend_of(base, world, plan, *, exact=(), bias=None):
    backend = base(world.runner)
    if bias is not None:
        backend.correct(world.runner, alpha=bias[0], beta=bias[1])
        world.tags(backend)
    backend.follow(world.runner, plan, kernels="auto")
    admit(backend, world, exact)
    return backend


def admit(backend, world, exact=()):
    for at, slot in enumerate(world.request_slots.tolist()):
        options = SimpleNamespace(mode="exact" if at in exact else "reuse")
        req = SimpleNamespace(
            kv=SimpleNamespace(req_pool_idx=slot), blockreuse=SimpleNamespace(options=options)
        )
        backend.row_modes.admit([req])


def run_step(world, backend, batch, *, spoil=lambda layer: None):
    """(queries, output) of every layer."""
    found = []
    for layer in range(len(world.layers)):
        spoil(layer)
        q, _, out = run_layer(world, backend, batch, layer)
        found.append((q, out))
    return found


def decoder_of(world, plan):
    """Of the law."""
    return SparseDecoder(
        plan,
        num_requests=world.requests.req_to_token.shape[0],
        num_q_heads=NUM_Q_HEADS,
        k_pools=world.pool.k_buffer,
        ops=LawOps(),
    )


def expected(world, plan, batch, queries, **words):
    """By the law, of the pools as they are now."""
    decoder = decoder_of(world, plan)
    return law_step(world, decoder, batch, queries, **words), decoder


def law_step(world, decoder, batch, queries, *, exact=(), bias=None, spoil=lambda layer, decoder: None):
    slots = world.request_slots.tolist()
    rows = batch.req_pool_indices.tolist()
    asked = Batch(
        slot_table=world.requests.req_to_token,
        requests=rows,
        lens=batch.seq_lens.tolist(),
        row_ids=world.requests.req_generation.numpy()[rows],
        dense=np.array([slots.index(row) in exact for row in rows], np.uint8),
        bias=bias,
    )
    step = decoder.begin(asked)
    if step is None:
        return [world.law(batch, layer, q).to(q.dtype) for layer, q in enumerate(queries)]
    outs = []
    for layer, q in enumerate(queries):
        out = torch.empty_like(q)
        spoil(layer, decoder)
        k, v = world.pool.k_buffer[layer], world.pool.v_buffer[layer]
        decoder.run(step, layer, q, k, v, out, scale=SCALE)
        outs.append(out)
    return outs


def close(got, want):
    absolute, relative = KERNEL_OUT["extend_attention", torch.float32]
    torch.testing.assert_close(got, want, atol=absolute, rtol=relative)


def check(world, backend, plan, batch, found, **words):
    queries = [q for q, _ in found]
    wanted, decoder = expected(world, plan, batch, queries, **words)
    for (_, got), want in zip(found, wanted, strict=True):
        close(got, want)
    return decoder


PLANS = {
    "three roles": make_plan("FXR", **SELECTION),
    "lists per KV head": make_plan("FXR", heads="kv_head", **SELECTION),
    "one list lent": make_plan("FXR", scorer={"heads": "kv_head", "lend_heads": "layer"}, **SELECTION),
    "a dense layer": make_plan("DFR", **SELECTION),
    "fused heads": make_plan("FXR", scorer={"scan_heads": "fused"}, **SELECTION),
    "int4 keys": make_plan("FXR", scorer={"kind": "int4_keys"}, **SELECTION),
    "an oracle": make_plan("FRX", attend_all=[0], **SELECTION),
    "keys of another layer": make_plan("FFX", key_from={1: 0}, **SELECTION),
}


def test_a_step_on_each_base_equals_the_law(base, host):
    """Rows that select, a short one and an exact one, in one batch."""
    plan, world = make_plan("DFR", **SELECTION), world_of(host)
    backend, batch = backend_of(base, world, plan, exact=[2]), world.decode_batch()
    backend.init_forward_metadata(batch)
    check(world, backend, plan, batch, run_step(world, backend, batch), exact=[2])


@pytest.fixture
def triton_base():
    """Where a plan's own layers run the same on every base."""
    from sglang_blockreuse.layers.backend import cuda_class

    return cuda_class("triton")


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_step_under_a_plan_equals_the_law(triton_base, host, plan):
    base, world = triton_base, world_of(host)
    backend, batch = backend_of(base, world, plan, exact=[2]), world.decode_batch()
    backend.init_forward_metadata(batch)
    found = run_step(world, backend, batch)
    decoder = check(world, backend, plan, batch, found, exact=[2])
    assert backend.sparse.metrics.counts == decoder.metrics.counts
    with pytest.raises(AssertionError):  # negative control: no row is exact
        check(world, backend, plan, batch, found)


@pytest.mark.parametrize("bias", [(-0.7, -1.3), (0.0, -torch.inf)], ids=str)
def test_alpha_and_beta_are_terms_of_scores_and_attention(triton_base, host, bias):
    plan, world = PLANS["three roles"], world_of(host)
    backend, batch = backend_of(triton_base, world, plan, bias=bias), world.decode_batch()
    backend.init_forward_metadata(batch)
    found = run_step(world, backend, batch)
    check(world, backend, plan, batch, found, bias=KeyBias(backend.tags, *bias))
    with pytest.raises(AssertionError):  # negative control
        check(world, backend, plan, batch, found)


@pytest.mark.parametrize("field", ["row", "version", "digest", "slots", "counts"])
def test_a_row_with_stale_state_scans_for_itself(triton_base, host, field):
    plan, world = PLANS["three roles"], world_of(host)
    backend, batch = backend_of(triton_base, world, plan), world.decode_batch()
    row = int(world.request_slots[0])

    def spoil(layer, decoder=None):
        for table, stamps in (decoder or backend.sparse).state.written().values() if layer else ():
            if field in FIELDS:
                stamps[row, FIELDS.index(field)] += 1
            else:
                getattr(table, field)[row] += 1

    backend.init_forward_metadata(batch)
    found = run_step(world, backend, batch, spoil=spoil)
    decoder = check(world, backend, plan, batch, found, spoil=spoil)
    counts = backend.sparse.metrics.counts
    assert counts == decoder.metrics.counts
    assert counts["decode_own_scans_total reuse"] == counts["decode_own_scans_total reindex"] == 1
    assert backend.sparse.state.counts == decoder.state.counts


def test_a_slot_that_nobody_admitted_decodes_dense(host, triton_base):
    plan, world = PLANS["three roles"], world_of(host)
    backend, batch = backend_of(triton_base, world, plan), world.decode_batch()
    world.requests.req_generation[world.request_slots[2]] += 1  # it changed hands
    backend.init_forward_metadata(batch)
    found = run_step(world, backend, batch)
    check(world, backend, plan, batch, found, exact=[2])


def test_pools_of_earlier_steps_are_extended_and_scans_are_counted(host, triton_base):
    """`refresh_every`: one decoder of the law goes along, step by step."""
    plan = make_plan("FXR", refresh_every=3, **SELECTION)
    world = world_of(host)
    backend, batch = backend_of(triton_base, world, plan), world.decode_batch()
    law = decoder_of(world, plan)
    for back in range(5, -1, -1):
        for at, slots in enumerate(world.slots):
            n = max(len(slots) - back, 1)
            batch.seq_lens[at], batch.out_cache_loc[at] = n, slots[n - 1]
        backend.init_forward_metadata(batch)
        found = run_step(world, backend, batch)
        wanted = law_step(world, law, batch, [q for q, _ in found])
        for (_, got), want in zip(found, wanted, strict=True):
            close(got, want)
    assert backend.sparse.metrics.counts == law.metrics.counts
    # of two rows that select, in the first step and in the fourth
    scanned = sum(len(world.slots[at]) - back for at in (0, 2) for back in (5, 2))
    assert law.metrics.counts["decode_tokens_total scanned"] == scanned


@pytest.mark.parametrize("kind", ["label_channels", "learned"])
def test_scorers_that_were_trained_read_their_own_keys(host, triton_base, kind, tmp_path):
    """Of maps that are made here, as `calibrate --distil` leaves them beside a plan."""
    world = world_of(host)
    width, num_kv_heads = 16, 2
    torch.manual_seed(3)
    if kind == "learned":
        key = torch.randn(1, 8, num_kv_heads * width) / 6
        query = torch.randn(NUM_Q_HEADS, 8, width)
    else:
        channels = torch.stack([torch.randperm(width)[:8].sort().values for _ in range(num_kv_heads)])
        key, query = label_map(channels, NUM_Q_HEADS, width)
    low, step = torch.full(key.shape[:2], -2.5), torch.full(key.shape[:2], 1 / 3)
    maps = {layer: IndexMap(*(x.clone() for x in (key, query, low, step))) for layer in (0, 1)}
    weights = IndexWeights(kind, model_identity(Path(host.model_config.model_path)), maps)
    scorer = {"kind": kind, "weights": "w.safetensors", "num_channels": 8}
    scorer["weights_sha256"] = weights.save(tmp_path / "w.safetensors")
    plan = make_plan("FXR", scorer=scorer, folder=tmp_path, **SELECTION)
    backend, batch = backend_of(triton_base, world, plan), world.decode_batch()
    backend.init_forward_metadata(batch)
    found = run_step(world, backend, batch)
    check(world, backend, plan, batch, found)
    with pytest.raises(AssertionError):  # negative control: the keys themselves would have chosen others
        check(world, backend, PLANS["three roles"], batch, found)


class TestIndexKeys:
    """Copies of keys that a step finds and writes by itself."""

    PLAN = PLANS["int4 keys"]

    def rewritten(self, host, triton_base, *, announced):
        """A world that was decoded, a row of which then got other keys."""
        world = world_of(host)
        backend, batch = backend_of(triton_base, world, self.PLAN), world.decode_batch()
        backend.init_forward_metadata(batch)
        check(world, backend, self.PLAN, batch, run_step(world, backend, batch))
        slots = world.slots[2][10:50]
        for pool in world.pool.k_buffer:
            pool[slots] = world.normal(40, 2) * 2
        if announced:
            backend.sparse.written(slots)
        return world, backend, batch

    def step(self, world, backend, batch):
        backend.init_forward_metadata(batch)
        return run_step(world, backend, batch)

    def test_an_announced_write_is_copied_before_it_is_scanned(self, host, triton_base):
        world, backend, batch = self.rewritten(host, triton_base, announced=True)
        check(world, backend, self.PLAN, batch, self.step(world, backend, batch))
        assert "decode_stale_keys_total" not in backend.sparse.metrics.counts

    def test_one_that_nobody_announced_is_mended_within_a_period_and_counted(
        self, host, triton_base, monkeypatch
    ):
        monkeypatch.setattr("sglang_blockreuse.layers.index_keys.AUDIT_PERIOD", 4)
        world, backend, batch = self.rewritten(host, triton_base, announced=False)
        with pytest.raises(AssertionError):  # negative control: it was not noticed at once
            check(world, backend, self.PLAN, batch, self.step(world, backend, batch))
        for _ in range(4):
            found = self.step(world, backend, batch)
        check(world, backend, self.PLAN, batch, found)
        assert backend.sparse.metrics.counts["decode_stale_keys_total"] == 2 * 40, "once per scoring layer"


class TestReplay:
    """What a graph would do, with the numbers and the Python of the recorded step."""

    PLAN = PLANS["int4 keys"]

    def captured(self, triton_base, host, lens=LENS):
        world = world_of(host, lens)
        backend, batch = backend_of(triton_base, world, self.PLAN), world.decode_batch()
        tokens = [
            (world.normal(3, NUM_Q_HEADS), world.normal(3, 2), world.normal(3, 2)) for _ in world.layers
        ]
        backend.init_cuda_graph_state(3, 3)
        # the host runs a step before it captures one
        backend.init_forward_metadata(batch)
        run_step(world, backend, batch)
        backend.init_forward_metadata_out_graph(batch, in_capture=True)
        with recording() as made:
            backend.init_forward_metadata_in_graph(batch)
            outs = [
                backend.forward(q.flatten(1), k, v, layer, batch)
                for layer, (q, k, v) in zip(world.layers, tokens, strict=True)
            ]
        return world, backend, batch, tokens, outs, made

    def replayed(self, world, backend, batch, tokens, made, rng):
        """A step of other rows, lengths and values, on the tensors of the recorded one."""
        lens = [rng.choice((1, 15, 16, 17, 40, CONTEXT - 1)) for _ in LENS]
        rows = rng.sample(range(3), 3)
        for at, (row, n) in enumerate(zip(rows, lens, strict=True)):
            n = min(n, len(world.slots[row]))
            batch.req_pool_indices[at], batch.seq_lens[at] = world.request_slots[row], n
            batch.seq_lens_cpu[at], batch.out_cache_loc[at] = n, world.slots[row][n - 1]
        for given in tokens:
            for tensor in given:
                tensor.copy_(torch.randn(tensor.shape, generator=world.random))
        exact = [row for row in range(3) if rng.random() < 0.2]
        admit(backend, world, exact)
        backend.init_forward_metadata_out_graph(batch)
        made.replay()
        return exact

    def check(self, world, batch, tokens, outs, exact):
        queries = [q for q, _, _ in tokens]
        wanted, _ = expected(world, self.PLAN, batch, queries, exact=exact)
        for got, want in zip(outs, wanted, strict=True):
            close(got.view(want.shape), want)

    def test_it_equals_the_law_at_other_rows_lengths_and_values(self, triton_base, host, num_sets):
        rng = random.Random(1)
        world, backend, batch, tokens, outs, made = self.captured(triton_base, host)
        for _ in range(num_sets):
            exact = self.replayed(world, backend, batch, tokens, made, rng)
            self.check(world, batch, tokens, outs, exact)

    def test_what_is_recorded_does_not_depend_on_lengths(self, triton_base, host):
        *_, one = self.captured(triton_base, host)
        *_, other = self.captured(triton_base, host, (16, 33, 2))
        assert one.lines == other.lines

    def test_a_length_that_was_baked_in_is_seen(self, triton_base, host, monkeypatch):
        """Negative control."""
        from sglang_blockreuse.layers.cuda_decode import CudaDecode

        begin = CudaDecode.begin

        def baked(decode, batch):
            begin(decode, SimpleNamespace(req_pool_indices=batch.req_pool_indices, seq_lens=lens))

        lens = torch.tensor(LENS)
        monkeypatch.setattr(CudaDecode, "begin", baked)
        with pytest.raises(AssertionError):
            self.test_it_equals_the_law_at_other_rows_lengths_and_values(triton_base, host, 6)

    def test_waiting_for_the_device_is_seen(self, triton_base, host, monkeypatch):
        """Negative control."""
        from sglang_blockreuse.kernels.ops_triton import TritonOps

        monkeypatch.setattr(TritonOps, "all_fresh", lambda ops, checked: bool(checked.fresh_R.all()))
        with pytest.raises(AssertionError, match="waits for the device"):
            self.captured(triton_base, host)


@pytest.mark.parametrize(
    ("pattern", "most"), [("F", 5), ("FX", 6), ("FR", 5)], ids=["full", "reindex", "reuse"]
)
def test_launches_of_a_layer_are_few(triton_base, host, pattern, most):
    """Of the last layer, its write of KV left out; every operation that is no view is a launch on a device."""
    world = world_of(host)
    plan = make_plan((pattern + "R" * 3)[:3] if pattern != "F" else "FRR", **SELECTION)
    backend, batch = backend_of(triton_base, world, plan), world.decode_batch()
    backend.init_forward_metadata(batch)
    at = len(pattern) - 1
    for layer in range(at):
        run_layer(world, backend, batch, layer)
    q = world.normal(3, NUM_Q_HEADS)
    pools = world.pool.k_buffer[at], world.pool.v_buffer[at]
    with recording() as made:
        backend._decode.run(at, q, *pools, scale=SCALE)
    launched = [line.split()[0] for line in made.launched]
    assert len(launched) <= most, launched
