"""Defaults for a server on a CPU, from what the machine has: KV pool, threads. Imports nothing of SGLang."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import psutil

logger = logging.getLogger(__name__)

MAX_RUNNING_REQUESTS = 8
# The pool never takes more than this share of what is free: weights, activations and other programs live there too.
KV_POOL_MEMORY_SHARE = 0.25
CGROUP = Path("/sys/fs/cgroup")


def kv_pool_tokens(
    *, context_len: int, max_running_requests: int, bytes_per_token: int, free_bytes: int
) -> int:
    """Tokens of the KV pool: every running request at full context, within a share of the free memory.

    SGLang still lowers the figure if less is free once the weights are loaded.
    """
    wanted = context_len * max_running_requests
    affordable = int(free_bytes * KV_POOL_MEMORY_SHARE) // bytes_per_token
    if affordable < context_len:
        logger.warning(
            "blockreuse: %.1f GiB free hold %d tokens of KV, less than one context of %d; longer prompts are refused. "
            "Free memory, or set --context-length or --max-total-tokens.",
            free_bytes / 2**30,
            affordable,
            context_len,
        )
    return max(1, min(wanted, affordable))


def set_thread_defaults(ranks: int) -> None:
    """Set OpenMP's environment for the scheduler processes, which are started after this; the user's values stay."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // ranks)))
    # A thread that spins at a barrier takes the core that its sibling, the tokenizer or another program needs:
    # with fewer free cores than threads a decode step becomes ten times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if ranks > 1:
        # SGLang insists on one entry per rank where there are more ranks than NUMA nodes
        os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join(str(rank) for rank in range(ranks)))


def num_cores() -> int:
    """Physical cores this process may use, within its affinity mask and its container's quota."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    usable = min(usable, psutil.cpu_count(logical=False) or usable)
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        usable = min(usable, -(-int(quota) // int(period)))
    return max(1, usable)


def free_memory_bytes() -> int:
    """Memory this process may still take: of the machine and of its container."""
    free = int(psutil.virtual_memory().available)
    limit, used = _read(CGROUP / "memory.max"), _read(CGROUP / "memory.current")
    if limit.isdigit() and used.isdigit():
        free = min(free, max(0, int(limit) - int(used)))
    return free


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
