"""Probes on the host's Triton, FlashInfer and FlashAttention 3 backends: what they see equals what is there."""

from __future__ import annotations

import pytest
import torch
from rehearsed import ONE_FOLD, run_layer
from tolerances import KERNEL_OUT
from world import NUM_LAYERS, SCALE, World

from sglang_blockreuse.blocks.probe import Probe, Subject, guard_layer, probing, question_layers

KINDS = ("question", "deviation", "guard")
NUM_ASKED = 3


def subjects(world, kind):
    """One per request, asking with its last computed tokens."""
    found, first = [], 0
    for slots, (_, runs) in zip(world.slots, world.drawn.requests, strict=True):
        num_tokens = sum(len(run) for run in runs)
        asked = torch.arange(num_tokens)[-NUM_ASKED:] if kind == "question" else None
        found.append(Subject(kind, slots, runs, first, asked_T=asked))
        first += num_tokens
    return found


def look(world, backend, kind, *, fused=False, begin_late=False):
    """Run a probe over the world's fold. Returns its evidence and each layer's q, old keys and new keys."""
    batch = world.batch()
    backend.init_forward_metadata(batch)
    probe = Probe(subjects(world, kind), NUM_LAYERS)
    seen = []
    with probing(backend, probe):
        for index in range(NUM_LAYERS):
            old = world.pool.k_buffer[index][batch.out_cache_loc].clone()
            run_layer(
                world,
                backend,
                batch,
                index,
                fused=fused,
                after_fused_write=lambda: probe.begin(world.pool.get_key_buffer) if begin_late else None,
                seen=lambda q, k: seen.append((q, old, k)),  # noqa: B023
            )
    return probe.evidence(), seen


def deviations(world, seen, layer):
    """|k_new - k_old| / |k_new| by position, per request."""
    _, old, new = seen[layer]
    change = (new - old).flatten(1).norm(dim=1) / new.flatten(1).norm(dim=1)
    first = 0
    for length, runs in world.drawn.requests:
        found = torch.zeros(length)
        for run in runs:
            found[run.start : run.end] = change[first : first + len(run)]
            first += len(run)
        yield found


def taken(world, seen):
    """What the question takes up of each position: attention times the length of the value, in float64."""
    first = 0
    for slots, (length, runs) in zip(world.slots, world.drawn.requests, strict=True):
        at = torch.cat([torch.arange(run.start, run.end) for run in runs])
        found = torch.zeros(3, length, dtype=torch.float64)
        asked = range(len(at))[-NUM_ASKED:]
        for layer in question_layers(NUM_LAYERS):
            q = seen[layer][0][first : first + len(at)].double()
            k, v = (pool[layer][slots].double() for pool in (world.pool.k_buffer, world.pool.v_buffer))
            group = q.shape[1] // k.shape[1]
            for head in range(q.shape[1]):
                lengths = v[:, head // group].norm(dim=-1)
                rows = []
                for i in asked:
                    logits = k[:, head // group] @ q[i, head] * SCALE
                    logits[at[i] + 1 :] = -torch.inf
                    rows.append(logits.softmax(0) * lengths)
                rows = torch.stack(rows)
                found += torch.stack([rows.sum(0), rows.amax(0), rows[-1]])
        first += len(at)
        yield found


def assert_close(got, want):
    absolute, relative = KERNEL_OUT["probe", torch.float32]
    got, want = torch.as_tensor(got).double(), want.double()
    assert ((got - want).abs() <= absolute + relative * want.abs()).all(), (got - want).abs().max()


@pytest.fixture
def world(host):
    world = World(host, ONE_FOLD)
    world.compute_all()  # what was loaded
    return world


@pytest.mark.parametrize("corrected", [False, True], ids=["plain", "alpha and beta"])
def test_the_question_is_seen_where_it_looks(base, world, corrected):
    backend = base(world.runner)
    if corrected:
        backend.correct(world.runner, alpha=-1.0, beta=-1.0)
    found, seen = look(world, backend, "question")
    for evidence, want in zip(found, taken(world, seen), strict=True):
        assert_close(evidence.attention_3N, want)


@pytest.mark.parametrize("kind", ["deviation", "guard"])
@pytest.mark.parametrize("fused", [False, True], ids=["the backend writes", "the model writes"])
def test_changed_keys_are_measured_whoever_writes_them(base, world, kind, fused):
    """A model may rotate and write its keys in one operation, before the backend is called."""
    found, seen = look(world, base(world.runner), kind, fused=fused)
    layer = 1 if kind == "deviation" else guard_layer(NUM_LAYERS)
    for evidence, want in zip(found, deviations(world, seen, layer), strict=True):
        assert (want > 0.5).any()
        assert_close(evidence.deviation_N, want)


def test_old_keys_that_are_read_when_the_model_has_written_say_nothing(base, world):
    """Negative control: that is what made a guard pass whatever it was shown."""
    found, _ = look(world, base(world.runner), "guard", fused=True, begin_late=True)
    assert all((evidence.deviation_N == 0).all() for evidence in found)


def test_a_probe_is_over_with_its_forward(base, world):
    backend = base(world.runner)
    assert backend.can_run_prefill_cuda_graph(world.batch())
    look(world, backend, "guard")
    assert backend.probe is None
    batch = world.batch()
    backend.init_forward_metadata(batch)
    for index in range(NUM_LAYERS):
        run_layer(world, backend, batch, index)
