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
from sglang.srt.sampling.sampling_params import SamplingParams

from .blocks.compile import HOME_ID_PREFIX, HomeJob
from .blocks.manager import BlockManager, plan_of
from .blocks.request import RequestError, check_extra_key, check_prompt
from .radix_cache import BlockReuseCache
from .types import RequestState, Usage

logger = logging.getLogger(__name__)

USAGE_KEY = "blockreuse"


class _BlockReuseAdder(PrefillAdder):
    """Shares the step's compute budget between requests by computed tokens.

    The KV budget is charged as the host does: every position of a request gets a slot.
    """

    rem_chunk_tokens: int | None  # compute budget left in this step; None without chunked prefill

    def add_one_req(self, req: Req, *args: Any, **kwargs: Any) -> AddReqResult:
        manager: BlockManager = self.tree_cache.blocks
        if not manager.ready(req):
            return AddReqResult.CONTINUE  # stays queued, its homes are prefilled first
        manager.plan_or_compute(req)
        verdict = super().add_one_req(req, *args, **kwargs)
        if self._admitted(req):
            return verdict
        held_homes = plan_of(req) is not None
        manager.release(req)
        if held_homes and verdict is AddReqResult.NO_TOKEN and self._nothing_else_runs():
            # its own homes take the room: waiting would never end
            manager.give_up(req, "no_room")
            verdict = super().add_one_req(req, *args, **kwargs)
        return verdict

    def _admitted(self, req: Req) -> bool:
        return bool(self.can_run_list) and self.can_run_list[-1] is req

    def _nothing_else_runs(self) -> bool:
        return not self.can_run_list and (self.running_batch is None or self.running_batch.is_empty())

    def _select_prefill_admission(self, req: Req, **kwargs: Any) -> Any:
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
        end = admission.prefix_len + admission.extend_len
        num_copied = admission.extend_len - plan.num_computed(admission.prefix_len, end)
        # the host's word for tokens that a step runs besides the extend; ours are the ones it does not run
        return dataclasses.replace(admission, replay_len=-num_copied)

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


def is_home(req: Req) -> bool:
    return req.rid.startswith(HOME_ID_PREFIX) and getattr(req, "blockreuse_home", False)


def accept_request(scheduler: Any, req: Req) -> list[Req]:
    """Read an arriving request's marks; returns the home requests to queue before it.

    A malformed mark ends the request with HTTP 400. An error of ours costs the request
    its reuse, never the server its life: an exception here would end the scheduler.
    """
    cache: BlockReuseCache = scheduler.tree_cache
    manager = cache.blocks
    jobs: list[HomeJob] = []
    try:
        check_extra_key(req.extra_key)
        manager.enter_namespace(req)
        if req.multimodal_inputs is None and req.input_embeds is None:
            check_prompt(
                req.origin_input_ids,
                vocab_size=scheduler.model_config.vocab_size,
                logprob_start_len=req.logprob_start_len,
            )
        jobs = manager.accept(req)
        if req.blockreuse.options.mode == "compile":
            _answer_only(req)
        if _queue_has_room(scheduler, len(jobs)):
            return [_home_request(scheduler, req, job) for job in jobs]
        manager.arrivals.compile_nothing(req, "queue_full")
    except RequestError as error:
        req.set_finish_with_abort(f"blockreuse: {error}", HTTPStatus.BAD_REQUEST, "BadRequestError")
    except Exception:
        logger.exception("blockreuse: request %s is served without block reuse", req.rid)
        manager.metrics.add("errors_total")
        if getattr(req, "blockreuse", None) is not None:
            req.blockreuse.usage.skipped_reason = "internal_error"
    for job in jobs:
        manager.compiler.ended(job.request_id)  # nobody will run it
    return []


def _answer_only(req: Req) -> None:
    """What is left of a compile request once its homes are queued: one token, behind what they compute anyway.

    Raises RequestError for what such a request cannot answer.
    """
    if req.return_logprob:
        raise RequestError("blockreuse_mode is compile, which answers no log-probabilities. Leave them out.")
    # never empty: the model needs one token to answer behind
    prefix = req.blockreuse.compile_prefix or req.origin_input_ids[:1]
    req.origin_input_ids = req.origin_input_ids_unpadded = array("q", prefix)
    req.sampling_params.max_new_tokens, req.sampling_params.min_new_tokens = 1, 0


def _queue_has_room(scheduler: Any, num_homes: int) -> bool:
    limit = scheduler.max_queued_requests
    return limit is None or len(scheduler.waiting_queue) + num_homes + 1 <= limit


def _home_request(scheduler: Any, req: Req, job: HomeJob) -> Req:
    """An ordinary prefill-only request for `compile prefix + block`, in the main request's namespace."""
    params = SamplingParams(max_new_tokens=1, temperature=0.0, ignore_eos=True)
    params.normalize(None)
    home = Req(
        job.request_id,
        "",
        array("q", job.home.tokens),
        params,
        eos_token_ids=scheduler.model_config.hf_eos_token_id,
        vocab_size=scheduler.model_config.vocab_size,
        priority=req.priority,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
    )
    home.tokenizer = scheduler.tokenizer
    home.blockreuse_home = True
    options = dataclasses.replace(req.blockreuse.options, mode="off", spans=())
    home.blockreuse = RequestState(options, Usage(mode="off"), waits_for=set(job.waits_for))
    scheduler.init_req_max_new_tokens(home)
    metrics = scheduler.tree_cache.blocks.metrics
    metrics.add("homes_total")
    metrics.add("home_tokens_total", len(home.origin_input_ids))
    return home


def _usage(req: Req, manager: BlockManager) -> list[dict[str, Any]]:
    """The host carries lists: one usage object when the request ends, nothing before."""
    state = getattr(req, "blockreuse", None)
    if state is None or not req.finished():
        return []
    manager.metrics.request_done(state.usage, state.found_blocks)
    return [state.usage.as_dict()]
