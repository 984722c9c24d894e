"""Writes down how long block reuse holds the scheduler's thread: a line `who.stage milliseconds` for every call.

who: `main`, or `home` where the call is about homes alone. A line `home.tokens number` for every home that is queued.
The variable BLOCKREUSE_TESTING_CLOCK names the file. CPU time of the thread, without the forwards of probes.
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

away_s = 0.0  # spent in forwards of probes during the call at hand


def register(hook, kind):
    for stage, target in STAGES.items():
        hook(target, functools.partial(timed, stage), kind)


def is_home(req):
    from sglang_blockreuse.scheduler import is_home

    return is_home(req)


def timed(stage, original, *args, **kwargs):
    global away_s
    away_s = 0.0
    reqs = args[1].reqs if stage == "prepare" else [args[1]]
    who = "home" if all(is_home(req) for req in reqs) else "main"
    if stage == "prepare":
        *args, run_probe = args
        args.append(functools.partial(away, run_probe))
    started = time.thread_time()
    result = original(*args, **kwargs)
    taken_s = time.thread_time() - started - away_s
    homes = result if stage == "accept" else ()
    with open(os.environ["BLOCKREUSE_TESTING_CLOCK"], "a") as file:
        file.write(f"{who}.{stage} {1000 * taken_s:.4f}\n")
        file.writelines(f"home.tokens {len(home.origin_input_ids)}\n" for home in homes)
    return result


def away(run, *args, **kwargs):
    global away_s
    started = time.thread_time()
    try:
        return run(*args, **kwargs)
    finally:
        away_s += time.thread_time() - started
