"""A prefill step on a device that is not there: nobody waits for it, it is asked a bounded number of times, and what
it computes is what the CPU computes.

Dims: S pool slots, H KV heads, D head dim, Q query heads
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from cudalike import CudaLike, Log, below, rehearsed_device
from tolerances import KERNEL_OUT

from sglang_blockreuse import hooks
from sglang_blockreuse.blocks.load import KvLoader
from sglang_blockreuse.blocks.manager import BlockManager
from sglang_blockreuse.blocks.plan import build_plan
from sglang_blockreuse.blocks.probe import probing
from sglang_blockreuse.blocks.rope import RopeGroup
from sglang_blockreuse.blocks.rows import attach, unfold
from sglang_blockreuse.blocks.step import PrefillSteps
from sglang_blockreuse.blocks.tags import SlotTags
from sglang_blockreuse.config import BlocksConfig, Config
from sglang_blockreuse.kernels.dispatch import Dispatcher
from sglang_blockreuse.metrics import Metrics
from sglang_blockreuse.types import BlockOptions, Interval, LocalSegment, RequestState, Usage

NUM_LAYERS, HEADS, DIM, Q_HEADS = 4, 2, 16, 4
HEAD, DOC, QUESTION = 12, 30, 10
CONTEXT, MAX_REQUESTS = 400, 8
LOADED, FOLDED = "blocks/load.py", "blocks/rows.py"  # where numbers are sent to the device
ROPE = (0, 1, 3)  # layer 2 has no rotary embedding


@dataclass
class World:
    """Requests of some documents each, whose homes are in the pool, and the step that prefills them."""

    num_docs: tuple[int, ...]
    policy: str
    on: Any  # puts a tensor on the device
    tagged: bool = False

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(0)
        lens = [HEAD + n * DOC + QUESTION for n in self.num_docs]
        num_slots = 1 + 2 * sum(lens)
        order = torch.randperm(num_slots - 1, generator=self.random) + 1
        table = torch.zeros((MAX_REQUESTS, CONTEXT), dtype=torch.int32)
        self.reqs, used = [], 0

        def take(num: int) -> torch.Tensor:
            nonlocal used
            used += num
            return order[used - num : used]

        rows = [5, 2, 6, 1][: len(lens)]
        for row, length, num_docs in zip(rows, lens, self.num_docs, strict=True):
            table[row, :length] = take(length).int()
            spans = tuple(Interval(HEAD + i * DOC, HEAD + (i + 1) * DOC) for i in range(num_docs))
            options = BlockOptions("reuse", spans, self.policy, None, 0.1)
            segments = [LocalSegment(s, 1 + 7 * i, i, s.start) for i, s in enumerate(spans)]
            needs = self.policy if self.policy in ("seam", "head", "random") else "head"
            plan = build_plan(segments, start=0, end=length, options=options, policy=needs)
            homes = [self.on(take(len(span))) for span in spans]
            state = RequestState(options, Usage(), plan=plan, home_slots=homes, first_local=plan.first_local)
            kv = SimpleNamespace(req_pool_idx=row)
            prompt = {"origin_input_ids": range(length), "output_ids": (), "prefix_len": 0, "lora_id": None}
            self.reqs.append(SimpleNamespace(rid=f"r{row}", kv=kv, blockreuse=state, **prompt))
        self.table = self.on(table)
        shape = (num_slots, HEADS, DIM)
        self.k, self.v = (
            [self.on(torch.randn(shape, generator=self.random)) for _ in range(NUM_LAYERS)] for _ in range(2)
        )
        self.batch = self._batch(rows, lens, table)
        self.steps = self._steps(num_slots)

    def _batch(self, rows: list[int], lens: list[int], table: torch.Tensor) -> Any:
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        out = torch.cat([table[row, :length].long() for row, length in zip(rows, lens, strict=True)])
        n = len(rows)
        return ScheduleBatch(
            reqs=self.reqs,
            prefix_lens=[0] * n,
            extend_lens=lens,
            extend_logprob_start_lens=lens,
            seq_lens=self.on(torch.tensor(lens)),
            seq_lens_cpu=torch.tensor(lens),
            orig_seq_lens=self.on(torch.tensor(lens, dtype=torch.int32)),
            req_pool_indices=self.on(torch.tensor(rows)),
            req_pool_indices_cpu=torch.tensor(rows),
            input_ids=self.on(torch.arange(sum(lens))),
            out_cache_loc=self.on(out),
        )

    def _steps(self, num_slots: int) -> PrefillSteps:
        metrics, config = Metrics(), Config(blocks=BlocksConfig(policy=self.policy))
        blocks = BlockManager(config=config, tree=None, bos=None, pool_size=num_slots, metrics=metrics)
        table = self.on(torch.rand((CONTEXT, DIM), generator=self.random) + 0.1)
        groups = (RopeGroup("rope", ROPE, table, True), RopeGroup("none", (2,), None, True))
        loader = KvLoader(self.k, self.v, groups, Dispatcher())
        tags = SlotTags(num_slots, num_sinks=4, device=self.k[0].device) if self.tagged else None
        return PrefillSteps(blocks, loader, metrics=metrics, num_layers=NUM_LAYERS, tags=tags)

    def run(self, folded: Any, fold: Any, probe: Any) -> None:
        """A forward that a probe leaves: each layer writes its keys and values and shows them."""
        num_tokens = sum(fold.tokens)
        pools = SimpleNamespace(get_key_buffer=lambda layer: self.k[layer])
        backend = SimpleNamespace(token_to_kv_pool=pools, probe=None)
        with probing(backend, probe):
            for index, pair in enumerate(zip(self.k, self.v, strict=True)):
                for pool in pair:
                    pool[folded.out_cache_loc] = self.drawn(num_tokens, HEADS)
                layer = SimpleNamespace(layer_id=index, scaling=0.25)
                probe.after_write(layer, self.drawn(num_tokens, Q_HEADS), *pair)

    def drawn(self, num_tokens: int, num_heads: int) -> torch.Tensor:
        return self.on(torch.randn((num_tokens, num_heads, DIM), generator=self.random))

    def prefill(self) -> Any:
        """The step as the hooks run it, around a model that computes nothing."""
        from sglang.srt.layers.logits_processor import LogitsMetadata
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        folded, fold = self.steps.prepare(self.batch, self.table, self.run)
        forward_batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(folded.reqs),
            input_ids=folded.input_ids,
            req_pool_indices=folded.req_pool_indices,
            seq_lens=folded.seq_lens,
            out_cache_loc=folded.out_cache_loc,
            seq_lens_sum=folded.seq_lens_sum,
            orig_seq_lens=folded.orig_seq_lens,
            seq_lens_cpu=folded.seq_lens_cpu,
            rids=[req.rid for req in folded.reqs],
            extend_seq_lens=folded.req_pool_indices.int(),
            extend_seq_lens_cpu=list(folded.extend_lens),
        )
        attach(forward_batch, fold)
        original = LogitsMetadata.from_forward_batch.__func__
        logits = hooks.logits_metadata(original, LogitsMetadata, forward_batch)
        unfold(forward_batch, fold)
        return folded, fold, logits


@contextmanager
def on_the_device(
    monkeypatch: pytest.MonkeyPatch, *num_docs: int, policy: str = "seam", tagged: bool = False
) -> Iterator[tuple[World, Log]]:
    """A world on a device that is not there, and what is asked of it once the server has started."""
    with rehearsed_device(monkeypatch) as log:
        world = World(num_docs, policy, CudaLike, tagged)
        log.clear()
        yield world, log


def step_log(monkeypatch: pytest.MonkeyPatch, *num_docs: int, **options: Any) -> Log:
    with on_the_device(monkeypatch, *num_docs, **options) as (world, log):
        world.prefill()
    return log


MEASURED = ("query", "head+query", "deviation")


@pytest.mark.parametrize("tagged", [False, True], ids=["plain", "alpha and beta"])
@pytest.mark.parametrize("policy", ["seam", "head", "random"])
def test_nobody_waits_for_the_device_in_a_folded_step(monkeypatch, policy, tagged):
    log = step_log(monkeypatch, 10, 3, 1, policy=policy, tagged=tagged)
    assert not log.syncs
    assert log.uploads[LOADED] == log.uploads[FOLDED] == 1
    assert log.num_uploads == (5 if tagged else 2), "tags are sent request by request"


@pytest.mark.parametrize("policy", MEASURED)
def test_a_probe_is_waited_for_once_whatever_the_number_of_requests(monkeypatch, policy):
    """The host chooses by what it measured, so it has to; everything else is sent ahead of the device."""
    log = step_log(monkeypatch, 10, 3, 1, policy=policy)
    assert [kind for kind, _ in log.syncs.elements()] == ["copied to the host"]
    assert log.num_uploads == 4, "what is loaded, the probe's rows, what it looks at, the step's rows"


def test_the_device_is_asked_as_often_for_three_requests_as_for_one(monkeypatch):
    one, three = step_log(monkeypatch, 2), step_log(monkeypatch, 10, 10, 10)
    assert one.launches == three.launches
    assert one.launches["_rotate_copy_kernel"] == 2, "layers with a rotary embedding, and layers without"
    assert one.num_launches <= 14


def test_tags_cost_a_bounded_number_of_launches_per_request(monkeypatch):
    few, many = (step_log(monkeypatch, n, n, tagged=True).num_launches for n in (2, 10))
    assert few == many <= 30


@pytest.mark.parametrize("policy", ["seam", "random", *MEASURED])
def test_the_step_is_the_one_that_the_cpu_prepares(monkeypatch, policy):
    """The same rows, and the same KV as far as kernels round alike; by policies that measure, the same choice."""
    here = World((10, 3), policy, lambda tensor: tensor, tagged=True)
    folded, fold, logits = here.prefill()
    with on_the_device(monkeypatch, 10, 3, policy=policy, tagged=True) as (there, _):
        other, other_fold, other_logits = there.prefill()
    assert folded.prefix_lens == other.prefix_lens
    assert folded.extend_lens == other.extend_lens
    assert (fold.tokens, fold.last_rows) == (other_fold.tokens, other_fold.last_rows)
    for name in ("input_ids", "out_cache_loc", "req_pool_indices", "seq_lens", "orig_seq_lens"):
        assert torch.equal(getattr(folded, name), below(getattr(other, name)))
    assert (
        logits.extend_seq_lens.tolist() == below(other_logits.extend_seq_lens).tolist() == list(fold.tokens)
    )
    assert torch.equal(here.steps.tags.values_S, below(there.steps.tags.values_S))
    absolute, relative = KERNEL_OUT["rotate_copy", torch.float32]
    for mine, law in zip([*there.k, *there.v], [*here.k, *here.v], strict=True):
        assert ((below(mine) - law).abs() <= absolute + relative * law.abs()).all()


class TestTheDeviceThatIsNotThere:
    """Negative controls: what would wait on a real device is seen, with its place."""

    @pytest.mark.parametrize(
        ("plant", "kind"),
        [
            (lambda world: int(world.table[0, 0]), "a value is read"),
            (lambda world: world.k[0].cpu(), "copied to the host"),
            (lambda world: torch.tensor([1, 2], device=world.table.device), "copied to the device"),
            (lambda world: torch.arange(3).to("cuda"), "copied to the device"),
            (
                lambda world: torch.arange(3).to("cuda", non_blocking=True),
                "copied from memory that is not pinned",
            ),
            (lambda world: world.k[0][world.k[0][:, 0, 0] > 0], "indexed by a mask"),
            (lambda world: world.k[0][torch.tensor([1])], "indexed by the host's numbers"),
            (lambda world: world.table.nonzero(), "aten.nonzero.default"),
        ],
        ids=lambda value: value if isinstance(value, str) else "",
    )
    def test_a_wait_is_seen(self, monkeypatch, plant, kind):
        with on_the_device(monkeypatch, 2) as (world, log):
            plant(world)
        assert [found for found, _ in log.syncs] == [kind]

    def test_a_wait_planted_in_the_step_is_seen_with_its_place(self, monkeypatch):
        def blocking(arrays, device):
            return tuple(torch.from_numpy(array).to(device) for array in arrays)

        monkeypatch.setattr("sglang_blockreuse.blocks.rows.upload", blocking)
        log = step_log(monkeypatch, 2)
        assert {place.split(":")[0] for _, place in log.syncs} == {"blocks/rows.py"}
        assert len(list(log.syncs.elements())) == 4

    def test_operands_on_two_devices_are_refused(self, monkeypatch):
        with on_the_device(monkeypatch, 2) as (world, _), pytest.raises(RuntimeError, match="two devices"):
            _ = world.k[0] + torch.ones(DIM)
