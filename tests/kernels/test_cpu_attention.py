"""Attention on the CPU against float64, over poisoned pools."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from drawn import examples
from hypothesis import example, given
from hypothesis import strategies as st
from tolerances import KERNEL_OUT

from sglang_blockreuse.kernels.cpu_attention import KeyBias, Workspace, plan_attention, run_attention
from sglang_blockreuse.kernels.cpu_decode import CHUNK, plan_decode
from sglang_blockreuse.kernels.cpu_extend import CAUSAL_LEN
from sglang_blockreuse.kernels.cpu_rows import Row

LOCAL, FALSE_SINK = 1, 2
LAYOUTS = ["consecutive", "scattered", "interleaved"]


@dataclass
class Batch:
    """Rows (request, prefix length, extend length) over a pool that is NaN wherever no row may read."""

    rows: list[tuple[int, int, int]]
    table: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def run(self, *, bias: KeyBias | None = None, workspace: Workspace | None = None) -> torch.Tensor:
        requests, prefix_lens, extend_lens = zip(*self.rows, strict=True)
        plan = plan_attention(self.table, requests, prefix_lens, extend_lens, bias=bias)
        out = torch.full_like(self.q, float("nan"))
        workspace = workspace or Workspace()
        run_attention(plan, self.q, self.k, self.v, out, scale=self.scale, workspace=workspace)
        return out

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5

    def exact(self, *, bias: KeyBias | None = None) -> torch.Tensor:
        """s_ij = scale q_i k_j + alpha [local_j] + beta [false sink_j] over the keys j <= i, in float64."""
        outs, first = [], 0
        for request, prefix_len, extend_len in self.rows:
            end = prefix_len + extend_len
            slots = self.table[request, :end].long()
            group = self.q.shape[1] // self.k.shape[1]
            k, v = (pool[slots].double().repeat_interleave(group, dim=1) for pool in (self.k, self.v))
            q = self.q[first : first + extend_len].double()
            logits = torch.einsum("nqd,jqd->qnj", q, k) * self.scale
            if bias is not None:
                tags = bias.tags_S[slots]
                logits += torch.where(tags & LOCAL != 0, bias.alpha, 0.0)
                logits += torch.where(tags & FALSE_SINK != 0, bias.beta, 0.0)
            position = torch.arange(prefix_len, end)
            logits.masked_fill_(torch.arange(end) > position[:, None], -torch.inf)
            outs.append(torch.einsum("qnj,jqd->nqd", logits.softmax(-1), v))
            first += extend_len
        return torch.cat(outs)

    def only(self, request: int) -> Batch:
        """One request's rows, without the others."""
        rows, keep, first = [], [], 0
        for row in self.rows:
            if row[0] == request:
                rows.append(row)
                keep.append(torch.arange(first, first + row[2]))
            first += row[2]
        return Batch(rows, self.table, self.q[torch.cat(keep)], self.k, self.v)

    def moved(self, layout: str, seed: int) -> Batch:
        """The same keys in other slots."""
        lens = request_lens(self.rows)
        table = slot_table(lens, layout, seed)
        k, v = (torch.full_like(pool, float("nan")) for pool in (self.k, self.v))
        for request, num_keys in lens.items():
            old, new = self.table[request, :num_keys].long(), table[request, :num_keys].long()
            k[new], v[new] = self.k[old], self.v[old]
        return Batch(self.rows, table, self.q, k, v)


def request_lens(rows: list[tuple[int, int, int]]) -> dict[int, int]:
    lens: dict[int, int] = {}
    for request, prefix_len, extend_len in rows:
        lens[request] = max(lens.get(request, 0), prefix_len + extend_len)
    return lens


def slot_table(lens: dict[int, int], layout: str, seed: int) -> torch.Tensor:
    """Slots from 1 on; entries behind a request's keys point at slot 0, which is poisoned."""
    table = torch.zeros(max(lens) + 1, max(lens.values()) + 3, dtype=torch.int32)
    slots = torch.arange(1, sum(lens.values()) + 1, dtype=torch.int32)
    if layout == "scattered":
        slots = slots[torch.randperm(len(slots), generator=torch.Generator().manual_seed(seed))]
    if layout == "interleaved":
        # as decoding one token of every request in turn would
        turn = sorted((position, request) for request, n in lens.items() for position in range(n))
        for slot, (position, request) in zip(slots, turn, strict=True):
            table[request, position] = slot
        return table
    first = 0
    for request, num_keys in lens.items():
        table[request, :num_keys] = slots[first : first + num_keys]
        first += num_keys
    return table


