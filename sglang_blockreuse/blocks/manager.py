"""The life of a request's blocks: accepted, held, planned, loaded, released. One manager per scheduler."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch

from ..config import Config
from ..metrics import Metrics
from ..types import BlockOptions, BlockPlan, Fold, Interval, RequestState, Usage
from .compile import Compiler, HomeJob
from .load import KvLoader
from .match import Hit, Namespace, Tree, find
from .plan import build_plan
from .request import parse_options
from .rows import fold_batch
from .split import Home, compile_prefix, homes
from .tags import SlotTags

logger = logging.getLogger(__name__)

# Share of the KV pool that one request and its unseen homes may fill together; beyond it the
# homes would push out what they are compiled for.
MAX_COMPILE_SHARE = 0.8
# Reasons that hold for one admission only; a retracted request is looked up again.
ADMISSION_VERDICTS = (
    "not_cached",
    "exact_prefix",
    "all_repaired",
    "input_logprobs",
    "blocks_too_short",
    "pool_too_small",
    "compile_off",
    "queue_full",
)


class BlockManager:
    """Host objects come in as arguments; the manager keeps no request but the state it hangs on them.

    `loader` is None where block reuse is switched off for this server; `off_reason` then says why.
    """

    def __init__(
        self,
        *,
        config: Config,
        tree: Tree,
        loader: KvLoader | None,
        bos: int | None,
        pool_size: int,
        metrics: Metrics,
        tags: SlotTags | None = None,
        off_reason: str | None = None,
    ) -> None:
        self.config = config.blocks
        self.metrics = metrics
        self.compiler = Compiler()
        self.tags = tags  # kept only where alpha or beta is not 0
        self.row_modes: Any = None  # layers.row_modes.RowModes, where the attention backend keeps one
        self._tree = tree
        self._loader = loader
        self._bos = bos
        self._pool_size = pool_size
        self._off_reason = off_reason

    # -- arrival ---------------------------------------------------------------------------

    def accept(self, req: Any) -> list[HomeJob]:
        """Read the request's marks and decide which homes come first.

        Hangs a RequestState on the request. Raises RequestError on malformed marks.
        """
        options = parse_options(
            req.sampling_params.custom_params, prompt_len=len(req.origin_input_ids), config=self.config
        )
        state = RequestState(options, Usage(mode=options.mode, policy=options.policy))
        req.blockreuse = state
        state.usage.skipped_reason = self._skip_reason(req, options)
        if not state.may_reuse():
            return []
        if all(len(span) < self.config.min_block_tokens for span in options.spans):
            state.not_compiled = "blocks_too_short"
        state.compile_prefix = compile_prefix(
            req.origin_input_ids, options.spans[0].start, config=self.config, bos=self._bos
        )
        if self.config.compile == "off":
            state.not_compiled = "compile_off"
            return []
        wanted = self._homes(req, state)
        num_tokens = len(req.origin_input_ids) + sum(len(h.span) for h in wanted)
        if num_tokens > MAX_COMPILE_SHARE * self._pool_size:
            state.not_compiled = "pool_too_small"
            return []
        jobs, state.waits_for = self.compiler.jobs_for(self._tree, wanted, _namespace(req))
        return jobs

    def _skip_reason(self, req: Any, options: BlockOptions) -> str | None:
        if options.mode != "reuse":
            return f"mode_{options.mode}"
        if self._off_reason is not None:
            return self._off_reason
        if not options.spans:
            return "no_blocks"
        if options.spans[-1].end > len(req.origin_input_ids):
            return "prompt_replaced"
        unsupported = {
            "input_embeds": req.input_embeds is not None or req.positional_embed_overrides is not None,
            "multimodal": req.multimodal_inputs is not None,
            "session": req.session is not None,
            "lora": req.lora_id is not None,
            "hidden_states": bool(req.return_hidden_states),
            "routed_experts": bool(getattr(req, "return_routed_experts", False)),
            "beam_search": req.beam_group is not None,
        }
        return next((reason for reason, applies in unsupported.items() if applies), None)

    def ready(self, req: Any) -> bool:
        """Whether everything the request waits for has ended."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None or not state.waits_for:
            return True
        state.waits_for = self.compiler.in_flight(state.waits_for)
        return not state.waits_for

    # -- admission -------------------------------------------------------------------------

    def plan_or_compute(self, req: Any) -> None:
        """`plan`, and an error of ours costs the request its reuse, never the server its life."""
        try:
            self.plan(req)
        except Exception:
            logger.exception("blockreuse: request %s is served without block reuse", req.rid)
            self.metrics.add("errors_total")
            self.give_up(req, "internal_error")

    def plan(self, req: Any) -> None:
        """Look the blocks up behind the request's exact prefix, lock their homes and plan the prefill."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None:
            return
        self.release(req)
        state.first_local = None
        if state.usage.skipped_reason in ADMISSION_VERDICTS:
            state.usage.skipped_reason = None
        start, end = req.prefix_len, len(req.full_untruncated_fill_ids)
        if state.may_reuse():
            hits = find(
                self._tree,
                self._homes(req, state),
                start=start,
                end=min(end, _logprob_limit(req)),
                namespace=_namespace(req),
            )
            self._adopt(state, hits, start=start, end=end)
        self._account(req, state)

    def _adopt(self, state: RequestState, hits: Sequence[Hit], *, start: int, end: int) -> None:
        plan = build_plan([h.segment for h in hits], start=start, end=end, options=state.options)
        state.locks = [h.lock for h in hits]
        if plan.copies:
            state.plan, state.home_slots, state.first_local = plan, [h.slots for h in hits], plan.first_local
        else:
            self._unlock(state)
            state.usage.skipped_reason = "all_repaired" if hits else None

    def _account(self, req: Any, state: RequestState) -> None:
        usage, plan = state.usage, state.plan
        prompt_len = len(req.origin_input_ids)
        usage.prefix_tokens = min(req.prefix_len, prompt_len)
        usage.reused_tokens = plan.num_reused if plan else 0
        usage.repaired_tokens = min(plan.num_repaired, prompt_len - usage.prefix_tokens) if plan else 0
        usage.fresh_tokens = prompt_len - usage.prefix_tokens - usage.reused_tokens - usage.repaired_tokens
        usage.recompute_ratio = round(plan.num_repaired / plan.block_end, 6) if plan else 0.0
        if state.may_reuse() and plan is None:
            usage.skipped_reason = self._verdict(req, state)

    def _verdict(self, req: Any, state: RequestState) -> str:
        """Why an admission that was allowed to reuse did not."""
        # the last token of a prompt is never a prefix hit
        last = min(state.options.spans[-1].end, len(req.origin_input_ids) - 1)
        if last <= req.prefix_len:
            return "exact_prefix"
        if _logprob_limit(req) <= state.options.spans[-1].start:
            return "input_logprobs"
        return state.not_compiled or "not_cached"

    def give_up(self, req: Any, reason: str) -> None:
        """Serve the request without reuse."""
        self.release(req)
        req.blockreuse.first_local = None
        req.blockreuse.usage.skipped_reason = reason
        self._account(req, req.blockreuse)

    def release(self, req: Any) -> None:
        """Forget the plan and let the homes go. Safe to call at any time, any number of times."""
        state: RequestState | None = getattr(req, "blockreuse", None)
        if state is None:
            return
        self._unlock(state)
        state.plan, state.home_slots = None, []

    def _unlock(self, state: RequestState) -> None:
        locks, state.locks = state.locks, []
        for lock in locks:
            self._tree.unlock(lock)

    # -- forward ---------------------------------------------------------------------------

    def fold_or_compute(self, batch: Any, req_to_token: torch.Tensor) -> tuple[Any, Fold | None]:
        """`prepare_forward`, or the batch as it is: every position has a slot, so all of it can be computed."""
        try:
            return self.prepare_forward(batch, req_to_token)
        except Exception:
            logger.exception("blockreuse: a prefill step computes everything")
            self.metrics.add("errors_total")
            for req in batch.reqs:
                if plan_of(req) is not None:
                    # first_local stays: an earlier chunk of the request may have copied
                    self.release(req)
                    req.blockreuse.usage.skipped_reason = "internal_error"
                    self._account(req, req.blockreuse)
            return batch, None

    def prepare_forward(self, batch: Any, req_to_token: torch.Tensor) -> tuple[Any, Fold | None]:
        """Load what the batch reuses and fold its requests into rows.

        batch: the host's ScheduleBatch of a prefill or mixed step, left as it is.
        req_to_token: int32 [request slots, positions], the host's page table.
        Returns the batch to run and, where it was folded, how to undo it.
        """
        decoding = {id(r) for r in batch.decoding_reqs or ()}
        runs_per_request: list[list[Interval]] = []
        num_copied = 0
        if self.tags is not None:
            self.tags.written(batch.out_cache_loc)
        for req, low, extend in zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True):
            plan = plan_of(req)
            if plan is None or id(req) in decoding:
                runs_per_request.append([Interval(low, low + extend)])
                continue
            runs_per_request.append(plan.runs_within(low, low + extend))
            num_copied += self._load(req.blockreuse, req_to_token[req.kv.req_pool_idx], low, low + extend)
        if all(
            len(runs) == 1 and len(runs[0]) == extend
            for runs, extend in zip(runs_per_request, batch.extend_lens, strict=True)
        ):
            return batch, None
        folded, fold = fold_batch(batch, runs_per_request)
        self.metrics.forward(num_rows=fold.num_rows, num_copied=num_copied)
        logger.info(
            "blockreuse: %d requests in %d rows, %d tokens computed, %d copied, %d in exact prefixes",
            len(batch.reqs),
            fold.num_rows,
            sum(fold.tokens),
            num_copied,
            sum(batch.prefix_lens),
        )
        return folded, fold

    def _load(self, state: RequestState, row_slots: torch.Tensor, low: int, high: int) -> int:
        assert self._loader is not None
        assert state.plan is not None
        if self.tags is not None:
            self.tags.loaded(state.plan, row_slots, low, high)
        started = time.perf_counter()
        num_copied = self._loader.load(state, row_slots, low, high)
        self.metrics.add("copy_seconds_total", time.perf_counter() - started)
        return num_copied

    def _homes(self, req: Any, state: RequestState) -> list[Home]:
        return homes(
            req.origin_input_ids,
            state.options.spans,
            prefix=state.compile_prefix,
            min_block_tokens=self.config.min_block_tokens,
        )


def plan_of(req: Any) -> BlockPlan | None:
    state: RequestState | None = getattr(req, "blockreuse", None)
    return None if state is None else state.plan


def _namespace(req: Any) -> Namespace:
    return Namespace(req.extra_key, req.cache_salt)


def _logprob_limit(req: Any) -> int:
    """Positions from here on must be computed, because the client wants their log-probabilities."""
    if req.return_logprob and req.logprob_start_len >= 0:
        return int(req.logprob_start_len)
    return len(req.origin_input_ids)
