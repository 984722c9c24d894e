"""Writes down how long block reuse holds the scheduler's thread: a line `who.stage milliseconds` for every call.

who: `main`, or `home` where the call is about homes alone. A line `home.tokens number` for every home that is queued.
CPU time of the thread, without what is the device's work and runs in this thread on the CPU only: forwards, and
the copy of KV, which has a line `who.copy milliseconds` and a line `who.copied number` of its own.
The variable BLOCKREUSE_TESTING_CLOCK names the file.
"""

from __future__ import annotations

import functools
import os
import time

STAGES = {
    "accept": "sglang_blockreuse.hooks.accept_request",
    "ready": "sglang_blockreuse.blocks.manager.BlockManager.ready",
    "plan": "sglang_blockreuse.blocks.manager.BlockManager.plan_or_compute",
    "prepare": "sglang_blockreuse.blocks.step.PrefillSteps.prepare",
    "computed": "sglang_blockreuse.blocks.arrive.Arrivals.computed",
    "publish": "sglang_blockreuse.radix_cache.BlockReuseCache._publish_path",
}
COPY = "sglang_blockreuse.blocks.load.KvLoader._move"

away = {"forward_s": 0.0, "copy_s": 0.0, "copied": 0}  # during the call at hand


def register(hook, kind):
    for stage, target in STAGES.items():
        hook(target, functools.partial(timed, stage), kind)
    hook(COPY, copied, kind)


def is_home(req):
    from sglang_blockreuse.scheduler import is_home

    return is_home(req)


def timed(stage, original, *args, **kwargs):
    away.update(forward_s=0.0, copy_s=0.0, copied=0)
    reqs = args[1].reqs if stage == "prepare" else [args[1]]
    who = "home" if all(is_home(req) for req in reqs) else "main"
    if stage == "prepare":
        *args, run = args
        args.append(functools.partial(apart, "forward_s", run))
    started = time.thread_time()
    result = original(*args, **kwargs)
    taken_s = time.thread_time() - started - away["forward_s"] - away["copy_s"]
    homes = result if stage == "accept" else ()
    with open(os.environ["BLOCKREUSE_TESTING_CLOCK"], "a") as file:
        file.write(f"{who}.{stage} {1000 * taken_s:.4f}\n")
        if away["copied"]:
            file.write(f"{who}.copy {1000 * away['copy_s']:.4f}\n{who}.copied {away['copied']}\n")
        file.writelines(f"home.tokens {len(home.origin_input_ids)}\n" for home in homes)
    return result


def copied(original, loader, source_slots, *operands):
    away["copied"] += len(source_slots)
    return apart("copy_s", original, loader, source_slots, *operands)


def apart(what, run, *args, **kwargs):
    started = time.thread_time()
    try:
        return run(*args, **kwargs)
    finally:
        away[what] += time.thread_time() - started