def make_batch(
    rows, *, layout="scattered", dtype=torch.float32, num_heads=2, group=3, head_dim=64, seed=0
) -> Batch:
    lens = request_lens(rows)
    table = slot_table(lens, layout, seed)
    generator = torch.Generator().manual_seed(seed)
    used = torch.cat([table[request, :num_keys].long() for request, num_keys in lens.items()])
    shape = (sum(lens.values()) + 5, num_heads, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    for pool in (k, v):
        pool[used] = torch.randn(len(used), num_heads, head_dim, generator=generator).to(dtype)
    q = torch.randn(sum(n for _, _, n in rows), num_heads * group, head_dim, generator=generator).to(dtype)
    return Batch(rows, table, q, k, v)


def make_tags(batch: Batch, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 4, batch.k.shape[:1], generator=generator).to(torch.uint8)


def is_close(out: torch.Tensor, exact: torch.Tensor) -> bool:
    absolute, relative = KERNEL_OUT["cpu_attention", out.dtype]
    return bool(((out.double() - exact).abs() <= absolute + relative * exact.abs()).all())


@st.composite
def row_lists(draw: st.DrawFn) -> list[tuple[int, int, int]]:
    """Requests that decode, start, continue or compute several runs."""
    rows = []
    for request in range(draw(st.integers(1, 4))):
        num_keys = draw(st.integers(1, 60) | st.integers(400, 1100))
        kind = draw(st.sampled_from(["decode", "fresh", "continue", "runs"]))
        if kind == "decode":
            rows.append((request, num_keys - 1, 1))
        elif kind == "fresh":
            rows.append((request, 0, num_keys))
        elif kind == "continue":
            prefix_len = draw(st.integers(0, num_keys - 1))
            rows.append((request, prefix_len, num_keys - prefix_len))
        else:
            cuts = sorted(draw(st.sets(st.integers(0, num_keys), min_size=2, max_size=8)))
            rows += [(request, a, b - a) for a, b in zip(cuts[::2], cuts[1::2], strict=False)]
    return rows


@examples(60)
@given(
    rows=row_lists(),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    num_heads=st.integers(1, 3),
    group=st.sampled_from([1, 3, 4, 8]),
    head_dim=st.sampled_from([64, 80, 128]),
    terms=st.none() | st.tuples(st.floats(-4, 4), st.floats(-4, 4)),
    seed=st.integers(0, 99),
)
@example(  # one row per kind of tile, in one request: joined short rows, a long row, a last token
    rows=[(0, 40, 9), (0, 60, 8), (0, 300, CAUSAL_LEN + 1), (0, 900, 1)],
    layout="scattered",
    dtype=torch.float32,
    num_heads=2,
    group=3,
    head_dim=64,
    terms=(-1.0, 0.5),
    seed=0,
)
def test_equals_float64_and_reads_no_other_slot(rows, layout, dtype, num_heads, group, head_dim, terms, seed):
    sizes = {"num_heads": num_heads, "group": group, "head_dim": head_dim}
    batch = make_batch(rows, layout=layout, dtype=dtype, seed=seed, **sizes)
    bias = KeyBias(make_tags(batch, seed), *terms) if terms is not None else None
    assert is_close(batch.run(bias=bias), batch.exact(bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_every_head_shape(group, head_dim, dtype):
    rows = [(0, 2 * CHUNK + 6, 1), (1, 0, 1), (2, 5, 300), (3, 0, 33), (4, 10, 3), (4, 700, 5)]
    batch = make_batch(rows, dtype=dtype, group=group, head_dim=head_dim)
    assert is_close(batch.run(), batch.exact())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("num_keys", [1, 2, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 3 * CHUNK + 130])
def test_decode_around_the_edges_of_a_piece(num_keys, layout):
    rows = [(r, num_keys - 1, 1) for r in range(3)]
    batch = make_batch(rows, layout=layout)
    assert is_close(batch.run(), batch.exact())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_decode_of_rows_with_unlike_numbers_of_pieces(layout):
    lens = [3 * CHUNK + 7, 40, 2 * CHUNK, CHUNK + 1, 2 * CHUNK + 300]
    batch = make_batch([(r, num_keys - 1, 1) for r, num_keys in enumerate(lens)], layout=layout)
    assert is_close(batch.run(), batch.exact())


@pytest.mark.parametrize(
    "rows", [[(0, 50, 5), (0, 10, 5)], [(0, 40, 9), (0, 45, 9)], [(0, 7, 1), (0, 7, 1)]], ids=str
)
def test_rows_of_a_request_that_do_not_ascend(rows):
    batch = make_batch(rows)
    assert is_close(batch.run(), batch.exact())


def test_a_lattice_of_slots_is_read_in_place_and_other_pieces_are_copied():
    rows = [Row(request=r, first=r, prefix_len=4 * CHUNK - 1, end=4 * CHUNK) for r in range(3)]
    lens = dict.fromkeys(range(3), 4 * CHUNK)
    read = {layout: plan_decode(slot_table(lens, layout, 0), rows, 3, None) for layout in LAYOUTS}
    assert [(view.num_pieces, view.key_step) for view in read["consecutive"].views] == [(4, 1)] * 3
    assert [(view.num_pieces, view.key_step) for view in read["interleaved"].views] == [(4, 3)] * 3
    assert not read["consecutive"].copies
    assert not read["interleaved"].copies
    assert not read["scattered"].views


def test_slots_that_descend_piece_by_piece():
    rows = [(0, 3 * CHUNK, 1)]
    batch = make_batch(rows, layout="consecutive")
    pieces = batch.table[0, : 3 * CHUNK].view(3, CHUNK).flip(0).flatten()
    batch.table[0, : 3 * CHUNK] = pieces.clone()
    assert is_close(batch.run(), batch.exact())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_runs_of_a_request_equal_its_full_row(dtype):
    full = make_batch([(0, 0, 1400)], dtype=dtype)
    runs = [(0, 12), (200, 231), (240, 241), (600, 920), (1399, 1400)]
    rows = [(0, a, b - a) for a, b in runs]
    positions = torch.cat([torch.arange(a, b) for a, b in runs])
    virtual = Batch(rows, full.table, full.q[positions], full.k, full.v)
    assert is_close(virtual.run(), full.exact()[positions])
    assert is_close(full.run(), full.exact())


@pytest.mark.parametrize("rows", [[(0, 900, 1)], [(0, 20, 7), (0, 500, 40)], [(0, 300, 400)]], ids=str)
def test_ignoring_the_tags_is_detected(rows):
    batch = make_batch(rows)
    bias = KeyBias(make_tags(batch), -1.5, 2.0)
    assert is_close(batch.run(bias=bias), batch.exact(bias=bias))
    assert not is_close(batch.run(), batch.exact(bias=bias))
    assert not is_close(batch.run(bias=bias._replace(beta=0.0)), batch.exact(bias=bias))
    assert not is_close(batch.run(bias=bias._replace(alpha=0.0)), batch.exact(bias=bias))


@pytest.mark.parametrize("rows", [[(0, 900, 1)], [(0, 20, 7), (0, 500, 40)], [(0, 300, 400)]], ids=str)
def test_without_terms_or_tagged_keys_not_a_bit_changes(rows):
    batch = make_batch(rows)
    plain = batch.run()
    assert torch.equal(batch.run(bias=KeyBias(make_tags(batch), 0.0, 0.0)), plain)
    assert torch.equal(batch.run(bias=KeyBias(torch.zeros_like(make_tags(batch)), -1.0, 1.0)), plain)


@pytest.mark.parametrize(
    "rows", [[(0, 2 * CHUNK + 99, 1)], [(0, 2 * CHUNK, 40)], [(0, 2 * CHUNK, 400)]], ids=str
)
def test_an_alpha_of_minus_infinity_removes_the_local_keys(rows):
    """Whole pieces and the whole prefix of a row may vanish."""
    batch = make_batch(rows)
    tags = torch.zeros_like(make_tags(batch))
    tags[batch.table[0, : 2 * CHUNK].long()] = LOCAL
    bias = KeyBias(tags, -torch.inf, 0.0)
    assert is_close(batch.run(bias=bias), batch.exact(bias=bias))


@examples(30)
@given(
    rows=row_lists(),
    layout=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 99),
)
def test_the_bits_of_a_request_depend_on_no_other_request_and_on_no_slot(rows, layout, dtype, seed):
    batch = make_batch(rows, dtype=dtype, seed=seed)
    out = batch.run()
    assert torch.equal(batch.moved(layout, seed + 1).run(), out)
    first = 0
    for request in range(rows[-1][0] + 1):
        alone = batch.only(request)
        assert torch.equal(alone.run(), out[first : first + alone.q.shape[0]])
        first += alone.q.shape[0]


def test_what_another_request_holds_does_not_reach_a_row():
    batch = make_batch([(0, 2 * CHUNK + 4, 1), (1, 40, 1), (2, CHUNK, 1)])
    clean = batch.run()
    batch.v[batch.table[0, : 2 * CHUNK].long()] = float("inf")
    assert torch.equal(batch.run()[1:], clean[1:])


def test_a_recycled_request_row_is_planned_anew():
    """The table's row gets other slots: a new request, or a radix tree that took over the old ones."""
    workspace = Workspace()
    batch = make_batch([(0, 1100, 1), (1, 30, 20)], layout="consecutive")
    before = batch.run(workspace=workspace)
    moved = batch.moved("scattered", seed=3)
    batch.table.copy_(moved.table)
    batch.k.copy_(moved.k)
    batch.v.copy_(moved.v)
    assert torch.equal(batch.run(workspace=workspace), before)


def test_a_workspace_carries_nothing_from_call_to_call():
    workspace = Workspace()
    batches = [make_batch([(0, 30, 40), (1, 700, 1)], seed=1), make_batch([(0, 3, 9), (1, 20, 1)], seed=2)]
    fresh = [batch.run() for batch in batches]
    for batch, out in [*zip(batches, fresh, strict=True)] * 2:
        assert torch.equal(batch.run(workspace=workspace), out)


def test_nothing_to_compute():
    batch = make_batch([(0, 9, 1)])
    for rows in ([], [(0, 5, 0)]):
        lists = [[row[i] for row in rows] for i in range(3)]
        plan = plan_attention(batch.table, *lists)
        out = torch.full_like(batch.q, float("nan"))
        run_attention(plan, batch.q, batch.k, batch.v, out, scale=1.0, workspace=Workspace())
        assert not out.any()  # tokens behind the plan's are padding: 0


def test_rows_without_queries_take_no_token():
    batch = make_batch([(0, 9, 4), (1, 6, 1)])
    out = batch.run()
    batch.rows = [(1, 3, 0), (0, 9, 4), (0, 13, 0), (1, 6, 1)]
    assert torch.equal(batch.run(), out)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (([0], [0], [99]), "at most 10, the width"),
        (([0], [-1], [2]), "must be >= 0"),
        (([0, 1], [0], [1]), "one of each per row"),
    ],
)
def test_rows_that_do_not_fit_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        plan_attention(torch.zeros(2, 10, dtype=torch.int32), *rows)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda b: {"q_TQD": b.q[:, :-1], "out_TQD": b.q[:, :-1].clone()}, "do not fit keys"),
        (lambda b: {"q_TQD": b.q[:-1], "out_TQD": b.q[:-1].clone()}, "plan of 4 tokens"),
        (lambda b: {"k_SHD": b.k.bfloat16()}, "one dtype"),
        (lambda b: {"v_SHD": b.v[..., :-1]}, "same shape"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change, message):
    batch = make_batch([(0, 6, 4)])
    plan = plan_attention(batch.table, [0], [6], [4])
    operands = {"q_TQD": batch.q, "k_SHD": batch.k, "v_SHD": batch.v, "out_TQD": torch.empty_like(batch.q)}
    with pytest.raises(ValueError, match=message):
        run_attention(plan, **(operands | change(batch)), scale=1.0, workspace=Workspace())
