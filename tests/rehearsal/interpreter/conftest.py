"""Rehearsals of the CUDA half: the host's real classes on CPU tensors, kernels in Triton's interpreter.

The interpreter is chosen by TRITON_INTERPRET=1 before triton is first imported, so these files are only collected in
a process of their own:  TRITON_INTERPRET=1 pytest tests/rehearsal/interpreter
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Two layers, head dim 16: small enough for the interpreter."""
    from world import TINY

    return TINY.write(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def host(tiny_model):
    """SGLang's own settings, resolved and published as in a scheduler."""
    from world import publish_settings

    return publish_settings(tiny_model)


@pytest.fixture(params=["triton", "flashinfer", "fa3"])
def base(request, monkeypatch):
    """The class of a base, with kernels that no CPU has in PyTorch."""
    from kernel_twins import install_fa3, install_flashinfer

    from sglang_blockreuse.layers.backend import cuda_class

    if request.param == "flashinfer":
        install_flashinfer(monkeypatch)
    if request.param == "fa3":
        install_fa3(monkeypatch)
    return cuda_class(request.param)


@pytest.fixture(scope="session")
def num_sets() -> int:
    """How many sets of lengths a recorded step is replayed at; the nightly tier asks for more."""
    return int(os.environ.get("BLOCKREUSE_REPLAYS", "4"))
