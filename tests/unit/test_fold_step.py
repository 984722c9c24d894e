"""One prefill step: what fails in it, who pays for that, and how long what it reads stays alive."""

from __future__ import annotations

import gc
import weakref
from array import array
from types import SimpleNamespace

import pytest
import torch

from sglang_blockreuse.blocks.faults import is_device_error
from sglang_blockreuse.blocks.load import KvLoader
from sglang_blockreuse.blocks.manager import BlockManager
from sglang_blockreuse.blocks.step import STEPS_IN_FLIGHT, PrefillSteps
from sglang_blockreuse.blocks.tags import SlotTags
from sglang_blockreuse.config import Config
from sglang_blockreuse.metrics import Metrics
from sglang_blockreuse.types import BlockOptions, BlockPlan, Copy, Interval, LocalSegment, RequestState, Usage

LEN, CHUNK = 100, 16
REQ_TO_TOKEN = torch.arange(10 * LEN, dtype=torch.int32).view(10, LEN)


class Tree:
    """Counts locks; nothing else of the tree is asked in a step."""

    def __init__(self):
        self.held = 0

    def let_go(self, lock):
        self.held -= 1


class Loader(KvLoader):
    """Copies nothing; raises what it was told to for some requests, or for the copy of all."""

    def __init__(self, errors=None):
        self.errors = errors or {}

    def find(self, state, row, low, high):
        if error := self.errors.get(row):
            raise error
        return super().find(state, row, low, high)

    def load(self, copies, slot_table):
        if error := self.errors.get("all"):
            raise error


def request(slot, *, mode="reuse"):
    """A prompt of 100 tokens that copies 90 of them, from [5, 95)."""
    segment = LocalSegment(Interval(5, 95), 3, 0, 5)
    runs = (Interval(0, 5), Interval(95, LEN))
    plan = BlockPlan(0, LEN, (segment,), (Copy(segment.interval, 0),), runs, 0, 95)
    state = RequestState(BlockOptions(mode, (segment.interval,), "seam", 0, 0.05), Usage(mode=mode))
    state.plan, state.first_local = plan, plan.first_local
    state.home_slots, state.locks = [torch.arange(90)], [object()]
    return SimpleNamespace(
        rid=f"r{slot}",
        kv=SimpleNamespace(req_pool_idx=slot),
        prefix_len=0,
        origin_input_ids=array("q", range(LEN)),
        output_ids=[],
        blockreuse=state,
    )


def batch_of(reqs, **more):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    n = len(reqs)
    slots = torch.tensor([r.kv.req_pool_idx for r in reqs])
    lens = torch.full((n,), LEN)
    return ScheduleBatch(
        reqs=reqs,
        prefix_lens=[0] * n,
        extend_lens=[LEN] * n,
        extend_logprob_start_lens=[LEN] * n,
        seq_lens=lens,
        seq_lens_cpu=lens,
        orig_seq_lens=lens.int(),
        req_pool_indices=slots,
        req_pool_indices_cpu=slots,
        input_ids=torch.arange(n * LEN),
        out_cache_loc=REQ_TO_TOKEN[slots].flatten().long(),
        **more,
    )


class World:
    """Steps of one rank, and what they did."""

    def __init__(self, errors=None, **more):
        self.tree, self.metrics = Tree(), Metrics()
        self.blocks = BlockManager(
            config=Config(), tree=self.tree, bos=None, pool_size=10 * LEN, metrics=self.metrics
        )
        self.tags = SlotTags(10 * LEN, num_sinks=4, device="cpu")
        more = {"max_forward_tokens": CHUNK, **more}
        self.steps = PrefillSteps(self.blocks, Loader(errors), metrics=self.metrics, tags=self.tags, **more)
        self.before = []  # (request slots, tokens) of forwards before the step

    def prepare(self, *reqs, **more):
        self.tree.held += sum(len(r.blockreuse.locks) for r in reqs if r.blockreuse)
        return self.steps.prepare(batch_of(list(reqs), **more), REQ_TO_TOKEN, self.run)

    def run(self, folded, fold, probe):
        assert probe is None
        self.before.append((folded.req_pool_indices.tolist(), fold.tokens))

    def tagged(self, slot):
        return self.tags.values_S[REQ_TO_TOKEN[slot].long()]


BROKEN = ValueError("a bug of ours")


