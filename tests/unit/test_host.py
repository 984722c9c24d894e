"""What we rely on in SGLang, and that being installed changes nothing for those who do not choose us."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys

import pytest

from sglang_blockreuse import host
from sglang_blockreuse.host import CONTRACT, HostContractError, HostName, check_contract, require_contract


def test_the_installed_sglang_offers_every_name():
    results = check_contract()
    assert len(results) == len(CONTRACT)
    assert [f"{r.name}: {r.detail}" for r in results if not r.ok] == []


def test_a_missing_name_or_parameter_stops_the_server_by_name(monkeypatch):
    gone = HostName("sglang.srt.managers.scheduler.Scheduler.no_such_door", "hook", "a test")
    changed = HostName("sglang.srt.mem_cache.radix_cache.RadixKey.__init__", "call", "a test", ("token_idz",))
    monkeypatch.setattr(host, "CONTRACT", (*CONTRACT, gone, changed))
    with pytest.raises(HostContractError, match=r"no_such_door[\s\S]*token_idz"):
        require_contract()


LOAD = "from sglang.srt.plugins import load_plugins; load_plugins();"
WITH_HOST = LOAD + "import sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server;"
FORKS = """
import json, os, sys, traceback
for line in sys.stdin:
    if os.fork() == 0:
        try:
            exec(json.loads(line), {})
        except BaseException:
            print(repr(traceback.format_exc()))
        sys.stdout.flush()
        os._exit(0)
    os.wait()
"""


class Interpreter:
    """A fresh process that has run some code; what follows runs in forks of it and ends with a printed line."""

    def __init__(self, code: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", code + FORKS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, code: str) -> str:
        print(json.dumps(code), file=self._process.stdin, flush=True)
        return self._process.stdout.readline().strip()

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@pytest.fixture(scope="module")
def loaded():
    """As a user's process is once SGLang has loaded its plug-ins."""
    with contextlib.closing(Interpreter(LOAD)) as interpreter:
        yield interpreter


@pytest.fixture(scope="module")
def with_host():
    """As a server's process is before the hooks are installed."""
    with contextlib.closing(Interpreter(WITH_HOST)) as interpreter:
        yield interpreter


def test_registering_hooks_nothing_but_the_command_line(loaded):
    code = "from sglang.srt.plugins.hook_registry import HookRegistry as R; print(sorted(R._patched))"
    assert eval(loaded.run(code)) == [
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang.srt.server_args.ServerArgs.from_cli_args",
    ]


def test_registering_imports_the_registration_and_the_platform_only(loaded):
    code = "import sys; print(sorted(m for m in sys.modules if m.startswith('sglang_blockreuse.')))"
    allowed = {"plugin", "platform", "cpu_platform", "cpu_defaults"}
    assert {name.removeprefix("sglang_blockreuse.") for name in eval(loaded.run(code))} <= allowed


def test_a_hook_that_is_not_applied_stops_the_server_by_name(with_host):
    """SGLang logs such a hook and goes on; we do not."""
    code = (
        "from sglang.srt.plugins.hook_registry import HookRegistry as R\n"
        "from sglang_blockreuse.host import HostContractError, install_hooks\n"
        "apply = R._apply_target\n"
        "def broken(target, hooks):\n"
        "    if target.endswith('LogitsMetadata.from_forward_batch'): raise AttributeError(target)\n"
        "    apply(target, hooks)\n"
        "R._apply_target = broken\n"
        "try: install_hooks()\n"
        "except HostContractError as error: print(repr(error))\n"
        "else: print('installed')"
    )
    assert "LogitsMetadata.from_forward_batch" in with_host.run(code)


def test_installing_the_hooks_twice_wraps_once(with_host):
    code = (
        "from sglang_blockreuse.host import install_hooks; install_hooks(); install_hooks()\n"
        "from sglang.srt.model_executor.model_runner import ModelRunner\n"
        "print(hasattr(ModelRunner.forward, '__wrapped__'), hasattr(ModelRunner.forward.__wrapped__, '__wrapped__'))"
    )
    assert with_host.run(code) == "True False"


def test_a_target_that_another_plug_in_hooked_first_gets_our_hook_on_top(with_host):
    """SGLang applies the hooks of a target once; ours would be registered and never run."""
    code = (
        "from sglang.srt.plugins.hook_registry import HookRegistry as R, HookType\n"
        "from sglang.srt.model_executor.model_runner import ModelRunner\n"
        "from sglang_blockreuse.host import install_hooks\n"
        "ModelRunner.forward = lambda self, batch: 'forward'\n"
        "target = 'sglang.srt.model_executor.model_runner.ModelRunner.forward'\n"
        "R.register(target, lambda *a: 'theirs', HookType.AFTER)\n"
        "R.apply_hooks()\n"
        "import sglang_blockreuse.hooks as ours\n"
        "ours.after_model_forward = lambda result, *a: result + ', then ours'\n"
        "install_hooks(); install_hooks()\n"
        "print(ModelRunner.forward(None, None))"
    )
    assert with_host.run(code) == "theirs, then ours"


def test_the_metric_names_are_frozen():
    from sglang_blockreuse.metrics import SERIES

    assert {name: labels for name, (_, labels) in SERIES.items()} == {
        "tokens_total": ("kind",),
        "requests_total": ("outcome",),
        "homes_total": (),
        "home_tokens_total": (),
        "home_wait_seconds_total": (),
        "blocks_total": ("found",),
        "rows_total": (),
        "copied_tokens_total": (),
        "copy_seconds_total": (),
        "path_tokens_total": (),
        "probes_total": ("kind",),
        "probe_seconds_total": (),
        "guard_total": ("verdict",),
        "decode_rows_total": ("kind",),
        "repair_rows_total": ("kind",),
        "decode_tokens_total": ("kind",),
        "decode_own_scans_total": ("role",),
        "decode_seconds_total": ("part", "role"),
        "decode_stale_keys_total": (),
        "decode_staleness_total": ("axis",),
        "errors_total": (),
    }
