"""The operations of decode: compiled for the CPU and in Triton, each against the law, verb by verb.

Rows are of every kind at once: they select from their history or from a pool, take a shared list or one of their own,
attend to everything, or are padding. Every slot that no row owns holds NaN.
"""

from __future__ import annotations

import pytest
import torch
from tolerances import KERNEL_OUT

from sglang_blockreuse.kernels.cpu_rows import KeyBias
from sglang_blockreuse.kernels.ops import Chosen, Expected, Lent, Rows, Table
from sglang_blockreuse.kernels.ops_cpu import CpuOps
from sglang_blockreuse.kernels.ops_law import LawOps
from sglang_blockreuse.kernels.ops_triton import TritonOps
from sglang_blockreuse.kernels.reference_select import quantise_int4

H, G, D = 2, 3, 16
SCALE = D**-0.5
LENS = [90, 0, 41, 0, 130, 64]  # the second row is padding, the fourth attends to everything
DENSE = [90, 0, 41, 23, 130, 64]
REQUESTS = [3, 0, 1, 5, 6, 2]
CONTEXT, SIZE, POOL = 140, 12, 30
LISTS = [1, H]


class World:
    def __init__(self, num_lists, *, bias=None, seed=0):
        torch.manual_seed(seed)
        num_slots = 600
        self.k, self.v = (torch.full((num_slots, H, D), torch.nan) for _ in range(2))
        table = torch.full((8, CONTEXT), num_slots, dtype=torch.int32)
        free = torch.randperm(num_slots - 1) + 1
        for request, n in zip(REQUESTS, DENSE, strict=True):
            mine, free = free[:n], free[n:]
            table[request, :n] = mine.int()
            self.k[mine], self.v[mine] = torch.randn(n, H, D) * 2, torch.randn(n, H, D)
        self.table, self.num_lists = table, num_lists
        tags = torch.randint(0, 4, (num_slots,), dtype=torch.uint8)
        self.bias = None if bias is None else KeyBias(tags, *bias)
        self.q = torch.randn(len(LENS), H * G, D)

    def rows(self):
        ints = (torch.tensor(values, dtype=torch.int32) for values in (REQUESTS, LENS))
        return Rows(*ints, self.table, self.bias, torch.tensor(DENSE, dtype=torch.int32))

    def ops(self, name):
        made = {"law": LawOps, "cpu": CpuOps, "triton": lambda: TritonOps(self.num_lists, CONTEXT, "cpu")}
        return made[name]()

    def empty(self, size=SIZE, num_lists=None):
        return Table.empty(8, num_lists or self.num_lists, size)

    def kept(self, ops, *, pool=None, pooled=None, size=SIZE, keys=None, out=None, window=5, rows=None):
        """The table that score and keep leave."""
        rows = rows or self.rows()
        q = ops.queries(self.q, SCALE)
        work = ops.scratch(len(LENS), H * G, CONTEXT).fill_(torch.nan)
        pooled_R = torch.zeros(len(LENS), dtype=torch.uint8) if pooled is None else pooled
        pool = self.empty() if pool is None else pool
        out = self.empty(size) if out is None else out
        ops.score(q, self.k if keys is None else keys, rows, pool, pooled_R, work, None)
        ops.keep(rows, pool, pooled_R, work, 2, window, out)
        return out

    def attended(self, ops, chosen):
        out = torch.full(self.q.shape, 7.0)
        ops.attend(ops.queries(self.q, SCALE), self.k, self.v, self.rows(), chosen, out)
        live = torch.tensor(DENSE) > 0
        return out[live]


def same_tables(got, want):
    """What rows that select have written; everything else is as it was."""
    assert torch.equal(got.counts, want.counts)
    for request in range(8):
        n = int(want.counts[request])
        for x in range(want.positions.shape[1]):
            assert got.positions[request, x, :n].tolist() == want.positions[request, x, :n].tolist()
            assert got.slots[request, x, :n].tolist() == want.slots[request, x, :n].tolist()


def close(got, want):
    absolute, relative = KERNEL_OUT["cpu_attention", torch.float32]
    torch.testing.assert_close(got, want, atol=absolute, rtol=relative)


# a thin grid keeps the first of each: the one that is nowhere else beside the law
FAST = pytest.mark.parametrize("name", ["triton", "cpu"])
EVERY = pytest.mark.parametrize("name", ["triton", "cpu", "law"])
BIASES = pytest.mark.parametrize("bias", [None, (-0.7, -1.5), (0.0, -torch.inf)], ids=str)


@FAST
@BIASES
@pytest.mark.parametrize("num_lists", LISTS)
def test_what_is_kept_of_a_history_and_of_a_pool(name, num_lists, bias):
    world = World(num_lists, bias=bias)
    law, fast = LawOps(), world.ops(name)
    pool = world.kept(law, size=POOL)
    same_tables(world.kept(fast, size=POOL), pool)
    pooled = torch.tensor([1, 1, 0, 0, 1, 0], dtype=torch.uint8)
    same_tables(world.kept(fast, pool=pool, pooled=pooled), world.kept(law, pool=pool, pooled=pooled))