class TestWhatFails:
    def test_a_load_that_fails_unfolds_its_request_only(self):
        world, reqs = World({2: BROKEN}), [request(1), request(2), request(3)]
        _, fold = world.prepare(*reqs)
        assert fold.tokens == (10, 10, 10), "the step computes what it was formed for"
        assert [r.blockreuse.usage.skipped_reason for r in reqs] == [None, "internal_error", None]
        assert reqs[1].blockreuse.plan is None
        assert reqs[0].blockreuse.plan is not None
        assert world.metrics.counts["errors_total"] == 1

    def test_a_copy_that_fails_unfolds_who_copies_and_nobody_else(self):
        world, plain = World({"all": BROKEN}), request(4, mode="off")
        plain.blockreuse = None
        _, fold = world.prepare(request(1), request(2), plain)
        assert fold.tokens == (10, 10, LEN)
        assert sum(sum(tokens) for _, tokens in world.before) == 2 * 90
        assert world.metrics.counts["errors_total"] == 2

    def test_what_was_to_be_copied_is_computed_before_the_step_in_chunks(self):
        world = World({2: BROKEN})
        folded, _ = world.prepare(request(1), request(2))
        assert all(slots == [2] for slots, _ in world.before)
        assert [tokens for _, (_, tokens) in world.before] == [16, 16, 16, 16, 16, 10]
        assert (folded.prefix_lens[-1], folded.extend_lens[-1]) == (90, 10)

    def test_two_that_fail_share_their_forwards(self):
        world = World({1: BROKEN, 2: BROKEN})
        world.prepare(request(1), request(2))
        assert max(sum(tokens) for _, tokens in world.before) == CHUNK
        assert len(world.before) == 12, "180 tokens by 16"

    def test_a_request_that_failed_leaves_no_tag_and_no_lock(self):
        world, reqs = World({2: BROKEN}), [request(1), request(2)]
        world.prepare(*reqs)
        assert not world.tagged(2).any()
        assert world.tagged(1)[5:95].all(), "negative control: copied tokens are tagged"
        assert world.tree.held == 1

    def test_a_batch_that_cannot_be_folded_is_computed_as_it_is(self):
        world, req = World(), request(1)
        batch, fold = world.prepare(req, encoder_lens_cpu=[7])
        assert fold is None
        assert batch.extend_lens == [LEN]
        assert req.blockreuse.usage.skipped_reason == "internal_error"
        assert not world.tagged(1).any()

    def test_a_request_without_a_plan_is_never_touched(self):
        world, plain = World({2: BROKEN}), request(4, mode="off")
        plain.blockreuse = None
        _, fold = world.prepare(request(1), plain)
        assert fold.tokens == (10, LEN)


class TestErrorsOfTheDevice:
    @pytest.mark.parametrize(
        "error",
        [
            torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700),
            torch.OutOfMemoryError("CUDA out of memory."),
            RuntimeError("CUDA error: device-side assert triggered"),
            RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED when calling cublasGemmEx"),
            torch.distributed.DistBackendError("NCCL communicator was aborted"),
        ],
        ids=lambda error: type(error).__name__,
    )
    def test_they_are_raised_and_not_taken_for_ours(self, error):
        assert is_device_error(error)
        world = World({1: error})
        with pytest.raises(type(error)):
            world.prepare(request(1))

    @pytest.mark.parametrize("error", [BROKEN, KeyError(3), RuntimeError("shapes differ"), MemoryError()])
    def test_other_errors_cost_reuse_only(self, error):
        assert not is_device_error(error)
        _, fold = World({1: error}).prepare(request(1))
        assert fold is not None


class TestRanks:
    def test_a_failure_on_another_rank_unfolds_the_same_request_here(self):
        """Both ranks run the same forwards: collectives of a forward match by order and shape alone."""
        seen = []

        def rank(errors, others):
            def any_rank(flags):
                seen.append(flags)
                return [mine or other for mine, other in zip(flags, others, strict=True)]

            world = World(errors, any_rank=any_rank)
            folded, fold = world.prepare(request(1), request(2), request(3))
            return world.before, folded.prefix_lens, fold.tokens

        failing = rank({2: BROKEN}, [False, False, False])
        other = rank({}, [False, True, False])
        assert seen == [[False, True, False], [False, False, False]]
        assert failing == other

    def test_ranks_are_not_asked_where_nothing_is_reused(self):
        plain = request(4)
        plain.blockreuse = None
        World(any_rank=lambda flags: pytest.fail("asked")).prepare(plain)


class TestLifetimes:
    """The scheduler lets go of a request (an abort between chunks) while the device may still read for it."""

    def released_after_prepare(self):
        world, req = World(), request(1)
        world.prepare(req)
        slots = weakref.ref(req.blockreuse.home_slots[0])
        world.blocks.release(req)
        gc.collect()
        assert world.tree.held == 0, "KV is written in the order of the forwards, so homes may go at once"
        return world, slots

    def test_what_a_step_reads_outlives_the_request_that_brought_it(self):
        _, slots = self.released_after_prepare()
        assert slots() is not None

    def test_it_goes_when_the_step_after_the_next_is_prepared(self):
        """By then the result of the step was taken, as the host's own scheduler does."""
        world, slots = self.released_after_prepare()
        for i in range(STEPS_IN_FLIGHT):
            assert slots() is not None
            world.prepare(request(2 + i))
        gc.collect()
        assert slots() is None

    def test_a_failed_load_does_not_drop_what_kernels_may_read(self):
        world, req = World({1: BROKEN}), request(1)
        slots = weakref.ref(req.blockreuse.home_slots[0])
        world.prepare(req)
        gc.collect()
        assert req.blockreuse.home_slots == []
        assert slots() is not None


class TestPublishing:
    """Which position of a row is the first that a full prefill and dense decode would not have written."""

    @pytest.fixture
    def sparse(self):
        return BlockManager(
            config=Config(), tree=Tree(), bos=None, pool_size=1000, metrics=Metrics(), layer_plan="a plan"
        )

    def test_under_a_sparse_plan_an_answer_is_local_whatever_became_of_the_request_s_marks(self, sparse):
        unread = SimpleNamespace(origin_input_ids=range(LEN))
        assert sparse.local_from(unread) == LEN
        assert sparse.path_of(unread) is None, "nobody can ask for it either"
        plain = request(1, mode="off")
        plain.blockreuse.first_local = None
        assert sparse.local_from(plain) == LEN

    def test_mode_exact_decodes_dense_and_is_exact_throughout(self, sparse):
        exact = request(1, mode="exact")
        exact.blockreuse.first_local = None
        assert sparse.local_from(exact) is None

    def test_without_a_sparse_plan_a_request_without_marks_is_exact(self):
        assert World().blocks.local_from(SimpleNamespace(origin_input_ids=range(LEN))) is None
