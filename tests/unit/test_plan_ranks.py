"""A layer plan over tensor-parallel ranks: each holds one KV head with its queries, and together they choose as one.

The ranks run in threads that take turns, so that they meet in their sums as processes do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from sparse_world import G, H, World, make_plan
from tolerances import KERNEL_OUT

from sglang_blockreuse.layers.ranks import Ranks
from sglang_blockreuse.layers.sparse_decode import SparseDecoder

LENS = (70, 45, 130)
SELECTION = {"final_k": 24, "pool_size": 40, "sink": 2, "window": 4}
LENT = {"heads": "kv_head", "lend_heads": "layer"}
PLANS = {
    "three roles": make_plan("DFXRFR", **SELECTION),
    "lists per KV head": make_plan("DFXRFR", heads="kv_head", **SELECTION),
    "one list lent": make_plan("DFXRFR", scorer=LENT, **SELECTION),
    "fused heads": make_plan("FXR", scorer={"scan_heads": "fused", "rerank_heads": "all"}, **SELECTION),
    "routed heads": make_plan(
        "FXR", scorer={"scan_heads": "routed", "num_routed_heads": 2, **LENT}, **SELECTION
    ),
    "int4 keys": make_plan("FXR", scorer={"kind": "int4_keys"}, **SELECTION),
    "pages": make_plan("FXR", scorer={"kind": "page_minmax", "page_size": 4}, **SELECTION),
    "a layer that attends to everything by its scan": make_plan("FXR", attend_all=[0], **SELECTION),
    "keys of another layer": make_plan("FFXR", key_from={1: 0}, **SELECTION),
    "pools of earlier steps": make_plan("FXR", refresh_every=4, **SELECTION),
}
NUM_STEPS = 3
WAIT_S = 60.0  # a rank that waits longer has been left alone


class Meeting:
    """Runs one function per rank, one at a time but for their sums, where all must come."""

    def __init__(self, num_ranks: int) -> None:
        self._turn = threading.Lock()
        self._barrier = threading.Barrier(num_ranks, timeout=WAIT_S)
        self._parts: list[torch.Tensor | None] = [None] * num_ranks
        self.num_sums = 0

    def sum(self, rank: int, values: torch.Tensor) -> torch.Tensor:
        self._parts[rank] = values.clone()
        self._turn.release()
        self._barrier.wait()
        total = torch.stack(self._parts).sum(0)
        self._barrier.wait()
        self._turn.acquire()
        self.num_sums += rank == 0
        return total

    def run(self, works: Sequence[Callable[[], None]]) -> None:
        errors: list[BaseException] = []

        def one(work: Callable[[], None]) -> None:
            with self._turn:
                try:
                    work()
                except BaseException as error:
                    errors.append(error)
                    self._barrier.abort()

        threads = [threading.Thread(target=one, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]


class RankWorld(World):
    """What one rank sees of a world."""

    def __init__(self, whole: World, rank: int, meeting: Meeting | None) -> None:
        self.__dict__.update(whole.__dict__)
        self.rank, self.meeting = rank, meeting
        self.k, self.v = ([x[:, rank : rank + 1].contiguous() for x in pools] for pools in (whole.k, whole.v))
        self.q = [x[:, rank * G : (rank + 1) * G] for x in whole.q]

    def decoder(self, **options: object) -> SparseDecoder:
        ranks = None if self.meeting is None else Ranks(H, H, lambda x: self.meeting.sum(self.rank, x))
        return SparseDecoder(
            self.plan,
            num_requests=self.table.shape[0],
            num_q_heads=G,
            k_pools=self.k,
            ranks=ranks,
            **options,
        )


def together(whole: World, *, meet: bool = True, spoil: Callable[[int, SparseDecoder], None] | None = None):
    """(outputs of each layer of each step with all heads, decoders) of ranks that run `whole`."""
    meeting = Meeting(H)
    worlds = [RankWorld(whole, rank, meeting if meet else None) for rank in range(H)]
    decoders = [world.decoder() for world in worlds]
    outs: list[list[torch.Tensor]] = [[] for _ in worlds]

    def work(rank: int) -> None:
        for at in range(NUM_STEPS):
            worlds[rank].lens = [n - NUM_STEPS + 1 + at for n in whole.lens]
            if spoil is not None:
                spoil(rank, decoders[rank])
            outs[rank] += worlds[rank].run_all(decoders[rank])

    meeting.run([lambda rank=rank: work(rank) for rank in range(H)])
    return [torch.cat(parts, 1) for parts in zip(*outs, strict=True)], decoders


def alone(whole: World):
    """The same of one decoder with all heads."""
    decoder, outs, lens = whole.decoder(), [], whole.lens
    for at in range(NUM_STEPS):
        whole.lens = [n - NUM_STEPS + 1 + at for n in lens]
        outs += whole.run_all(decoder)
    whole.lens = lens
    return outs, decoder


def lists(decoder: SparseDecoder, requests) -> dict[object, np.ndarray]:
    tables = {key: table for key, (table, _) in decoder.state.written().items()}
    return {key: table.positions[requests] for key, table in tables.items()}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_ranks_choose_and_attend_as_one_rank_does(plan):
    whole = World(plan, LENS)
    want, one = alone(whole)
    got, ranks = together(whole)
    atol, rtol = KERNEL_OUT["cpu_attention", torch.float32]
    for x, y in zip(got, want, strict=True):
        assert torch.allclose(x, y, atol=atol, rtol=rtol)
    for decoder in ranks:
        assert decoder.metrics.counts == one.metrics.counts
    for key, positions in lists(one, whole.requests).items():
        mine = [lists(decoder, whole.requests)[key] for decoder in ranks]
        of_all = np.concatenate(mine, 1) if plan.scorer.lends == "kv_head" else mine[0]
        np.testing.assert_array_equal(of_all, positions)
        if plan.scorer.lends == "layer":
            assert all(np.array_equal(x, mine[0]) for x in mine), "the same bits on every rank"


@pytest.mark.parametrize("name", [name for name in PLANS if name != "lists per KV head"])
def test_ranks_that_rank_by_their_own_heads_are_seen_to_differ(name):
    """Negative control."""
    whole = World(PLANS[name], LENS)
    want, _ = alone(whole)
    got, _ = together(whole, meet=False)
    assert max((x - y).abs().max().item() for x, y in zip(got, want, strict=True)) > 1e-2


@pytest.mark.parametrize("name", ["three roles", "one list lent", "pools of earlier steps"])
def test_state_that_is_stale_on_one_rank_is_scanned_anew_on_all(name):
    """A rank that scanned alone would wait for the sums of the others for ever."""
    whole = World(PLANS[name], LENS)

    def spoil(rank: int, decoder: SparseDecoder) -> None:
        if rank == 1:
            seal = decoder.state.seal

            def sealed(layer, kind):
                seal(layer, kind)
                decoder.state.written()[layer.layer, kind][1][:, 5] += 1  # the digest

            decoder.state.seal = sealed

    _, ranks = together(whole, spoil=spoil)
    scans = [sum(n for key, n in d.metrics.counts.items() if "own_scans" in key) for d in ranks]
    assert len(set(scans)) == 1
    assert scans[0] > 0
    assert all(np.isfinite(x).all() for d in ranks for x in lists(d, whole.requests).values())


class TestRefused:
    def reasons(self, num_kv_heads: int = 4, **scorer: object) -> str:
        plan = make_plan("FXR", scorer=scorer, **SELECTION)
        world = World(plan, LENS)
        with pytest.raises(NotImplementedError) as error:
            SparseDecoder(
                plan,
                num_requests=8,
                num_q_heads=H * G,
                k_pools=world.k,
                ranks=Ranks(4, num_kv_heads, lambda x: x),
            )
        return str(error.value)

    def test_a_scorer_whose_weights_are_of_all_heads(self):
        assert "file of weights" in self.reasons(kind="learned")
        assert "file of weights" in self.reasons(kind="label_channels")

    def test_routing_over_the_heads_of_a_layer(self):
        assert "routed heads with 4 tensor-parallel ranks" in self.reasons(
            scan_heads="routed", num_routed_heads=2
        )

    @pytest.mark.parametrize("scorer", [{"heads": "kv_head"}, {"scan_heads": "fused"}], ids=str)
    def test_a_kv_head_whose_queries_stand_on_several_ranks(self, scorer):
        assert "the model has 2 KV heads" in self.reasons(num_kv_heads=2, **scorer)
