"""Chooses what to repair of loaded requests by what probes measure, and lets the guard judge it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..config import BlocksConfig
from ..metrics import Metrics
from ..types import BlockOptions, BlockPlan, Copy, Fold, Interval, RequestState
from . import guard
from .intervals import subtract
from .manager import BlockManager
from .plan import build_plan
from .policy import POLICIES, Evidence
from .probe import MAX_QUESTION_TOKENS, Kind, Probe, Subject
from .rows import fold_batch

# A probe computes what no cache had, and the question, a second time; more than this is not worth a better choice.
MAX_PROBE_TOKENS = 512

# Runs a folded batch whose answers nobody reads: with a probe until it leaves, without one for the KV it writes.
RunForward = Callable[[Any, Fold, Probe | None], None]


@dataclass(frozen=True, slots=True)
class Part:
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


class Measures:
    """num_layers, shared_layers, reduce: of the model and over its tensor-parallel ranks, see `Probe`."""

    def __init__(
        self,
        blocks: BlockManager,
        metrics: Metrics,
        *,
        num_layers: int,
        shared_layers: Sequence[int],
        reduce: Callable[[Tensor], Tensor],
    ) -> None:
        self._blocks = blocks
        self._metrics = metrics
        self._num_layers = num_layers
        self._shared_layers = frozenset(shared_layers)
        self._reduce = reduce

    def wanted(self, part: Part) -> bool:
        """Whether the request is to be measured, and can be: its whole prompt lies in this step."""
        plan = plan_to_run(part)
        whole = part.low == plan.start and part.high == plan.end
        return whole and asks_for_probe(plan, part.state.options, self._blocks.config)

    def choose(self, batch: Any, parts: Sequence[Part], run: RunForward) -> None:
        """Replace the plans of the given requests, whose segments are loaded, by what the probes say."""
        measured: list[tuple[Part, Kind]] = []
        for part in parts:
            needs = POLICIES[part.state.options.policy].needs
            if needs != "layout":
                measured.append((part, needs))
        evidence = self._probe(batch, measured, run)
        for part in parts:
            self._adopt(part, evidence.get(part.index, Evidence()), part.state.options)
        self._guard(batch, [p for p in parts if self._is_guarded(p)], evidence, run)

    def _is_guarded(self, part: Part) -> bool:
        return _is_guarded(part.state.options, self._blocks.config)

    def _guard(
        self, batch: Any, parts: Sequence[Part], evidence: dict[int, Evidence], run: RunForward
    ) -> None:
        """Raise the budget, or compute everything, where a repair is worse than at calibration."""
        compared: list[tuple[Part, Kind]] = [
            (p, "guard") for p in parts if not guard.measures_leftover(p.state.options.policy)
        ]
        found = self._probe(batch, compared, run)
        for part in parts:
            plan, options = plan_to_run(part), part.state.options
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

    def _adopt(self, part: Part, evidence: Evidence, options: BlockOptions) -> None:
        plan = plan_to_run(part)
        chosen = build_plan(
            plan.segments,
            start=plan.start,
            end=plan.end,
            options=options,
            evidence=evidence,
        )
        self._blocks.replan(part.req, chosen, policy=options.policy)

    def _probe(
        self, batch: Any, measured: Sequence[tuple[Part, Kind]], run: RunForward
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
        probe = Probe(subjects, self._num_layers, self._reduce, self._shared_layers)
        run(*fold_batch(batch, runs, unread=True), probe)
        return {part.index: found for (part, _), found in zip(measured, probe.evidence(), strict=True)}


def asks_for_probe(plan: BlockPlan, options: BlockOptions, config: BlocksConfig) -> bool:
    """Whether something is to be measured of the request before it is computed, and is worth it."""
    wanted = POLICIES[options.policy].needs != "layout" or _is_guarded(options, config)
    if not wanted or all(segment.is_path for segment in plan.segments):
        return False
    return sum(len(r) for r in _outside(plan)) <= MAX_PROBE_TOKENS


def _is_guarded(options: BlockOptions, config: BlocksConfig) -> bool:
    """A bound says something about the policy that it was calibrated with, and about no other."""
    return config.guard is not None and options.policy == config.policy


def plan_to_run(part: Part) -> BlockPlan:
    assert part.state.plan is not None
    return part.state.plan


def _outside(plan: BlockPlan) -> list[Interval]:
    """What is computed whatever the policy says: all positions outside of the segments, and the last."""
    rows = subtract(Interval(plan.start, plan.end), [s.interval for s in plan.segments])
    if not rows or rows[-1].end < plan.end:
        rows.append(Interval(plan.end - 1, plan.end))
    return rows


def _subject(part: Part, kind: Kind, first: int) -> Subject:
    plan = plan_to_run(part)
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
