"""A request arrives: its marks are read, and it is decided which homes it uses and which are prefilled for it."""

from __future__ import annotations

import logging
import secrets
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ..config import BlocksConfig
from ..metrics import Metrics
from ..types import BlockOptions, RequestState, Usage, Wait
from .company import Company
from .compile import Compiler, HomeId, HomeJob
from .discover import Discovery
from .match import Namespace, Tree
from .request import RequestError, parse_options
from .shared_kv import SharedKv
from .split import Front, Home, bounded, compile_prefix, num_shared
from .split import homes as homes_of
from .worth import worth_compiling

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
        company_text: tuple[int, ...] | None = None,  # tokens of blocks.company, where it is a text
        shared_kv: SharedKv | None = None,
        index_secret: str | None = None,
    ) -> None:
        self._config = config
        self._tree = tree
        self._compiler = compiler
        self._metrics = metrics
        self._bos = bos
        self._pool_size = pool_size
        self._off_reason = off_reason
        # tokens of blocks.compile_prefix_text
        self._neutral_prefix = None if neutral_prefix is None else array("q", neutral_prefix)
        wanted = config.company if isinstance(config.company, int) else array("q", company_text or ())
        self._company = Company(wanted, pool_size=pool_size)
        self._shared_kv = shared_kv
        searches = config.auto or config.compile == "harvest"
        secret = int(index_secret or secrets.token_hex(16), 16)
        self.discovery = (
            Discovery(tree, min_block_tokens=config.min_block_tokens, secret=secret) if searches else None
        )

    def accept(self, req: Any, *, max_prompt_len: int, was_cut: bool = False) -> list[HomeJob]:
        """Read the request's marks and decide which homes come first.

        max_prompt_len: tokens that the host lets a client's prompt have; no home is longer.
        was_cut: the host cut the end of the prompt off, so marks may reach beyond it.
        Hangs a RequestState on the request. Raises RequestError on marks that are malformed or ask for what
        cannot be.
        """
        options = parse_options(
            req.sampling_params.custom_params,
            prompt_len=len(req.origin_input_ids),
            config=self._config,
            was_cut=was_cut,
        )
        if self._shared_kv is not None:
            self._shared_kv.check_mode(options.mode)
        if options.mode == "compile":
            _check_compile(req)
        state = RequestState(
            options, Usage(mode=options.mode, policy=options.policy, prompt_truncated=was_cut)
        )
        req.blockreuse = state
        state.refused = self._refusal(req, options)
        if options.mode == "compile":
            jobs = self._compile_only(req, state, max_prompt_len)
        else:
            jobs = self._compile_for(req, state, max_prompt_len)
        state.usage.skipped_reason = state.refused
        return jobs

    def homes(self, req: Any, state: RequestState, max_prompt_len: int) -> list[Home]:
        """Where the KV of the request's blocks is to be found once it is compiled."""
        front = Front(state.compile_prefix)
        # alone in its prompt a block needs no company: right behind the leading text it is exact
        if state.options.mode == "compile" or len(self._bodies(req, state)) > 1:
            front = self._company.front(namespace_of(req), state.compile_prefix, max_len=max_prompt_len)
        wanted = homes_of(
            req.origin_input_ids,
            state.options.spans,
            front=front,
            min_block_tokens=self._config.min_block_tokens,
            all_blocks=state.options.mode == "compile",
        )
        fitting = [home for home in wanted if len(home) <= max_prompt_len]
        kept = bounded(fitting, prompt_len=len(req.origin_input_ids))
        if len(kept) < len(wanted) and (state.options.mode == "compile" or not kept):
            state.not_compiled = "home_too_long" if len(fitting) < len(wanted) else "too_many_blocks"
        return kept

    def ask_again(self, req: Any) -> list[HomeJob]:
        """The homes that were lost while the request waited for them, once more."""
        state: RequestState = req.blockreuse
        lost, state.wait.lost, state.wait.asked_again = state.wait.lost, [], True
        return self._jobs_for(req, state, [home for home, _ in lost])

    def compile_nothing(self, req: Any, reason: str) -> None:
        """The homes that were decided on cannot be queued."""
        self._compiler.drop_unqueued()
        state: RequestState = req.blockreuse
        state.wait.lost.clear()
        self.not_compiled(state, reason)

    def not_compiled(self, state: RequestState, reason: str) -> None:
        """Some of the homes that the request asked for are not there, and will not be."""
        state.not_compiled = reason
        if state.refused == "mode_compile":
            state.refused = state.usage.skipped_reason = reason

    def computed(self, req: Any, *, up_to: int, exact_end: int) -> None:
        """KV of the first `up_to` tokens exists; the tree holds the first `exact_end` under the plain namespace."""
        num_prompt = len(req.origin_input_ids)
        if up_to < num_prompt or len(req.output_ids) > 1:
            return  # a chunk, or long after the prompt
        self._compiler.prompt_computed(req.rid)
        if exact_end < num_prompt or self.discovery is None or unsupported(req) is not None:
            return
        if isinstance(req.rid, HomeId):
            return  # each holds the whole compile prefix, so the homes of one prompt would fill the index
        try:
            self.discovery.published(req.origin_input_ids, namespace_of(req))
        except Exception:
            logger.exception("blockreuse: a prompt is not entered into the index")
            self._metrics.add("errors_total")

    def tree_emptied(self) -> None:
        """No home is left: companions are chosen anew."""
        self._company.forget()

    def index_size(self) -> dict[str, int]:
        """What the index of exact prompts holds; zeros where the configuration has none."""
        index = None if self.discovery is None else self.discovery.index
        return {"prompts": len(index) if index else 0, "tokens": index.num_tokens if index else 0}

    def _compile_for(self, req: Any, state: RequestState, max_prompt_len: int) -> list[HomeJob]:
        """The homes of a request that is going to run: found, or compiled as `blocks.compile` says."""
        if self._discover(req, state):
            return []
        if not state.may_reuse():
            return []
        state.compile_prefix = self._compile_prefix(req, state.options)
        compiles = self._config.compile in ("before", "background")
        bodies = self._bodies(req, state)
        if compiles and len(bodies) > 1:
            self._company.join(namespace_of(req), state.compile_prefix, bodies)
        state.homes = self.homes(req, state, max_prompt_len)
        if not compiles:
            state.not_compiled = state.not_compiled or f"compile_{self._config.compile}"
            return []
        tokens = req.origin_input_ids
        num_exact = self._tree.lookup(tokens, namespace_of(req))[0]
        wanted, reason = worth_compiling(
            state.homes, state.options, start=num_exact, limit=logprob_limit(req), end=len(tokens)
        )
        if not wanted:
            state.not_compiled = reason or state.not_compiled
            return []
        jobs = self._jobs(req, state, wanted, own=tokens)
        if self._config.compile == "background":
            if state.wait.num_open:
                state.not_compiled, state.wait = "compile_background", Wait()
            return self._compiler.stay_behind(jobs, req.rid)
        return jobs

    def _compile_only(self, req: Any, state: RequestState, max_prompt_len: int) -> list[HomeJob]:
        """Homes of all blocks of a request in mode `compile`, whatever `blocks.compile` says."""
        if state.refused != "mode_compile":
            return []
        state.compile_prefix = self._compile_prefix(req, state.options)
        self._company.join(namespace_of(req), state.compile_prefix, self._bodies(req, state))
        wanted = self.homes(req, state, max_prompt_len)
        jobs = self._jobs(req, state, wanted, own=state.compile_prefix, num_new=1) if wanted else []
        if not wanted:
            self.not_compiled(state, state.not_compiled or "blocks_too_short")
        elif state.not_compiled is not None:
            self.not_compiled(state, state.not_compiled)
        return jobs

    def _jobs(
        self, req: Any, state: RequestState, wanted: Sequence[Home], *, own: array[int], num_new: int = 0
    ) -> list[HomeJob]:
        """What is still to be prefilled of `wanted`, unless it would push out what it is meant for.

        own: the prompt that the request itself runs, and `num_new` tokens behind it.
        """
        # their prefixes begin alike and lie in the tree once, and for the prompt too as far as it begins with them
        prefix = max((home.prefix for home in wanted), key=len)
        num_prefix = len(prefix) - num_shared(prefix, own)
        num_tokens = len(own) + num_new + num_prefix + sum(len(home.span) for home in wanted)
        if num_tokens > MAX_COMPILE_SHARE * self._pool_size:
            state.not_compiled = "pool_too_small"
            return []
        return self._jobs_for(req, state, wanted)

    def _jobs_for(self, req: Any, state: RequestState, wanted: Sequence[Home]) -> list[HomeJob]:
        jobs, ids = self._compiler.jobs_for(self._tree, wanted, namespace_of(req), state.usage)
        # background homes are for later requests and stay where this one goes
        stays = self._config.compile == "background" and state.options.mode == "reuse"
        self._compiler.wait(state.wait, ids, waiting=None if stays or not ids else req.rid)
        return jobs

    def _discover(self, req: Any, state: RequestState) -> bool:
        """Let the index choose the homes, where the configuration has it do so; whether it found any."""
        if self.discovery is None:
            return False
        tokens, namespace = req.origin_input_ids, namespace_of(req)
        if state.may_reuse() and self._config.compile == "harvest":
            found, reason = self.discovery.marked(tokens, state.options.spans, namespace)
        elif state.refused == "no_blocks" and self._config.auto:
            reason = unsupported(req)
            found, reason = ([], reason) if reason else self.discovery.unmarked(tokens, namespace)
            state.options = replace(state.options, spans=tuple(home.span for home in found))
        else:
            return False
        state.refused = reason
        state.homes = found
        return bool(found)

    def _bodies(self, req: Any, state: RequestState) -> list[array[int]]:
        """The request's blocks that may have a home."""
        tokens, shortest = req.origin_input_ids, self._config.min_block_tokens
        return [tokens[s.start : s.end] for s in state.options.spans if len(s) >= shortest]

    def _compile_prefix(self, req: Any, options: BlockOptions) -> array[int]:
        if self._neutral_prefix is not None:
            return self._neutral_prefix
        return compile_prefix(
            req.origin_input_ids, options.spans[0].start, config=self._config, bos=self._bos
        )

    def _refusal(self, req: Any, options: BlockOptions) -> str | None:
        """Why a request may not reuse, whatever the tree holds."""
        if options.mode in ("off", "exact"):
            return f"mode_{options.mode}"
        if self._off_reason is not None:
            return self._off_reason
        if not options.spans:
            return "prompt_truncated" if options.num_cut else "no_blocks"
        return "mode_compile" if options.mode == "compile" else unsupported(req)


def _check_compile(req: Any) -> None:
    """Refuse what a compile request cannot be: its prompt is not run, so nothing may depend on it."""
    reason = unsupported(req)
    if reason is not None:
        raise RequestError(
            f"blockreuse_mode is compile, which does not combine with {reason}. Send the documents in a request "
            "without it."
        )
    if req.return_logprob:
        raise RequestError("blockreuse_mode is compile, which answers no log-probabilities. Leave them out.")


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


def logprob_limit(req: Any) -> int:
    """Positions from here on must be computed, because the client wants their log-probabilities."""
    if req.return_logprob and req.logprob_start_len >= 0:
        return int(req.logprob_start_len)
    return len(req.origin_input_ids)


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