@FAST
def test_rows_may_differ_in_their_window(name):
    world = World(1)
    window = torch.tensor([1, 2, 3, 4, 9, 6], dtype=torch.int32)
    same_tables(world.kept(world.ops(name), window=window), world.kept(LawOps(), window=window))


@FAST
def test_one_list_that_lists_per_head_lend_is_their_sum(name):
    world = World(H)
    got, want = (world.kept(ops, out=world.empty(num_lists=1)) for ops in (world.ops(name), LawOps()))
    same_tables(got, want)


@FAST
@pytest.mark.parametrize("num_lists", LISTS)
def test_int4_keys_are_scored_in_place_of_the_keys(name, num_lists):
    world = World(num_lists)
    keys = quantise_int4(world.k)
    same_tables(world.kept(world.ops(name), keys=keys), world.kept(LawOps(), keys=keys))
    keys = quantise_int4(world.k.roll(1, 2))
    with pytest.raises(AssertionError):  # negative control: the keys would have chosen others
        same_tables(world.kept(world.ops(name)), world.kept(LawOps(), keys=keys))


@EVERY
@BIASES
@pytest.mark.parametrize("num_lists", LISTS)
def test_attention_over_a_shared_list_an_own_one_or_everything(name, num_lists, bias):
    world = World(num_lists, bias=bias)
    law = LawOps()
    shared, own = world.kept(law), world.kept(law, size=SIZE, window=1)
    fresh = torch.tensor([0, 0, 1, 0, 1, 0], dtype=torch.uint8)
    got = world.attended(world.ops(name), Chosen(shared, own, fresh))
    close(got, world.attended(law, Chosen(shared, own, fresh)))
    close(got[-1], world.attended(law, Chosen(own))[-1])
    with pytest.raises(AssertionError):
        close(got, world.attended(law, Chosen(shared)))


@FAST
def test_stamps_and_checks(name):
    """Row by row and field by field, whatever spoils them."""
    found = []
    for ops in (World(H).ops(name), LawOps()):
        world = World(H)
        rows = world.rows()
        values = torch.stack((torch.arange(6) + 100, torch.full((6,), 9), rows.lens_R.long()), 1)
        expected = Expected(rows.requests_R, rows.lens_R, values)
        lent = Lent(world.kept(LawOps()), torch.full((8, 6), -1, dtype=torch.int64))
        ops.seal(expected, lent, (4, 5))
        seen = [lent.stamps_B6.clone()]
        stale = torch.zeros(7, dtype=torch.int64)
        seen.append(ops.check(expected, lent, (4, 5), stale).fresh_R.clone())
        lent.stamps_B6[3, 0] += 1
        lent.table.slots[1, 1, 4] += 1
        lent.table.counts[0] += 1  # of a row that selects nothing
        lent.stamps_B6[6, 4] -= 1
        checked = ops.check(expected, lent, (4, 5), stale)
        seen += [checked.fresh_R, stale, checked.stale_lens_R]
        found.append(seen)
    for got, want in zip(*found, strict=True):
        assert torch.equal(got.long(), want.long())
    stamps, good, bad, stale, stale_lens = found[0]
    assert good.tolist() == [1] * 6
    assert bad.tolist() == [0, 1, 0, 1, 0, 1]
    assert stale_lens.tolist() == [90, 0, 41, 0, 130, 0]
    assert stale.tolist() == [1, 0, 0, 0, 1, 1, 3]
    assert stamps[[0, 4, 5, 7]].eq(-1).all(), "of rows that select nothing"


@EVERY
def test_rows_that_select_nothing_leave_their_tables_alone(name):
    world = World(1)
    out = world.empty()
    out.positions.fill_(77)
    out.counts.fill_(5)
    kept = world.kept(world.ops(name), out=out)
    assert kept.counts[[0, 5]].tolist() == [5, 5]
    assert kept.positions[[0, 5]].eq(77).all()


@pytest.mark.parametrize("num_lists", LISTS)
def test_long_rows_are_selected_from_in_chunks(num_lists, monkeypatch):
    from sglang_blockreuse.kernels import top_k

    monkeypatch.setattr(top_k, "MIN_CHUNK_LEN", 16)
    world = World(num_lists)
    pool = world.kept(LawOps(), size=100)
    pooled = torch.tensor([0, 1, 1, 0, 1, 0], dtype=torch.uint8)
    got = world.kept(world.ops("triton"), pool=pool, pooled=pooled, size=4)
    same_tables(got, world.kept(LawOps(), pool=pool, pooled=pooled, size=4))
