"""Entry point `sglang.srt.platforms`: decides whether SGLang runs on our CPU platform.

`activate()` is called in every SGLang process of every environment that has this package, so it answers
None (no platform of ours) wherever SGLang can run by itself: with any accelerator, and with SGLang's own CPU
engine. What it activates lives in cpu_platform.py, which is imported only then.
"""

from __future__ import annotations

import importlib.util
import os

CPU_PLATFORM = "sglang_blockreuse.cpu_platform.CpuPlatform"


def activate() -> str | None:
    """Return the platform class by name; None where SGLang serves this machine without us."""
    return CPU_PLATFORM if why_inactive() is None else None


def why_inactive() -> str | None:
    """Say why the CPU platform stays out of this machine; None when it activates."""
    # cheap and decisive answers first; torch is imported already when SGLang asks
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return "SGLANG_USE_CPU_ENGINE=1 asks for SGLang's own CPU engine"
    accelerator = find_accelerator()
    if accelerator is not None:
        return f"the accelerator {accelerator} was found"
    if has_compiled_cpu_kernels():
        return "SGLang's compiled CPU kernels are installed; start the server with SGLANG_USE_CPU_ENGINE=1"
    return None


def find_accelerator() -> str | None:
    """Name the first accelerator that SGLang would detect by itself, in the words of its `--device`."""
    import torch

    if torch.cuda.is_available():
        return "cuda" if torch.version.hip is None else "cuda (ROCm)"
    # npu and hpu are attributes that a vendor's package adds to torch when it is imported
    for name in ("xpu", "npu", "hpu", "mps"):
        module = getattr(torch, name, None)
        if module is not None and module.is_available():
            return name
    if getattr(torch.version, "musa", None) is not None:
        return "musa"
    # SGLang takes the mere presence of this package for a Gaudi card
    if importlib.util.find_spec("habana_frameworks") is not None:
        return "hpu"
    return None


def has_compiled_cpu_kernels() -> bool:
    """Whether the CPU build of SGLang's kernel package can be loaded; the CUDA build does not count."""
    import torch

    if importlib.util.find_spec("sgl_kernel") is None:
        return False
    try:
        import sgl_kernel  # noqa: F401
    except Exception:  # whatever the loader of a foreign binary raises, the answer is the same
        return False
    return hasattr(torch.ops.sgl_kernel, "convert_weight_packed")
