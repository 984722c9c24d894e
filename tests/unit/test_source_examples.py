"""The worked examples of the source on cross-layer sharing, on the code that serves them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sparse_world import make_plan

from sglang_blockreuse.kernels import cpu_select
from sglang_blockreuse.kernels import reference_select as law
from sglang_blockreuse.kernels.cpu_select import Rows, Table
from sglang_blockreuse.layers.share_state import ShareState

MIB = 2**20
ANCHOR, LATER = (10.0, 9.0, 1.0, 0.0), (10.0, 1.0, 9.5, 0.0)


def compiled_keep(scores, size, pool=None):
    """Positions of the best `size`, by the kernel; `pool` are candidate positions in ascending order."""
    num_positions = 4
    rows = Rows(
        np.zeros(1, np.int32),
        np.array([num_positions], np.int32),
        np.arange(num_positions, dtype=np.int32)[None],
        np.zeros(0, np.uint8),
        np.zeros(4, np.float32),
    )
    candidates = Table.empty(1, 1, num_positions)
    if pool is not None:
        candidates.positions[0, 0, : len(pool)] = pool
        candidates.counts[0, 0] = len(pool)
        scores = [scores[p] for p in pool]
    work = np.array(scores, np.float32)[None, None]
    out = Table.empty(1, 1, size)
    cpu_select.keep(rows, candidates, np.array([pool is not None], np.uint8), work, 0, 0, out)
    return set(out.positions[0, 0].tolist())


def law_keep(scores, size, pool=None):
    positions = None if pool is None else torch.tensor([[pool]])
    values = torch.tensor([[[scores[p] for p in pool or range(4)]]])
    lens = torch.tensor([values.shape[-1]])
    return set(law.top_k(values, lens, size, positions_RXW=positions)[0][0, 0].tolist())


@pytest.mark.parametrize("keep", [compiled_keep, law_keep])
class TestFourPositions:
    """Positions are 1 to 4 in the source and 0 to 3 here."""

    def test_final_indices_lose_half_of_what_the_later_layer_wants(self, keep):
        anchor, later = keep(ANCHOR, 2), keep(LATER, 2)
        assert (anchor, later) == ({0, 1}, {0, 2})
        assert len(anchor & later) / len(later) == 1 / 2

    def test_a_pool_of_three_recovers_the_later_layers_own_choice(self, keep):
        pool = sorted(keep(ANCHOR, 3))
        assert pool == [0, 1, 2]
        assert keep(LATER, 2, pool) == keep(LATER, 2) == {0, 2}

    def test_a_pool_of_two_cannot(self, keep):
        assert keep(LATER, 2, sorted(keep(ANCHOR, 2))) == {0, 1}


def test_workspace_of_positions():
    """8192 rows of 2048 int32 positions are 64 MiB; four layers 256 MiB, one group 64; a pool of 8192 is 256."""

    def mib(pattern, **selection):
        state = ShareState(make_plan(pattern, **selection), 8192, 1)
        tables = dict.fromkeys(("pool", "indices"), 0)
        for (_, kind), (table, _) in state.written().items():
            tables[kind] += table.positions.nbytes
        return tables["pool"] / MIB, tables["indices"] / MIB

    assert mib("FRRR", final_k=2048) == (0, 64)
    assert mib("FRFRFRFR", final_k=2048) == (0, 256)
    assert mib("FXXX", final_k=2048, pool_size=8192) == (256, 0)


def test_coverage_of_the_last_layer_of_a_group():
    """1800 of 2048 positions inside the pool are 87.9 %."""
    wanted = torch.arange(2048)
    pool = torch.cat([wanted[:1800], torch.arange(5000, 5000 + 8192 - 1800)])
    assert pool.numel() == 8192
    assert float(torch.isin(wanted, pool).float().mean()) == pytest.approx(0.879, abs=5e-4)


class TestMargin:
    """max|delta| < m / 2 keeps the set; at m / 2 and beyond it may change."""

    @settings(max_examples=200, deadline=None)
    @given(seed=st.integers(0, 2**32 - 1), k=st.integers(1, 9), share=st.floats(0, 0.999))
    def test_a_perturbation_below_half_the_margin_changes_nothing(self, seed, k, share):
        rng = np.random.default_rng(seed)
        scores = torch.tensor(rng.permutation(10).astype(np.float64) + rng.random(10) / 4)
        ranked = scores.sort(descending=True).values
        margin = float(ranked[k - 1] - ranked[k])
        delta = torch.tensor(rng.choice([-1.0, 1.0], 10)) * margin / 2 * share
        assert best(scores, k) == best(scores + delta, k)

    def test_more_than_half_the_margin_may_change_the_set(self):
        scores = torch.tensor([3.0, 2.0, 1.0])
        assert best(scores, 2) != best(scores + torch.tensor([0.0, -0.51, 0.51]), 2)

    def test_without_a_margin_the_lower_position_stays(self):
        assert best(torch.tensor([1.0, 2.0, 2.0, 2.0]), 2) == {1, 2}


def best(scores, k):
    return set(law.top_k(scores[None, None], torch.tensor([len(scores)]), k)[0][0, 0].tolist())
