"""A request arrives: its marks are read, and it is decided which homes it uses and which are prefilled for it."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import BlocksConfig
from ..metrics import Metrics
from ..types import BlockOptions, RequestState, Usage
from .compile import Compiler, HomeJob
from .discover import Discovery
from .match import Namespace, Tree
from .request import parse_options
from .split import Home, compile_prefix
from .split import homes as homes_of

logger = logging.getLogger(__name__)

# Share of the KV pool that one request and its unseen homes may fill together; beyond it the
# homes would push out what they are compiled for.
MAX_COMPILE_SHARE = 0.8


class Arrivals:
    """Decides by `blocks.compile` and `blocks.auto`; keeps no request but the state it hangs on them."""

    def __init__(
        self,
        *,
        config: BlocksConfig,
        tree: Tree,
        compiler: Compiler,
        metrics: Metrics,
        bos: int | None,
        pool_size: int,
        off_reason: str | None,
        neutral_prefix: tuple[int, ...] | None,
    ) -> None:
        self._config = config
        self._tree = tree
        self._compiler = compiler
        self._metrics = metrics
        self._bos = bos
        self._pool_size = pool_size
        self._off_reason = off_reason
        self._neutral_prefix = neutral_prefix  # tokens of blocks.compile_prefix_text
        searches = config.auto or config.compile == "harvest"
        self.discovery = Discovery(tree, min_block_tokens=config.min_block_tokens) if searches else None

    def accept(self, req: Any) -> list[HomeJob]:
        """Read the request's marks and decide which homes come first.

        Hangs a RequestState on the request. Raises RequestError on malformed marks.
        """
        options = parse_options(
            req.sampling_params.custom_params, prompt_len=len(req.origin_input_ids), config=self._config
        )
        state = RequestState(options, Usage(mode=options.mode, policy=options.policy))
        req.blockreuse = state
        state.usage.skipped_reason = self._skip_reason(req, options)
        if options.mode == "compile":
            return self._compile_only(req, state)
        self._discover(req, state)
        if not state.may_reuse() or state.found_homes is not None:
            return []
        if all(len(span) < self._config.min_block_tokens for span in options.spans):
            state.not_compiled = "blocks_too_short"
        state.compile_prefix = self._compile_prefix(req, options)
        if self._config.compile in ("off", "manual"):
            state.not_compiled = f"compile_{self._config.compile}"
            return []
        jobs = self._jobs(req, state, self.homes(req, state), num_own=len(req.origin_input_ids))
        if self._config.compile == "background":
            if state.waits_for:
                state.not_compiled, state.waits_for = "compile_background", set()
            return self._compiler.stay_behind(jobs, req.rid)
        return jobs

    def homes(self, req: Any, state: RequestState) -> list[Home]:
        """Where the KV of the request's blocks is to be found: what the index chose, or what compiling makes."""
        if state.found_homes is not None:
            found: list[Home] = state.found_homes
            return found
        return homes_of(
            req.origin_input_ids,
            state.options.spans,
            prefix=state.compile_prefix,
            min_block_tokens=self._config.min_block_tokens,
        )

    def compile_nothing(self, req: Any, reason: str) -> None:
        """The homes that `accept` decided on cannot be queued."""
        state: RequestState = req.blockreuse
        state.not_compiled, state.usage.compiled_tokens = reason, 0
        if state.options.mode == "compile":
            state.usage.skipped_reason = reason

    def computed(self, req: Any, *, up_to: int, exact_end: int) -> None:
        """KV of the first `up_to` tokens exists; the tree holds the first `exact_end` under the plain namespace."""
        num_prompt = len(req.origin_input_ids)
        if up_to < num_prompt or len(req.output_ids) > 1:
            return  # a chunk, or long after the prompt
        self._compiler.prompt_computed(req.rid)
        if exact_end < num_prompt or self.discovery is None or unsupported(req) is not None:
            return
        try:
            self.discovery.published(req.origin_input_ids, namespace_of(req))
        except Exception:
            logger.exception("blockreuse: a prompt is not entered into the index")
            self._metrics.add("errors_total")

    def index_size(self) -> dict[str, int]:
        """What the index of exact prompts holds; zeros where the configuration has none."""
        index = None if self.discovery is None else self.discovery.index
        return {"prompts": len(index) if index else 0, "tokens": index.num_tokens if index else 0}

    def _jobs(self, req: Any, state: RequestState, wanted: Sequence[Home], *, num_own: int) -> list[HomeJob]:
        """What is still to be prefilled of `wanted`, unless it would push out what it is meant for.

        num_own: tokens that the request itself is going to occupy.
        """
        num_tokens = num_own + sum(len(h.span) for h in wanted)
        if num_tokens > MAX_COMPILE_SHARE * self._pool_size:
            state.not_compiled = "pool_too_small"
            return []
        jobs, state.waits_for = self._compiler.jobs_for(self._tree, wanted, namespace_of(req))
        state.usage.compiled_tokens = sum(len(job.home.span) for job in jobs)
        return jobs

    def _compile_only(self, req: Any, state: RequestState) -> list[HomeJob]:
        """Homes of all blocks of a request in mode `compile`, whatever `blocks.compile` says."""
        options, reason = state.options, self._off_reason or unsupported(req)
        if reason is not None:
            state.usage.skipped_reason = reason
            return []
        state.compile_prefix = self._compile_prefix(req, options)
        wanted = homes_of(
            req.origin_input_ids,
            options.spans,
            prefix=state.compile_prefix,
            min_block_tokens=self._config.min_block_tokens,
            all_blocks=True,
        )
        jobs = self._jobs(req, state, wanted, num_own=len(state.compile_prefix) + 1)
        state.usage.skipped_reason = (
            (None if wanted else "blocks_too_short") or state.not_compiled or "mode_compile"
        )
        return jobs

    def _discover(self, req: Any, state: RequestState) -> None:
        """Let the index choose the homes, where the configuration has it do so."""
        if self.discovery is None:
            return
        tokens, namespace = req.origin_input_ids, namespace_of(req)
        if state.may_reuse() and self._config.compile == "harvest":
            found, reason = self.discovery.marked(tokens, state.options.spans, namespace)
        elif state.usage.skipped_reason == "no_blocks" and self._config.auto:
            reason = unsupported(req)
            found, reason = ([], reason) if reason else self.discovery.unmarked(tokens, namespace)
            state.options = replace(state.options, spans=tuple(home.span for home in found))
        else:
            return
        state.usage.skipped_reason = reason
        state.found_homes = found or None

    def _compile_prefix(self, req: Any, options: BlockOptions) -> tuple[int, ...]:
        if self._neutral_prefix is not None:
            return self._neutral_prefix
        return compile_prefix(
            req.origin_input_ids, options.spans[0].start, config=self._config, bos=self._bos
        )

    def _skip_reason(self, req: Any, options: BlockOptions) -> str | None:
        """Why a request may not reuse, whatever the tree holds."""
        if options.mode != "reuse":
            return f"mode_{options.mode}"
        if self._off_reason is not None:
            return self._off_reason
        if not options.spans:
            return "no_blocks"
        if options.spans[-1].end > len(req.origin_input_ids):
            return "prompt_replaced"
        return unsupported(req)


def namespace_of(req: Any) -> Namespace:
    """The namespace in which a request's exact KV and its homes live."""
    return Namespace(req.extra_key, req.cache_salt)


def unsupported(req: Any) -> str | None:
    """A feature of the request that reuse of blocks does not combine with."""
    reasons = {
        "input_embeds": req.input_embeds is not None or req.positional_embed_overrides is not None,
        "multimodal": req.multimodal_inputs is not None,
        "session": req.session is not None,
        "lora": req.lora_id is not None,
        "beam_search": req.beam_group is not None,
    }
    return next((reason for reason, applies in reasons.items() if applies), None) or reads_positions(req)


def reads_positions(req: Any) -> str | None:
    """What the request is told of single positions of its prompt, so that none of them may be copied."""
    scored_at = ("multi_item_delimiter_indices", "token_indices_to_pool", "decision_layout")
    reasons = {
        "hidden_states": bool(req.return_hidden_states),
        "routed_experts": any(
            getattr(req, name, False) for name in ("return_routed_experts", "return_indexer_topk")
        ),
        "position_scores": any(getattr(req, name, None) is not None for name in scored_at),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)
