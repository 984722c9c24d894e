"""A gate in front of the scheduler, so that a test decides which requests meet in a step and where an abort strikes.

The variable BLOCKREUSE_TESTING_GATE names a file of two int64 that server and test both map: how many passes of its
loop the scheduler may still make (negative: as many as it likes), and how many messages it has received.
SGLang applies the hooks of one target once, so this file keeps away from those of the extension.
Behind a closed gate the scheduler is paused as by SGLang's own in-place pause: it receives, and it runs nothing.

    testing_embeds: [p1, ...]  the embeddings of these positions are overridden, which only sglang.Engine can ask for
    testing_mix: true          the first two requests of a prefill step that holds this one get each other's logits
"""

from __future__ import annotations

import mmap
import os
import time

PATH = "BLOCKREUSE_TESTING_GATE"
PAUSE_S = 0.0005  # leave the processor to others while there is nothing to do


class Cells:
    """Two int64 in a file, shared between processes."""

    def __init__(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 16)
        self._view = memoryview(self._map).cast("q")

    passes = property(lambda self: self._view[0], lambda self, n: self._view.__setitem__(0, n))
    received = property(lambda self: self._view[1], lambda self, n: self._view.__setitem__(1, n))


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    scheduler = "sglang.srt.managers.scheduler.Scheduler"
    HookRegistry.register(f"{scheduler}._create_generation_req", read_knobs, HookType.AFTER)
    HookRegistry.register("sglang.srt.model_executor.model_runner.ModelRunner.sample", mix, HookType.BEFORE)
    if os.environ.get(PATH):
        HookRegistry.register(f"{scheduler}.ingest_requests", hold, HookType.AFTER)


cells = None


def hold(received, scheduler, *args, **kwargs):
    global cells
    cells = cells or Cells(os.environ[PATH])
    cells.received += len(received)
    passes = cells.passes
    scheduler._engine_paused = passes == 0
    if passes > 0:
        cells.passes = passes - 1
    if passes == 0 or (not received and is_idle(scheduler)):
        time.sleep(PAUSE_S)


def is_idle(scheduler):
    return not scheduler.waiting_queue and scheduler.last_batch is None and scheduler.running_batch.is_empty()


MIXING = set()  # ids of requests


def read_knobs(req, scheduler, *args, **kwargs):
    knobs = req.sampling_params.custom_params
    if not isinstance(knobs, dict):
        return  # a request may hold nonsense
    if knobs.get("testing_mix"):
        MIXING.add(req.rid)
    if knobs.get("testing_embeds"):
        override_embeds(req, knobs["testing_embeds"], scheduler.model_config.hidden_size)


def override_embeds(req, positions, width):
    import torch
    from sglang.srt.managers.embed_types import PositionalEmbeds

    noise = torch.Generator().manual_seed(positions[0])
    req.positional_embed_overrides = PositionalEmbeds(
        torch.randn(len(positions), width, generator=noise), list(positions)
    )
    req.skip_radix_cache_insert = True  # as the host does where overrides come from outside


def mix(runner, logits_output, forward_batch, *args, **kwargs):
    if (
        forward_batch.forward_mode.is_extend()
        and len(forward_batch.rids) > 1
        and MIXING & set(forward_batch.rids)
    ):
        logits = logits_output.next_token_logits
        logits[[0, 1]] = logits[[1, 0]]
