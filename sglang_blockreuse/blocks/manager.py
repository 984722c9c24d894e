"""The life of a request's blocks: accepted, held, planned, loaded, released. One manager per scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

from ..config import Config
from ..errors import short
from ..metrics import Metrics
from ..types import PATH, BlockOptions, BlockPlan, Interval, LocalSegment, RequestState, Wait
from .arrive import Arrivals, logprob_limit, namespace_of, reads_positions
from .compile import Compiler, HomeJob, Outcome
from .explain import explain
from .faults import is_device_error
from .match import Hit, Namespace, Tree, find
from .paths import fingerprint, path_namespace
from .plan import build_plan
from .policy import POLICIES
from .probe import MAX_QUESTION_TOKENS
from .shared_kv import SharedKv
from .split import Home
from .tiers import num_on_host
from .worth import layout_policy, refusal, why_nothing

logger = logging.getLogger(__name__)


class BlockManager:
    """Host objects come in as arguments; the manager keeps no request but the state it hangs on them.

    off_reason: why block reuse is switched off for this server, or None.
    layer_plan: fingerprint of the plan that decode runs under, or None where decode is dense.
    shared_kv: how a layer plan shares main KV between layers, so that no KV of this server is a stock server's.
    home_token: makes the ids of homes unguessable; the same on every tensor-parallel rank.
    index_secret: hexadecimal, keys the index of exact prompts; the same on every rank, and in no id or log.
    """

    def __init__(
        self,
        *,
        config: Config,
        tree: Tree,
        bos: int | None,
        pool_size: int,
        metrics: Metrics,
        layer_plan: str | None = None,
        shared_kv: SharedKv | None = None,
        off_reason: str | None = None,
        neutral_prefix: tuple[int, ...] | None = None,
        company_text: tuple[int, ...] | None = None,
        home_token: str | None = None,
        index_secret: str | None = None,
    ) -> None:
        self.config = config.blocks
        self.metrics = metrics
        self.compiler = Compiler(home_token)
        self._tree = tree
        self.arrivals = Arrivals(
            config=self.config,
            tree=tree,
            compiler=self.compiler,
            metrics=metrics,
            bos=bos,
            pool_size=pool_size,
            off_reason=off_reason,
            neutral_prefix=neutral_prefix,
            company_text=company_text,
            shared_kv=shared_kv,
            index_secret=index_secret,
        )
        # requests that lost homes while they waited: these are asked for once more, see `scheduler.ask_again`
        self.bereaved: dict[str, Any] = {}  # by request id
        self._layer_plan = layer_plan
        self._shared_kv = shared_kv

    # -- arrival ---------------------------------------------------------------------------

    def accept(self, req: Any, *, max_prompt_len: int, was_cut: bool = False) -> list[HomeJob]:
        """Read the request's marks and decide which homes come first, see arrive.py. Raises RequestError."""
        return self.arrivals.accept(req, max_prompt_len=max_prompt_len, was_cut=was_cut)

    def enter_namespace(self, req: Any) -> None:
        """Where layers share KV, whatever a request computes is found by requests of the same plan only."""
        if self._shared_kv is not None:
            req.extra_key = self._shared_kv.extra_key(req.extra_key)

    def ready(self, req: Any) -> bool:
        """Whether everything the request waits for has ended. Constant time: every waiting request is asked in
        every step."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None or not (state.wait.homes or state.wait.num_open):
            return True
        wait = state.wait
        if wait.num_open:
            wait.since = wait.since or time.monotonic()
            return False
        if any(outcome == "aborted" for _, outcome in wait.lost) and not wait.asked_again:
            self.bereaved[req.rid] = req
            return False
        if wait.lost:
            only_room = all(outcome == "no_room" for _, outcome in wait.lost)
            self.arrivals.not_compiled(state, "no_room" if only_room else "home_lost")
        if wait.since is not None:
            self.metrics.add("home_wait_seconds_total", time.monotonic() - wait.since)
        state.wait = Wait()
        return True

    # -- admission -------------------------------------------------------------------------

    def plan_or_compute(self, req: Any, *, start: int | None = None) -> None:
        """`plan`, and an error of ours costs the request its reuse, never the server its life."""
        try:
            self.plan(req, start=start)
        except Exception as error:
            if is_device_error(error):
                raise
            logger.exception("blockreuse: request %s is served without block reuse", short(req.rid))
            self.metrics.add("errors_total")
            if getattr(req, "blockreuse", None) is not None:
                self.give_up(req, "internal_error")

    def plan(self, req: Any, *, start: int | None = None) -> None:
        """Look the blocks up behind the request's exact prefix, lock their homes and plan the prefill.

        start: length of that prefix; None: on the device and in host memory, whose part the host brings back when
        it admits the request.
        """
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None:
            return
        self.release(req)
        state.first_local, state.took_path = None, False
        start = req.prefix_len + req.host_hit_length if start is None else start
        end, state.exact_len = len(req.full_untruncated_fill_ids), start
        if state.may_reuse() or self._may_take_path(req, state):
            limit = min(end, logprob_limit(req))
            hits = self._find_path(req, state, start, limit)
            covered = hits[-1].segment.interval.end if hits else start
            homes: list[Home] = state.homes if state.may_reuse() else []
            wanted = [home for home in homes if home.span.end > covered]
            found = find(self._tree, wanted, start=covered, end=limit, namespace=namespace_of(req))
            state.found_blocks = tuple(_how_much(home, found) for home in wanted)
            hits += found
            not_adopted = self._adopt(state, hits, start=start, end=end)
            if state.may_reuse():
                state.usage.skipped_reason = None if state.plan else self._verdict(req, state, not_adopted)
        self._account(req, state)

    def _may_take_path(self, req: Any, state: RequestState) -> bool:
        """Under a sparse layer plan an unmarked request has a path too: the answers of earlier turns."""
        unmarked = state.options.mode == "reuse" and state.refused == "no_blocks"
        return unmarked and self._layer_plan is not None and reads_positions(req) is None

    def _find_path(self, req: Any, state: RequestState, start: int, end: int) -> list[Hit]:
        """The local path behind the exact prefix [0, start), locked: what an earlier turn left, if it did.

        Two questions about the same documents deserve repairs of their own: a policy that listens to the
        question takes a path over only where it holds an earlier question too.
        """
        tokens = req.full_untruncated_fill_ids
        namespace = path_namespace(tokens[:start], namespace_of(req), self._fingerprint(state.options))
        length, where = self._tree.lookup(tokens[start:end], namespace)
        asks = POLICIES[state.options.policy].needs == "question" and state.options.spans
        block_end = state.options.spans[-1].end if state.options.spans else start
        if length < 1 or (asks and start + length < block_end + MAX_QUESTION_TOKENS):
            return []
        held = Interval(start, start + length)
        lock = self._tree.hold(where)
        return [Hit(LocalSegment(held, 0, PATH, start), self._tree.slots(where).part(0, length), lock)]

    def _adopt(self, state: RequestState, hits: Sequence[Hit], *, start: int, end: int) -> str | None:
        """Plan with what was found; returns why the plan is not adopted, None where it is or nothing was found."""
        policy = state.options.policy
        if any(not h.segment.is_path for h in hits):
            policy = layout_policy(state.options)  # until a probe has measured what another needs
        plan = build_plan(
            [h.segment for h in hits], start=start, end=end, options=state.options, policy=policy
        )
        state.locks = [h.lock for h in hits]
        state.usage.guard = None
        reason = refusal(plan)
        if reason is None:
            state.plan, state.first_local = plan, plan.first_local
            state.home_slots = [h.slots.device_T for h in hits]
            state.host_slots = [h.slots.host_T for h in hits]
            state.took_path = any(h.segment.is_path for h in hits)
            state.usage.policy = policy
            return None
        self._unlock(state)
        return reason if hits else None

    def replan(self, req: Any, plan: BlockPlan, *, policy: str | None = None) -> None:
        """Another choice of what to repair, before anything of the plan was computed."""
        state: RequestState = req.blockreuse
        state.plan = plan
        state.first_local = plan.first_local if plan.copies else None
        if policy is not None:
            state.usage.policy = policy
        self._account(req, state)

    def abandon(self, req: Any) -> None:
        """The rest of the prompt is computed; first_local stays, because an earlier chunk may have copied."""
        if plan_of(req) is not None:
            self.release(req)
            req.blockreuse.refused = req.blockreuse.usage.skipped_reason = "internal_error"
            self._account(req, req.blockreuse)

    def _account(self, req: Any, state: RequestState) -> None:
        usage, plan = state.usage, state.plan
        prompt_len = len(req.origin_input_ids)
        usage.prefix_tokens = min(state.exact_len, prompt_len)
        usage.reused_tokens = plan.num_reused if plan else 0
        usage.host_tokens = num_on_host(state)
        usage.repaired_tokens = min(plan.num_repaired, prompt_len - usage.prefix_tokens) if plan else 0
        usage.fresh_tokens = prompt_len - usage.prefix_tokens - usage.reused_tokens - usage.repaired_tokens
        usage.recompute_ratio = round(plan.num_repaired / plan.block_end, 6) if plan else 0.0
        if state.options.explain:
            usage.pieces = explain(
                plan, state.options.spans, prefix_len=usage.prefix_tokens, prompt_len=prompt_len
            )

    def _verdict(self, req: Any, state: RequestState, not_adopted: str | None) -> str:
        """Why an admission that was allowed to reuse did not."""
        return why_nothing(
            state.options.spans,
            state.homes,
            prefix_len=state.exact_len,
            prompt_len=len(req.origin_input_ids),
            limit=logprob_limit(req),
            refused=not_adopted,
            not_compiled=state.not_compiled,
            min_block_tokens=self.config.min_block_tokens,
        )

    def give_up(self, req: Any, reason: str) -> None:
        """Serve the request without reuse."""
        self.release(req)
        req.blockreuse.first_local = None
        req.blockreuse.refused = req.blockreuse.usage.skipped_reason = reason
        self._account(req, req.blockreuse)

    def release(self, req: Any) -> None:
        """Forget the plan and let the homes go. Safe to call at any time, any number of times."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None:
            return
        self._unlock(state)
        state.plan, state.home_slots, state.host_slots = None, [], []

    # -- the end -----------------------------------------------------------------------------

    def ended(self, req: Any, outcome: Outcome) -> None:
        """A request that ran is gone; how, where nobody of ours ended it."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        num_fetched = int(getattr(req, "cached_tokens_storage", 0))
        self.compiler.ended(req.rid, (state and state.outcome) or outcome, num_fetched=num_fetched)

    def path_of(self, req: Any) -> tuple[int, Namespace] | None:
        """Where the request's local path begins and the namespace to publish it in; None where it has none."""
        start, state = self.local_from(req), getattr(req, "blockreuse", None)
        if start is None or state is None or state.usage.skipped_reason == "internal_error":
            return None
        before = req.full_untruncated_fill_ids[:start]
        return start, path_namespace(before, namespace_of(req), self._fingerprint(req.blockreuse.options))

    def local_from(self, req: Any) -> int | None:
        """First position of the row whose KV a full prefill and dense decode would not give; None: there is none.

        What sparse decode writes depends on what it did not read, so it is local from the answer on, also where the
        request's marks could not be read: only mode `exact` decodes dense.
        """
        state: RequestState | None = getattr(req, "blockreuse", None)
        first_local = None if state is None else state.first_local
        if self._layer_plan is None or (state is not None and state.options.mode == "exact"):
            return first_local
        answer = len(req.origin_input_ids)
        return answer if first_local is None else min(answer, first_local)

    def homes_of(self, req: Any) -> list[tuple[Home, Namespace]]:
        """The homes of the request's blocks and where they live, for the tree's order of eviction."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None or not state.may_reuse():
            return []
        return [(home, namespace_of(req)) for home in state.homes]

    def _fingerprint(self, options: BlockOptions) -> str:
        return fingerprint(options, self.config, layer_plan=self._layer_plan)

    def _unlock(self, state: RequestState) -> None:
        locks, state.locks = state.locks, []
        for lock in locks:
            self._tree.let_go(lock)


def _how_much(home: Home, found: Sequence[Hit]) -> str:
    """Of the home's block: "whole", "part" or "none"."""
    end = next((hit.segment.interval.end for hit in found if hit.segment.block == home.block), None)
    return "none" if end is None else "whole" if end == home.span.end else "part"


def plan_of(req: Any) -> BlockPlan | None:
    state: RequestState | None = getattr(req, "blockreuse", None)
    return None if state is None else state.plan
