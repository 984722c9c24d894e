"""One prefill step: loads what its requests reuse, probes where a policy asks for it, folds requests into rows."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from ..errors import short
from ..metrics import Metrics
from ..types import Fold, Interval
from .faults import is_device_error
from .host_copy import HostHomes
from .load import Copies, KvLoader
from .manager import BlockManager, plan_of
from .measure import Measures, Part, RunForward, everything_copied, plan_to_run
from .pieces import spill
from .rows import fold_batch, repair_mask
from .tags import SlotTags

logger = logging.getLogger(__name__)

# The scheduler launches a step before the result of the one before it is there, and drops what a request holds
# without looking at the device: a step's operands live until the next but one is prepared, as the host's own do.
STEPS_IN_FLIGHT = 2


class PrefillSteps:
    """Prepares every prefill forward of a scheduler.

    num_layers, shared_layers, reduce: of the model and over its tensor-parallel ranks, see `Probe`.
    any_rank: per flag, whether it is set on any of those ranks.
    max_forward_tokens: what the server's settings let a prefill forward compute; None: no limit.
    host_homes: the loader's twin for homes in host memory; None where there is no such tier.
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
        any_rank: Callable[[list[bool]], list[bool]] = lambda flags: flags,
        max_forward_tokens: int | None = None,
        tags: SlotTags | None = None,
        host_homes: HostHomes | None = None,
    ) -> None:
        self.tags = tags  # kept only where alpha or beta is not 0
        self.announce: Callable[[Tensor], None] | None = None  # told of slots before KV is copied into them
        self.sparse_repair = False  # the layer plan makes repair sparse, so the backend must know its tokens
        self._blocks = blocks
        self._loader = loader
        self._host_homes = host_homes
        self._metrics = metrics
        self._measures = Measures(
            blocks, metrics, num_layers=num_layers, shared_layers=shared_layers, reduce=reduce
        )
        self._any_rank = any_rank
        self._max_forward_tokens = max_forward_tokens
        self._operands: deque[list[Tensor]] = deque(maxlen=STEPS_IN_FLIGHT)

    def prepare(self, batch: Any, req_to_token: Tensor, run: RunForward) -> tuple[Any, Fold | None]:
        """Load what the batch reuses and fold its requests into rows.

        batch: the host's ScheduleBatch of a prefill or mixed step, left as it is.
        req_to_token: int32 [request slots, positions], the host's page table.
        Returns the batch to run and, where it was folded, how to undo it. An error of ours costs one request its
        reuse, on every rank, and nobody else anything: what was to be copied is computed in forwards before this
        one, which stays within what it was formed for. Errors of the device are raised.
        """
        if self.tags is not None:
            self.tags.written(batch.out_cache_loc)
        parts = self._parts(batch, req_to_token)
        if not parts:
            return batch, None
        folded: tuple[Any, Fold | None] = batch, None

        def fold() -> None:
            nonlocal folded
            folded = self._fold(batch, parts, req_to_token, run)

        if self._fails(parts, fold):
            # no batch of this kind can be folded, on any rank: every position has a slot, all is computed
            self._lose(parts)
        return folded

    def _fold(
        self, batch: Any, parts: list[Part], req_to_token: Tensor, run: RunForward
    ) -> tuple[Any, Fold | None]:
        runs = [
            [Interval(low, low + extend)]
            for low, extend in zip(batch.prefix_lens, batch.extend_lens, strict=True)
        ]
        whole, admitted = list(runs), list(batch.extend_lens)
        for part in parts:
            admitted[part.index] = plan_to_run(part).num_computed(part.low, part.high)
        self._operands.append([slots for part in parts for slots in part.state.home_slots or ()])
        parts, num_copied = self._load(parts, req_to_token)
        parts = self._measure(batch, parts, run)
        repairs: list[list[Interval]] = [[] for _ in runs]
        for part in parts:
            runs[part.index] = plan_to_run(part).runs_within(part.low, part.high)
            if self.sparse_repair:
                repairs[part.index] = list(plan_to_run(part).repairs_within(part.low, part.high))
        pieces, runs = spill(runs, admitted, self._max_forward_tokens)
        for piece in pieces:
            run(*fold_batch(batch, piece, unread=True), None)
        repair_T = repair_mask(runs, repairs)
        if runs == whole and repair_T is None:
            return batch, None
        folded, fold = fold_batch(batch, runs, repair_T=repair_T)
        self._report(batch, fold, num_copied)
        return folded, fold

    def _parts(self, batch: Any, req_to_token: Tensor) -> list[Part]:
        decoding = {id(r) for r in batch.decoding_reqs or ()}
        rows = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        return [
            Part(i, req, req_to_token[req.kv.req_pool_idx], low, low + extend)
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

    # -- what may fail -----------------------------------------------------------------------

    def _fails(self, parts: Iterable[Part], do: Callable[[], None]) -> bool:
        """Do it, and whether it failed on this rank. Raises errors of the device."""
        try:
            do()
        except Exception as error:
            if is_device_error(error):
                raise
            rids = ", ".join(short(part.req.rid) for part in parts)
            logger.exception("blockreuse: everything is computed for %s", rids)
            return True
        return False

    def _surviving(self, parts: Sequence[Part], failed: Sequence[bool]) -> list[Part]:
        """The parts that failed on no rank; the others reuse nothing from here on.

        Asked by every rank at the same places with the same parts: a batch must be folded alike on all of them.
        """
        lost = self._any_rank(list(failed))
        self._lose([part for part, is_lost in zip(parts, lost, strict=True) if is_lost])
        return [part for part, is_lost in zip(parts, lost, strict=True) if not is_lost]

    def _lose(self, parts: Iterable[Part]) -> None:
        """The rest of these prompts is computed."""
        for part in parts:
            if plan_of(part.req) is not None:
                self._metrics.add("errors_total")
                self._blocks.abandon(part.req)
                self._tag(part)

    # -- loading ---------------------------------------------------------------------------

    def _load(self, parts: Sequence[Part], req_to_token: Tensor) -> tuple[list[Part], int]:
        """Take over what the plans copy. Returns the parts that are loaded and how many tokens that were."""
        assert self._loader is not None
        started = time.perf_counter()
        loader, copies = self._loader, {}  # by index in the batch
        failed = [self._fails([part], lambda part=part: copies.update(self._find(part))) for part in parts]
        # what another rank fails to find is computed there and here, whether or not it is copied here first
        if self._fails(parts, lambda: loader.load(list(copies.values()), req_to_token)):
            failed = [True] * len(parts)
        self._metrics.add("copy_seconds_total", time.perf_counter() - started)
        num_fetched = self._fetch(parts, failed)
        loaded = self._surviving(parts, failed)
        num_copied = sum(copies[part.index].num_tokens + num_fetched[part.index] for part in loaded)
        num_path = sum(
            len(piece)
            for part in loaded
            if any(segment.is_path for segment in plan_to_run(part).segments)
            for index, piece in plan_to_run(part).copies_within(part.low, part.high)
            if plan_to_run(part).segments[index].is_path
        )
        if num_path:
            # counted here, because a plan is made anew for every step that has no room for its request
            self._metrics.add("path_tokens_total", num_path)
        return loaded, num_copied

    def _fetch(self, parts: Sequence[Part], failed: list[bool]) -> Counter[int]:
        """The same for homes in host memory: tokens by index in the batch. Marks in `failed` whose fetch failed."""
        num_fetched: Counter[int] = Counter()
        host = self._host_homes
        if host is None:
            return num_fetched
        started = time.perf_counter()
        host.wait()

        def fetch(part: Part) -> None:
            num_fetched[part.index] = host.load(part.state, part.row_slots, part.low, part.high)

        for at, part in enumerate(parts):
            failed[at] = failed[at] or self._fails([part], lambda part=part: fetch(part))
        if num_fetched.total():
            self._metrics.add("host_copy_seconds_total", time.perf_counter() - started)
        return num_fetched

    def _find(self, part: Part) -> dict[int, Copies]:
        """What the part copies, as the host knows it; nothing is copied yet."""
        assert self._loader is not None
        if self._measures.wanted(part):
            part.state.plan = everything_copied(plan_to_run(part))
        if self.announce is not None:
            self.announce(part.row_slots[part.low : part.high])
        self._tag(part)
        return {part.index: self._loader.find(part.state, part.req.kv.req_pool_idx, part.low, part.high)}

    def _tag(self, part: Part) -> None:
        if self.tags is not None:
            self.tags.planned(part.state, part.row_slots, part.low, part.high)

    def _measure(self, batch: Any, parts: list[Part], run: RunForward) -> list[Part]:
        """Choose anew for the requests that ask for it. Returns the parts that may go on reusing."""
        probed = [part for part in parts if self._measures.wanted(part)]
        if not probed:
            return parts
        started = time.perf_counter()
        failed = self._fails(probed, lambda: self._measures.choose(batch, probed, run))
        self._metrics.add("probe_seconds_total", time.perf_counter() - started)
        # a probe overwrites what was loaded, so a request whose probe failed computes everything
        measured = {part.index for part in probed}
        left = self._surviving(parts, [failed and part.index in measured for part in parts])
        for part in left:
            self._tag(part)
        return left
