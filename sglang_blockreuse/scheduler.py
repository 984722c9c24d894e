"""The step scheduler: SGLang's prefill admission, charged by what a plan computes."""

from __future__ import annotations

import dataclasses
import functools
import logging
from array import array
from http import HTTPStatus
from typing import Any

from sglang.srt.managers.schedule_batch import Req
from sglang.srt.managers.schedule_policy import AddReqResult, PrefillAdder
from sglang.srt.managers.scheduler_components.output_streamer import SchedulerOutputStreamer
from sglang.srt.runtime_context import get_schedule, get_serving
from sglang.srt.sampling.sampling_params import SamplingParams

from .blocks.compile import HomeId, HomeJob, Outcome
from .blocks.manager import BlockManager, plan_of
from .blocks.measure import asks_for_probe
from .blocks.request import RequestError, check_extra_key, check_prompt
from .errors import short
from .radix_cache import BlockReuseCache
from .types import BlockPlan, RequestState, Usage, Wait

logger = logging.getLogger(__name__)

USAGE_KEY = "blockreuse"
MAX_PUT_OFF = 8  # steps that a request leaves to others because its prompt would be cut


class _BlockReuseAdder(PrefillAdder):
    """Shares the step's compute budget between requests by computed tokens, and holds who waits for homes.

    The KV budget is charged as the host does: every position of a request gets a slot.
    A held request keeps its place in whatever order the host has, and lends it to the first of its homes: so homes
    run no later than who waits for them, under every scheduling policy, and nobody is preempted for a request that
    would not run.
    """

    rem_chunk_tokens: int | None  # compute budget left in this step; None without chunked prefill

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        manager: BlockManager = self.tree_cache.blocks
        if is_home(req):
            if req in self.can_run_list:
                return self.budget_state()  # it runs in the place of a request that waits for it
            if self._is_over(req):
                if self.running_batch.batch_is_full:
                    return AddReqResult.CONTINUE  # ends when there is a place for its last token
                _end_home(req, self.tree_cache, "aborted", "nobody waits for a home any longer")
        if not manager.ready(req):
            home = self._stand_in(req)
            return AddReqResult.CONTINUE if home is None else self._admit(home, *args, **kwargs)
        manager.plan_or_compute(req)
        return self._admit(req, *args, **kwargs)

    def preempt_to_schedule(self, req: Req) -> bool:
        """True: the host goes on with `req`, whether or not it took somebody's place for it."""
        if self._is_over(req):
            return True
        if self.tree_cache.blocks.ready(req):
            return bool(super().preempt_to_schedule(req))
        home = self._stand_in(req)
        return home is None or bool(super().preempt_to_schedule(home))

    def _is_over(self, req: Req) -> bool:
        """Whether this is a queued home that nobody waits for any longer."""
        manager: BlockManager = self.tree_cache.blocks
        return is_home(req) and req.to_finish is None and manager.compiler.is_unwanted(req.rid)

    def _stand_in(self, req: Req) -> Req | None:
        """The first home that a held request waits for, if it is queued and may run in this step."""
        manager: BlockManager = self.tree_cache.blocks
        home: Req | None = manager.compiler.first_ahead(req.blockreuse.wait)
        if home is None or home.kv.holds_kv or home in self.can_run_list or not manager.ready(home):
            return None
        home.init_next_round_input(self.tree_cache)
        return home

    def _admit(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        manager: BlockManager = self.tree_cache.blocks
        verdict = super().add_one_req(req, *args, **kwargs)
        if self._admitted(req):
            return verdict
        held_homes = plan_of(req) is not None
        manager.release(req)
        if verdict is AddReqResult.NO_TOKEN and self._nothing_else_runs():
            # waiting would never end
            if is_home(req):
                _end_home(req, self.tree_cache, "no_room", "a home finds no room in the KV pool")
                verdict = super().add_one_req(req, *args, **kwargs)
            elif held_homes:  # its own homes take the room
                manager.give_up(req, "no_room")
                verdict = super().add_one_req(req, *args, **kwargs)
        return verdict

    def _admitted(self, req: Req) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _nothing_else_runs(self) -> bool:
        return not self.can_run_list and (self.running_batch is None or self.running_batch.is_empty())

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
        state, start = getattr(req, "blockreuse", None), req.prefix_len + kwargs["host_hit_length"]
        if state is not None and state.exact_len != start:
            # the host cannot bring its part of the exact prefix back and asks a second time
            self.tree_cache.blocks.plan_or_compute(req, start=start)
        plan = plan_of(req)
        if plan is None:
            return super()._select_prefill_admission(req, **kwargs)
        budget = self.rem_chunk_tokens
        if budget is not None:
            self.rem_chunk_tokens = plan.chunk_end(plan.start, max(budget, 1)) - plan.start
        try:
            admission = super()._select_prefill_admission(req, **kwargs)
        finally:
            self.rem_chunk_tokens = budget
        if isinstance(admission, AddReqResult):
            return admission
        if admission.is_chunked and self._is_put_off(req, plan):
            return AddReqResult.OTHER
        end = admission.prefix_len + admission.extend_len
        num_copied = admission.extend_len - plan.num_computed(admission.prefix_len, end)
        # the host's word for tokens that a step runs besides the extend; ours are the ones it does not run
        return dataclasses.replace(admission, replay_len=-num_copied)

    def _is_put_off(self, req: Req, plan: BlockPlan) -> bool:
        """Whether a request that is to be measured waits for a step that has room for all it computes.

        A probe needs the whole prompt in one step. Cut by what others left of a step, the request would be repaired
        by another policy than it asked for, and its answer would depend on them. It is first in the next step, but
        for the rest of a chunked prompt; a policy that always puts others in front has its way in the end.
        """
        chunk, state = get_schedule().chunked_prefill_size, req.blockreuse
        if not self.can_run_list or state.num_put_off == MAX_PUT_OFF:
            return False
        if plan.num_computed(plan.start, plan.end) > chunk:
            return False
        if not asks_for_probe(plan, state.options, self.tree_cache.blocks.config):
            return False
        state.num_put_off += 1
        return True

    def add_chunked_req(self, req: Req) -> Req | None:
        plan = plan_of(req)
        budget = self.rem_chunk_tokens
        if plan is None or budget is None:
            return super().add_chunked_req(req)
        low = req.prefix_len
        self.rem_chunk_tokens = plan.chunk_end(low, max(budget, 1)) - low
        rest = super().add_chunked_req(req)
        if not self._admitted(req):
            self.rem_chunk_tokens = budget
            return rest
        num_computed = plan.num_computed(low, req.extend_end)
        num_copied = req.extend_end - low - num_computed
        self.rem_chunk_tokens = budget - num_computed
        self.rem_input_tokens += num_copied
        self.log_replay_tokens -= num_copied
        return rest


class _BlockReuseStreamer(SchedulerOutputStreamer):
    """Adds `meta_info["blockreuse"]` to finished requests and keeps home requests to ourselves."""

    __slots__ = ()
    has_additional_customized_info = True

    def stream_output(self, reqs: list[Req], return_logprob: bool, skip_req: Req | None = None) -> None:
        visible = [r for r in reqs if not is_home(r)]
        if visible or not reqs:
            super().stream_output(visible, return_logprob, skip_req)

    def build_additional_customized_info(self, reqs: list[Req]) -> dict[str, list[Any]]:
        return {USAGE_KEY: [_usage(r, self.tree_cache.blocks) for r in reqs]}

    def is_request_level_customized_info_key(self, key: str) -> bool:
        return key == USAGE_KEY or super().is_request_level_customized_info_key(key)


@functools.cache
def adder_class(base: type[PrefillAdder]) -> type[PrefillAdder]:
    """Our admission on top of whatever class the host uses."""
    if base is PrefillAdder:
        return _BlockReuseAdder
    return type("BlockReuseAdder", (_BlockReuseAdder, base), {})


@functools.cache
def streamer_class(base: type[SchedulerOutputStreamer]) -> type[SchedulerOutputStreamer]:
    if base is SchedulerOutputStreamer:
        return _BlockReuseStreamer
    return type("BlockReuseStreamer", (_BlockReuseStreamer, base), {})


def is_home(req: Any) -> bool:
    return isinstance(req.rid, HomeId)


def accept_request(scheduler: Any, req: Req) -> list[Req]:
    """Read an arriving request's marks; returns the home requests to queue before it.

    A malformed mark ends the request with HTTP 400. An error of ours costs the request
    its reuse, never the server its life: an exception here would end the scheduler.
    """
    cache: BlockReuseCache = scheduler.tree_cache
    manager = cache.blocks
    try:
        check_extra_key(req.extra_key)
        manager.enter_namespace(req)
        if req.multimodal_inputs is None and req.input_embeds is None:
            check_prompt(
                req.origin_input_ids,
                vocab_size=scheduler.model_config.vocab_size,
                logprob_start_len=req.logprob_start_len,
            )
        jobs = manager.accept(
            req, max_prompt_len=scheduler.max_req_input_len - 1, was_cut=_was_cut(scheduler, req)
        )
        if req.blockreuse.options.mode == "compile":
            _answer_only(req)
        homes = _queue_homes(scheduler, req, jobs)
        _lend_priority(scheduler, req)
        return homes
    except RequestError as error:
        req.set_finish_with_abort(f"blockreuse: {error}", HTTPStatus.BAD_REQUEST, "BadRequestError")
    except Exception:
        logger.exception("blockreuse: request %s is served without block reuse", short(req.rid))
        manager.metrics.add("errors_total")
        if getattr(req, "blockreuse", None) is not None:
            manager.give_up(req, "internal_error")
    manager.compiler.drop_unqueued()
    return []


def ask_again(scheduler: Any) -> list[Req]:
    """Homes to queue in place of those that waiting requests have lost, before a step is made up."""
    manager: BlockManager = scheduler.tree_cache.blocks
    bereaved, manager.bereaved = manager.bereaved, {}
    homes: list[Req] = []
    for req in bereaved.values():
        if req not in scheduler.waiting_queue:
            continue  # aborted since
        try:
            homes += _queue_homes(scheduler, req, manager.arrivals.ask_again(req), num_more=len(homes))
            _lend_priority(scheduler, req)
        except Exception:
            logger.exception("blockreuse: request %s is served without block reuse", short(req.rid))
            manager.metrics.add("errors_total")
            manager.compiler.drop_unqueued()
            manager.give_up(req, "internal_error")
    return homes


def _was_cut(scheduler: Any, req: Req) -> bool:
    """Whether the host cut the prompt: with --allow-auto-truncate, to exactly the first length that it refuses."""
    return bool(get_serving().allow_auto_truncate) and len(req.origin_input_ids) >= int(
        scheduler.max_req_input_len
    )


def _answer_only(req: Req) -> None:
    """What is left of a compile request once its homes are queued: one token, behind what they compute anyway."""
    # never empty: the model needs one token to answer behind
    prefix = req.blockreuse.compile_prefix or req.origin_input_ids[:1]
    req.origin_input_ids = req.origin_input_ids_unpadded = array("q", prefix)
    req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens = 1, 0


def _queue_homes(scheduler: Any, req: Req, jobs: list[HomeJob], *, num_more: int = 0) -> list[Req]:
    """The requests that are to be queued for `jobs`; none where the queue has no room for all of them."""
    manager: BlockManager = scheduler.tree_cache.blocks
    limit = scheduler.max_queued_requests
    if jobs and limit is not None and len(scheduler.waiting_queue) + num_more + len(jobs) + 1 > limit:
        manager.arrivals.compile_nothing(req, "queue_full")
        return []
    return [_home_request(scheduler, req, job) for job in jobs]


def _home_request(scheduler: Any, req: Req, job: HomeJob) -> Req:
    """An ordinary prefill-only request for `compile prefix + block`, in the main request's namespace."""
    manager: BlockManager = scheduler.tree_cache.blocks
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    home = Req(
        job.request_id,
        "",
        job.home.tokens,
        params,
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
        priority=req.priority,
        routing_key=req.routing_key,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )
    home.tokenizer = scheduler.tokenizer
    options = dataclasses.replace(req.blockreuse.options, mode="off", spans=())
    # it may be prefilled without what it waits for, so nothing is asked for again in its name
    home.blockreuse = RequestState(
        options, Usage(mode="off"), refused="mode_off", wait=Wait(asked_again=True, wants=False)
    )
    manager.compiler.wait(home.blockreuse.wait, job.waits_for)
    manager.compiler.queued(job.request_id, home)
    scheduler.init_req_max_new_tokens(home)
    manager.metrics.add("homes_total")
    manager.metrics.add("home_tokens_total", len(home.origin_input_ids))
    return home


def _lend_priority(scheduler: Any, req: Req) -> None:
    """Homes take the best priority of all who wait for them, whoever brought them."""
    if not scheduler.enable_priority_scheduling or req.priority is None:
        return
    best = min if scheduler.schedule_low_priority_values_first else max
    for home in scheduler.tree_cache.blocks.compiler.requests_ahead(req.blockreuse.wait):
        home.priority = req.priority if home.priority is None else best(home.priority, req.priority)


def _end_home(home: Req, cache: BlockReuseCache, outcome: Outcome, why: str) -> None:
    """Leave one token of a queued home, which is how the host ends what it cannot serve."""
    home.blockreuse.outcome = outcome
    home.set_finish_with_abort(f"blockreuse: {why}")
    home.init_next_round_input(cache)


def _usage(req: Req, manager: BlockManager) -> list[dict[str, Any]]:
    """The host carries lists: one usage object when the request ends, nothing before."""
    state = getattr(req, "blockreuse", None)
    if state is None or not req.finished():
        return []
    manager.metrics.request_done(state.usage, state.found_blocks)
    return [state.usage.as_dict()]
