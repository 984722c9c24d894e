"""Say what is installed, what is active and why not: environment, host contract, host features, configuration, plans.

Exit status 1 if something would keep a server from starting. Notes are no failures.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

HELP = "check this installation: host contract, platform, configuration, layer plans"

State = Literal["ok", "note", "FAIL"]
PLUGIN = "blockreuse"
ENTRY_POINT_GROUPS = ("sglang.srt.plugins", "sglang.srt.platforms")


@dataclass(frozen=True)
class Finding:
    """One line of the table."""

    group: str
    name: str
    state: State
    detail: str


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--blockreuse-config", metavar="PATH", help="check this file too")
    parser.add_argument("--layer-plan", metavar="NAME|PATH", help="check this plan too")
    parser.add_argument(
        "--model-path", metavar="MODEL", help="say whether a server of this model would start here"
    )


def run(arguments: argparse.Namespace) -> int:
    server = Server(arguments.model_path, arguments.blockreuse_config, arguments.layer_plan)
    findings = list(find_all(server))
    if arguments.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        print_table(findings)
    return 1 if any(finding.state == "FAIL" for finding in findings) else 0


@dataclass(frozen=True)
class Server:
    """What a server would be started with."""

    model_path: str | None = None
    config_path: str | None = None
    layer_plan: str | None = None

    @property
    def words(self) -> list[str]:
        """Of its command line."""
        given = {
            "--model-path": self.model_path,
            "--blockreuse-config": self.config_path,
            "--layer-plan": self.layer_plan,
        }
        return [word for flag, value in given.items() if value is not None for word in (flag, value)]


def find_all(server: Server = Server()) -> Iterator[Finding]:
    yield from find_versions()
    yield from find_plugin()
    yield from find_machine()
    yield from find_contract()
    yield from find_features()
    yield from find_config(server.config_path)
    yield from find_layer_plans()
    yield from find_attention(server)


def find_versions() -> Iterator[Finding]:
    from packaging.specifiers import SpecifierSet

    from ..host import SUPPORTED_SGLANG

    def judge(name: str, version: str, allowed: str) -> Finding:
        fits = SpecifierSet(allowed).contains(version, prereleases=True) if version else False
        detail = version if fits else f"{version or 'not installed'}; needed: {allowed}"
        return Finding("version", name, "ok" if fits else "FAIL", detail)

    yield judge("python", platform.python_version(), ">=3.11")
    yield judge("sglang", _version("sglang"), ",".join(SUPPORTED_SGLANG))
    # their versions follow from SGLang's own pins
    for name in ("torch", "transformers", "triton", "flashinfer-python"):
        yield Finding("version", name, "note", _version(name) or "not installed")


def find_plugin() -> Iterator[Finding]:
    for group in ENTRY_POINT_GROUPS:
        found = [point for point in importlib.metadata.entry_points(group=group) if point.name == PLUGIN]
        detail = found[0].value if found else "not registered: install the package, `pip install -e .`"
        yield Finding("plug-in", group, "ok" if found else "FAIL", detail)
    names = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if names and PLUGIN not in names:
        detail = f"{','.join(sorted(names))} leaves {PLUGIN} out: add it, or unset the variable"
        yield Finding("plug-in", "SGLANG_PLUGINS", "FAIL", detail)
    selected = os.environ.get("SGLANG_PLATFORM", "")
    if selected not in ("", PLUGIN):
        detail = f"{selected} keeps the plug-in {PLUGIN} from loading: unset the variable"
        yield Finding("plug-in", "SGLANG_PLATFORM", "FAIL", detail)


def find_machine() -> Iterator[Finding]:
    import torch

    from ..platform import find_accelerator, why_inactive

    reason = why_inactive()
    accelerator = find_accelerator()
    yield Finding("machine", "accelerator", "note", accelerator or "none")
    active = "active: SGLang runs on PyTorch's CPU operators"
    yield Finding("machine", "CPU platform", "note", active if reason is None else f"stays out: {reason}")
    if reason is not None:
        return
    from ..cpu_defaults import free_memory_bytes, num_cores

    flags = torch.cpu.get_capabilities()
    bf16 = [name for name in ("amx_bf16", "avx512_bf16") if flags.get(name)]
    slow = "no bfloat16 instructions: bfloat16 models run slowly, consider --dtype float32"
    yield Finding("machine", "bfloat16", "note", ", ".join(bf16) or slow)
    threads = os.environ.get("OMP_NUM_THREADS")
    set_by_user = f", OMP_NUM_THREADS={threads}" if threads else ""
    yield Finding("machine", "cores", "note", f"{num_cores()}{set_by_user}")
    yield Finding("machine", "free memory", "note", f"{free_memory_bytes() / 2**30:.1f} GiB")


def find_contract() -> Iterator[Finding]:
    from ..host import check_contract

    for result in check_contract():
        detail = result.reason if result.ok else f"{result.reason}: {result.detail}"
        yield Finding(f"host {result.kind}", result.name, "ok" if result.ok else "FAIL", detail)


def find_features() -> Iterator[Finding]:
    """Features of SGLang beside which requests are folded, and those that a server is refused with."""
    from ..features import CARRIED, REFUSED

    for carried in CARRIED:
        yield Finding("carried", carried.name, "ok", carried.how)
    for refused in REFUSED:
        yield Finding("refused", refused.name, "note", refused.fix)


def find_config(path: str | None) -> Iterator[Finding]:
    from ..config import CONFIG_ENV, ConfigError, load_config
    from ..layers.plan import PlanError
    from ..settings import runnable_plan

    source = path or os.environ.get(CONFIG_ENV) or "built-in defaults"
    try:
        config = load_config(path)
        runnable_plan(config)
        yield Finding("configuration", source, "ok", config.describe())
    except (ConfigError, PlanError) as error:
        yield Finding("configuration", source, "FAIL", str(error))


def find_layer_plans() -> Iterator[Finding]:
    from ..layers.plan import PlanError
    from ..layers.plan_loader import load_plan, shipped_plans

    for name in shipped_plans():
        try:
            yield Finding("layer plan", name, "ok", f"fingerprint {load_plan(name).fingerprint[:12]}")
        except PlanError as error:
            yield Finding("layer plan", name, "FAIL", str(error))


def find_attention(server: Server) -> Iterator[Finding]:
    """Which attention a server gets here, and with a model what of its settings that refuses.

    The refusals are the server's own: its settings are resolved as at its start, which ends before weights are loaded.
    """
    from ..config import ConfigError, load_config
    from ..layers.bases import Machine, base_of
    from ..layers.plan import PlanError
    from ..platform import why_inactive
    from .serve import sglang_words

    device = "cpu" if why_inactive() is None else "cuda"
    try:
        base = base_of(load_config(server.config_path).kernels, Machine.of(device))
        yield Finding("attention", device, "ok", f"built on {base}")
        if server.model_path is None:
            yield Finding("attention", "model", "note", "not checked: give --model-path")
            return
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args

        load_plugins()
        prepare_server_args(sglang_words(server.words)).resolve_once()
        yield Finding("attention", server.model_path, "ok", "served with this configuration")
    except (ConfigError, PlanError) as error:
        yield Finding("attention", server.model_path or device, "FAIL", str(error))


def print_table(findings: list[Finding]) -> None:
    """Print one line per finding; what holds of the host's names and features is a line each (--json has them all)."""
    held = [finding for finding in findings if finding.group.startswith("host") and finding.state == "ok"]
    carried = [finding for finding in findings if finding.group == "carried"]
    lines = [finding for finding in findings if finding not in held and finding not in carried]
    if held:
        lines.append(Finding("host", "contract", "ok", f"{len(held)} names of SGLang are as expected"))
    if carried:
        lines.append(
            Finding("host", "features", "ok", f"{len(carried)} may share a step with reused prompts")
        )
    group_width, name_width = (
        max(len(getattr(line, column)) for line in lines) for column in ("group", "name")
    )
    for line in lines:
        print(f"{line.state:<4}  {line.group:<{group_width}}  {line.name:<{name_width}}  {line.detail}")
    num_failed = sum(finding.state == "FAIL" for finding in findings)
    print(f"\n{num_failed} failed" if num_failed else "\nready")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
