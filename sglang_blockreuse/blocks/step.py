"""One prefill step: loads what its requests reuse, probes where a policy asks for it, folds requests into rows."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..metrics import Metrics
from ..types import BlockOptions, BlockPlan, Copy, Fold, Interval, RequestState
from . import guard
from .load import KvLoader
from .manager import BlockManager, plan_of
from .plan import build_plan, subtract
from .policy import POLICIES, Evidence
from .probe import MAX_QUESTION_TOKENS, Kind, Probe, Subject
from .rows import fold_batch, repair_mask
from .tags import SlotTags

logger = logging.getLogger(__name__)

# A probe computes what no cache had, and the question, a second time; more than this is not worth a better choice.
MAX_PROBE_TOKENS = 512

RunProbe = Callable[[Any, Fold, Probe], None]


@dataclass(frozen=True, slots=True)
class _Part:
    """One request's share of the step: the chunk [low, high) of its prompt."""

    index: int  # in the batch
    req: Any
    row_slots: Tensor  # int32, the request's slots by position
    low: int
    high: int

    @property
    def state(self) -> RequestState:
        state: RequestState = self.req.blockreuse
        return state


class PrefillSteps:
    """Prepares every prefill forward of a scheduler.

    num_layers, shared_layers, reduce: of the model and over its tensor-parallel ranks, see `Probe`.
    """

    def __init__(
        self,
        blocks: BlockManager,
        loader: KvLoader | None,
        *,
        metrics: Metrics,
        num_layers: int = 0,
        shared_layers: Sequence[int] = (),
        reduce: Callable[[Tensor], Tensor] = lambda x: x,
        tags: SlotTags | None = None,
    ) -> None:
        self.tags = tags  # kept only where alpha or beta is not 0
        self.announce: Callable[[Tensor], None] | None = None  # told of slots before KV is copied into them
        self.sparse_repair = False  # the layer plan makes repair sparse, so the backend must know its tokens
        self._blocks = blocks
        self._loader = loader
        self._metrics = metrics
        self._num_layers = num_layers
        self._shared_layers = frozenset(shared_layers)
        self._reduce = reduce

    def prepare_or_compute(
        self, batch: Any, req_to_token: Tensor, run_probe: RunProbe
    ) -> tuple[Any, Fold | None]:
        """`prepare`, or the batch as it is: every position has a slot, so all of it can be computed."""
        try:
            return self.prepare(batch, req_to_token, run_probe)
        except Exception:
            logger.exception("blockreuse: a prefill step computes everything")
            self._metrics.add("errors_total")
            for req in batch.reqs:
                self._blocks.abandon(req)
            return batch, None

    def prepare(self, batch: Any, req_to_token: Tensor, run_probe: RunProbe) -> tuple[Any, Fold | None]:
        """Load what the batch reuses and fold its requests into rows.

        batch: the host's ScheduleBatch of a prefill or mixed step, left as it is.
        req_to_token: int32 [request slots, positions], the host's page table.
        run_probe: runs a folded batch with a probe on the attention backend until the probe leaves it.
        Returns the batch to run and, where it was folded, how to undo it.
        """
        if self.tags is not None:
            self.tags.written(batch.out_cache_loc)
        parts = self._parts(batch, req_to_token)
        probed = []
        num_copied = 0
        for part in parts:
            if self._may_probe(part):
                probed.append(part)
                part.state.plan = everything_copied(_plan(part))
            num_copied += self._load(part)
        if probed:
            self._choose(batch, probed, run_probe)
        runs = [
            [Interval(low, low + extend)]
            for low, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        repairs: list[list[Interval]] = [[] for _ in runs]
        for part in parts:
            runs[part.index] = _plan(part).runs_within(part.low, part.high)
            if self.sparse_repair:
                repairs[part.index] = list(_plan(part).repairs_within(part.low, part.high))
        repair_T = repair_mask(runs, repairs)
        whole = all(len(r) == 1 and len(r[0]) == n for r, n in zip(runs, batch.extend_lens, strict=True))
        if whole and repair_T is None:
            return batch, None
        folded, fold = fold_batch(batch, runs, repair_T=repair_T)
        self._report(batch, fold, num_copied)
        return folded, fold

    def _parts(self, batch: Any, req_to_token: Tensor) -> list[_Part]:
        decoding = {id(r) for r in batch.decoding_reqs or ()}
        rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        return [
            _Part(i, req, req_to_token[req.kv.req_pool_idx], low, low + extend)
            for i, (req, low, extend) in enumerate(rows)
            if plan_of(req) is not None and id(req) not in decoding
        ]

    def _report(self, batch: Any, fold: Fold, num_copied: int) -> None:
        self._metrics.forward(num_rows=fold.num_rows, num_copied=num_copied)
        logger.info(
            "blockreuse: %d requests in %d rows, %d tokens computed, %d copied, %d in exact prefixes",
            len(batch.reqs),
            fold.num_rows,
            sum(fold.tokens),
            num_copied,
            sum(batch.prefix_lens),
        )

    # -- loading ---------------------------------------------------------------------------

    def _load(self, part: _Part) -> int:
        assert self._loader is not None
        if self.tags is not None:
            self.tags.loaded(part.state, part.row_slots, part.low, part.high)
        if self.announce is not None:
            self.announce(part.row_slots[part.low : part.high])
        started = time.perf_counter()
        num_copied = self._loader.load(part.state, part.row_slots, part.low, part.high)
        self._metrics.add("copy_seconds_total", time.perf_counter() - started)
        plan = _plan(part)
        copied = plan.copies_within(part.low, part.high)
        if num_path := sum(len(piece) for index, piece in copied if plan.segments[index].is_path):
            # counted here, because a plan is made anew for every step that has no room for its request
            self._metrics.add("path_tokens_total", num_path)
        return num_copied

    # -- choosing what to repair -------------------------------------------------------------

    def _may_probe(self, part: _Part) -> bool:
        """Whether the request is to be measured, and can be: its whole prompt lies in this step."""
        plan, options = _plan(part), part.state.options
        wanted = POLICIES[options.policy].needs != "layout" or self._is_guarded(part)
        if not wanted or not any(not s.is_path for s in plan.segments):
            return False
        return (
            part.low == plan.start
            and part.high == plan.end
            and sum(len(r) for r in _outside(plan)) <= MAX_PROBE_TOKENS
        )

    def _choose(self, batch: Any, parts: Sequence[_Part], run_probe: RunProbe) -> None:
        """Replace the plans of the given requests, whose segments are loaded, by what the probes say."""
        started = time.perf_counter()
        measured: list[tuple[_Part, Kind]] = []
        for part in parts:
            needs = POLICIES[part.state.options.policy].needs
            if needs != "layout":
                measured.append((part, needs))
        evidence = self._probe(batch, measured, run_probe)
        for part in parts:
            self._adopt(part, evidence.get(part.index, Evidence()), part.state.options)
        self._guard(batch, [p for p in parts if self._is_guarded(p)], evidence, run_probe)
        self._metrics.add("probe_seconds_total", time.perf_counter() - started)

    def _is_guarded(self, part: _Part) -> bool:
        """A bound says something about the policy that it was calibrated with, and about no other."""
        config = self._blocks.config
        return config.guard is not None and part.state.options.policy == config.policy

    def _guard(
        self, batch: Any, parts: Sequence[_Part], evidence: dict[int, Evidence], run_probe: RunProbe
    ) -> None:
        """Raise the budget, or compute everything, where a repair is worse than at calibration."""
        compared: list[tuple[_Part, Kind]] = [
            (p, "guard") for p in parts if not guard.measures_leftover(p.state.options.policy)
        ]
        found = self._probe(batch, compared, run_probe)
        for part in parts:
            plan, options = _plan(part), part.state.options
            mine = evidence.get(part.index, Evidence())
            if guard.measures_leftover(options.policy):
                measure, value = "leftover", guard.leftover(mine, plan)
            else:
                measure, value = "deviation", guard.deviation(found[part.index], plan)
            assert self._blocks.config.guard is not None
            verdict = guard.verdict_of(value, self._blocks.config.guard)
            part.state.usage.guard = {"verdict": verdict, "measure": measure, "value": round(value, 6)}
            self._metrics.add("guard_total", verdict=verdict)
            if verdict == "raised":
                self._adopt(part, mine, guard.raised(options))
            elif verdict == "full":
                self._blocks.replan(part.req, everything_computed(plan))

    def _adopt(self, part: _Part, evidence: Evidence, options: BlockOptions) -> None:
        plan = _plan(part)
        chosen = build_plan(
            plan.segments,
            start=plan.start,
            end=plan.end,
            options=options,
            evidence=evidence,
        )
        self._blocks.replan(part.req, chosen, policy=options.policy)
        if self.tags is not None:
            for run in chosen.runs:
                self.tags.written(part.row_slots[run.start : run.end].long())

    def _probe(
        self, batch: Any, measured: Sequence[tuple[_Part, Kind]], run_probe: RunProbe
    ) -> dict[int, Evidence]:
        """Evidence by index in the batch."""
        if not measured:
            return {}
        runs: list[list[Interval]] = [[] for _ in batch.reqs]
        subjects, first = [], 0
        for part, kind in measured:
            subject = _subject(part, kind, first)
            subjects.append(subject)
            first += subject.num_tokens
            runs[part.index] = list(subject.rows)
            self._metrics.add("probes_total", kind=kind)
        folded, fold = fold_batch(batch, runs)
        probe = Probe(subjects, self._num_layers, self._reduce, self._shared_layers)
        run_probe(folded, fold, probe)
        return {part.index: found for (part, _), found in zip(measured, probe.evidence(), strict=True)}


def _plan(part: _Part) -> BlockPlan:
    assert part.state.plan is not None
    return part.state.plan


def _outside(plan: BlockPlan) -> list[Interval]:
    """What is computed whatever the policy says: all positions outside of the segments, and the last."""
    rows = subtract(Interval(plan.start, plan.end), [s.interval for s in plan.segments])
    if not rows or rows[-1].end < plan.end:
        rows.append(Interval(plan.end - 1, plan.end))
    return rows


def _subject(part: _Part, kind: Kind, first: int) -> Subject:
    plan = _plan(part)
    slots_N = part.row_slots[: plan.end].long()
    if kind == "deviation":
        return Subject(kind, slots_N, (Interval(plan.start, plan.end),), first)
    if kind == "guard":
        return Subject(kind, slots_N, plan.runs, first)
    rows = tuple(_outside(plan))
    return Subject(kind, slots_N, rows, first, asked_T=_asked(part.state, rows, plan.block_end))


def _asked(state: RequestState, rows: Sequence[Interval], block_end: int) -> Tensor:
    """Indices among the probed tokens of the question's last tokens; of the last token where there is none."""
    question = state.options.question or Interval(block_end, rows[-1].end)
    positions = torch.cat([torch.arange(r.start, r.end) for r in rows])
    asked = torch.nonzero((positions >= question.start) & (positions < question.end)).flatten()
    return asked[-MAX_QUESTION_TOKENS:] if asked.numel() else torch.tensor([positions.numel() - 1])


def everything_copied(plan: BlockPlan) -> BlockPlan:
    """`plan` before anything is repaired: what it starts from, and what a probe reads."""
    copies = tuple(
        Copy(part, i)
        for i, segment in enumerate(plan.segments)
        if len(part := segment.interval.clip(plan.start, plan.end - 1))
    )
    runs = subtract(Interval(plan.start, plan.end), [c.interval for c in copies])
    return BlockPlan(plan.start, plan.end, plan.segments, copies, tuple(runs), 0, plan.block_end)


def everything_computed(plan: BlockPlan) -> BlockPlan:
    """`plan` with nothing reused behind the exact prefix: a full prefill."""
    num_local = sum(len(s.interval) for s in plan.segments)
    whole = (Interval(plan.start, plan.end),)
    return BlockPlan(plan.start, plan.end, plan.segments, (), whole, num_local, plan.block_end)
