"""Real servers for tests. Nothing is mocked: every helper starts SGLang, all but one as forks of one import of it.

    with lease(plan=PLAN) as server:
        answer = server.generate(input_ids=[...], sampling_params={"temperature": 0, "max_new_tokens": 8})

Take a `lease` where nothing speaks against it: test files that ask for the same setting share one server. A test that
ends its server, that looks at its start or at its end, or that needs another process takes one of the others.

All servers run the attention backend `blockreuse` by default, so that a difference between them comes from
block reuse and from nothing else; any SGLang flag may follow the model path and wins.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import yaml
from leases import Leased, Leases, Setting
from nursery import STARTS, Nursery
from places import PLUGIN, ROOT
from tiny_models import talking_model

from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import Server, extended_command, running_server

__all__ = [
    "COMMON",
    "Leased",
    "Server",
    "extended_server",
    "language_model",
    "lease",
    "no_company",
    "shared_nursery",
    "spawned_server",
    "stock_server",
    "with_test_plugin",
]

START_TIMEOUT_S = 300.0
# Of every leased server. Another flag is another server, so ask for one only where a law needs it.
COMMON = ("--dtype", "float32", "--max-total-tokens", "16000", "--max-running-requests", "8")
# prompts of most tests take several steps
COMMON += ("--chunked-prefill-size", "128", "--served-model-name", "small", "--enable-metrics")


def with_test_plugin() -> dict[str, str]:
    """Environment of a server that loads `tests/plugin` besides what this process sees."""
    paths = [str(PLUGIN), os.environ.get("PYTHONPATH")]
    return {"PYTHONPATH": os.pathsep.join(p for p in paths if p)}


def no_company(folder: Path) -> tuple[str, ...]:
    """Flags of a server whose homes stand right behind the leading text, as those of leases do; writes to `folder`."""
    config = folder / "no-company.json"
    config.write_text(json.dumps({"blocks": {"company": 0}}))
    return "--blockreuse-config", str(config)


@functools.cache
def shared_nursery() -> Nursery:
    """The one process of this test run that has imported SGLang; servers are forks of it."""
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


@functools.cache
def _leases() -> Leases:
    leases = Leases(shared_nursery())
    atexit.register(leases.close)  # runs before the nursery's
    return leases


def lease(
    *flags: str,
    model: Path | Literal["tiny", "smollm2"] = "tiny",
    blocks: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
    plan: str = "",
    env: Mapping[str, str] | None = None,
    kind: Literal["extended", "stock"] = "extended",
) -> AbstractContextManager[Leased]:
    """A server with the flags COMMON, shared by all who ask for the same, its tree empty.

    flags: SGLang's, behind the common ones, over which they win.
    model: "tiny" has random weights and SmolLM2's tokenizer, 6 layers; "smollm2" is the 135M model; or a folder.
    blocks, layers: sections of the configuration; `company` is 0 unless asked for.
    plan: a layer plan, by name or as text.
    env: on top of that of `with_test_plugin`, which extended servers have.

    Raises ServerFailed on entry.
    """
    named = {"tiny": talking_model, "smollm2": ensure_model}
    sections = {name: dict(found) for name, found in (("blocks", blocks), ("layers", layers)) if found}
    if kind == "extended":
        # most laws speak of homes behind the leading text, and of which blocks are exact there
        sections["blocks"] = {"company": 0, **sections.get("blocks", {})}
    setting = Setting(
        kind=kind,
        model=named[model]() if isinstance(model, str) else model,
        flags=(*COMMON, *flags),
        config=json.dumps(sections, sort_keys=True) if sections else "",
        plan=plan,
        env=tuple(sorted({**(with_test_plugin() if kind == "extended" else {}), **(env or {})}.items())),
    )
    return _leases().take(setting)


def language_model() -> AbstractContextManager[Leased]:
    """The 135M model as examples/blockreuse.yaml configures it: one server for all that only a language model shows."""
    blocks = yaml.safe_load((ROOT / "examples" / "blockreuse.yaml").read_text())["blocks"]
    # a prompt that is to be measured lies in one step
    return lease("--chunked-prefill-size", "2048", model="smollm2", blocks=blocks)


def stock_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """SGLang without block reuse."""
    return shared_nursery().stock_server(model_path, *flags, log=log, env=env)


def extended_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """`sglang-blockreuse serve`."""
    return shared_nursery().server(model_path, *flags, log=log, env=env)


def spawned_server(
    model_path: Path, *flags: str, log: Path, env: Mapping[str, str] | None = None
) -> AbstractContextManager[Server]:
    """`sglang-blockreuse serve` as users start it: processes of its own, each importing SGLang."""
    STARTS["spawned"] += 1
    command = extended_command(["--model-path", str(model_path), *flags])
    return running_server(command, log=log, env=env, timeout_s=START_TIMEOUT_S)
