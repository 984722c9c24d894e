"""Where and with what a result was measured; no figure travels without it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("sglang-blockreuse", "sglang", "torch", "transformers", "triton", "flashinfer-python")
VARIABLES = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "SGLANG_BLOCKREUSE_CONFIG")


def describe() -> dict[str, Any]:
    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": sys.argv,
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "hardware": {
            "cpu": cpu_name(),
            "cores": psutil.cpu_count(logical=False),
            "threads": psutil.cpu_count(),
            "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
            "gpu": _gpu(),
        },
        "load_average": os.getloadavg(),
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def cpu_name() -> str:
    """The processor's name as Linux gives it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


def _commit() -> str | None:
    """Commit of the source tree, marked where files differ from it; None outside a repository."""
    git = ["git", "-C", str(Path(__file__).resolve().parent)]
    try:
        commit = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True)
        changes = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return commit.stdout.strip() + (" with local changes" if changes.stdout.strip() else "")
