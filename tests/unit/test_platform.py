"""The CPU platform: where it activates, what it sets, what it refuses. SGLang itself resolves every case."""

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_blockreuse import cpu_defaults, platform

needs_plain_cpu = pytest.mark.skipif(
    platform.why_inactive() is not None, reason=f"the CPU platform stays out: {platform.why_inactive()}"
)


def run_python(code, **env):
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, **env}, check=False
    )


class TestActivation:
    def test_asking_imports_nothing_of_sglang(self):
        code = (
            "import sys; from sglang_blockreuse.platform import activate; activate();"
            "print(sum(name.split('.')[0] == 'sglang' for name in sys.modules))"
        )
        assert run_python(code).stdout.strip() == "0"

    @needs_plain_cpu
    def test_sglang_finds_it_where_there_is_no_accelerator(self):
        run = run_python("from sglang.srt.platforms import current_platform as p; print(type(p).__name__)")
        assert run.stdout.strip() == "CpuPlatform"

    def test_sglang_s_own_cpu_engine_is_left_alone(self):
        code = "from sglang.srt.platforms import current_platform as p; print(type(p).__module__)"
        run = run_python(code, SGLANG_USE_CPU_ENGINE="1")
        assert run.stdout.strip() == "sglang.srt.platforms.cpu"

    def test_an_accelerator_keeps_it_out(self, monkeypatch):
        import torch

        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        assert platform.activate() is None
        assert "cuda" in platform.why_inactive()

    def test_compiled_cpu_kernels_keep_it_out(self, monkeypatch):
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
        monkeypatch.setattr(platform, "find_accelerator", lambda: None)
        monkeypatch.setattr(platform, "has_compiled_cpu_kernels", lambda: True)
        assert platform.activate() is None
        assert "SGLANG_USE_CPU_ENGINE=1" in platform.why_inactive()


@pytest.fixture(scope="module")
def resolve(model_path):
    """Resolve a command line as SGLang does at start-up, and return what each field became."""
    import sglang  # noqa: F401
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()

    def resolved(*words):
        server_args = prepare_server_args(["--model-path", str(model_path), *words])
        server_args.resolve_once()
        return resolved_view(server_args)

    return resolved


@needs_plain_cpu
class TestDefaults:
    def test_where_the_user_gave_nothing(self, resolve):
        args = resolve()
        assert args.device == "cpu"
        assert args.attention_backend == "blockreuse"
        assert args.sampling_backend == "pytorch"
        assert args.max_running_requests == cpu_defaults.MAX_RUNNING_REQUESTS
        assert args.sleep_on_idle
        free = cpu_defaults.free_memory_bytes()
        # 30 layers, 3 heads, K and V of 64 bfloat16
        assert args.max_total_tokens * 30 * 3 * 2 * 64 * 2 <= free * cpu_defaults.KV_POOL_MEMORY_SHARE * 1.1
        assert args.max_total_tokens <= 8192 * cpu_defaults.MAX_RUNNING_REQUESTS

    def test_the_pool_follows_the_context_and_the_number_of_requests(self, resolve):
        assert resolve("--context-length", "512", "--max-running-requests", "2").max_total_tokens == 1024

    @pytest.mark.parametrize(
        ("flag", "value"),
        [
            ("attention_backend", "torch_native"),
            ("max_running_requests", 3),
            ("max_total_tokens", 777),
        ],
    )
    def test_the_user_s_values_stay(self, resolve, flag, value):
        assert getattr(resolve(f"--{flag.replace('_', '-')}", str(value)), flag) == value

    def test_host_memory_is_moved_without_kernels(self, resolve):
        args = resolve("--enable-hierarchical-cache")
        assert (args.hicache_io_backend, args.hicache_mem_layout) == ("direct", "layer_first")

    def test_threads_are_set_only_where_the_user_set_none(self, monkeypatch):
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
        monkeypatch.setenv("OMP_WAIT_POLICY", "ACTIVE")
        cpu_defaults.set_thread_defaults(ranks=1)
        assert os.environ["OMP_NUM_THREADS"] == str(cpu_defaults.num_cores())
        assert os.environ["OMP_WAIT_POLICY"] == "ACTIVE"


@needs_plain_cpu
class TestRefusals:
    @pytest.mark.parametrize(
        ("words", "message"),
        [
            pytest.param(["--device", "cuda"], "--device cuda: no such accelerator", id="device"),
            pytest.param(
                ["--attention-backend", "triton"], "--attention-backend triton needs", id="attention"
            ),
            pytest.param(
                ["--decode-attention-backend", "flashinfer"],
                "--decode-attention-backend flashinfer needs",
                id="decode attention",
            ),
            pytest.param(["--kv-cache-dtype", "fp8_e4m3"], "--kv-cache-dtype fp8_e4m3 needs", id="KV dtype"),
            pytest.param(
                ["--speculative-algorithm", "NGRAM"], "--speculative-algorithm NGRAM", id="speculation"
            ),
            pytest.param(
                ["--enable-hierarchical-cache", "--hicache-mem-layout", "page_first_direct"],
                "--hicache-mem-layout page_first_direct needs",
                id="layout of host memory",
            ),
            pytest.param(
                ["--quantization", "fp8"], "quantization 'fp8' needs compiled kernels", id="quantization"
            ),
        ],
    )
    def test_a_setting_that_needs_kernels_is_refused_by_name(self, resolve, words, message):
        with pytest.raises(ValueError, match=message):
            resolve(*words)


class TestPool:
    sizes = st.integers(1, 1 << 20)

    @given(
        context_len=sizes,
        max_running_requests=st.integers(1, 512),
        bytes_per_token=sizes,
        free_bytes=st.integers(0, 1 << 42),
    )
    def test_it_is_never_more_than_wanted_nor_than_its_share_of_memory(
        self, context_len, max_running_requests, bytes_per_token, free_bytes
    ):
        tokens = cpu_defaults.kv_pool_tokens(
            context_len=context_len,
            max_running_requests=max_running_requests,
            bytes_per_token=bytes_per_token,
            free_bytes=free_bytes,
        )
        assert 1 <= tokens <= context_len * max_running_requests
        assert tokens == 1 or tokens * bytes_per_token <= free_bytes * cpu_defaults.KV_POOL_MEMORY_SHARE

    def test_too_little_memory_for_one_context_is_said(self, caplog):
        cpu_defaults.kv_pool_tokens(
            context_len=8192, max_running_requests=1, bytes_per_token=1 << 20, free_bytes=1 << 30
        )
        assert "less than one context of 8192" in caplog.text


class TestMachine:
    @pytest.mark.parametrize(
        ("quota", "cores"), [("150000 100000", 2), ("100000 100000", 1), ("max 100000", None)]
    )
    def test_a_container_s_quota_bounds_the_cores(self, quota, cores, tmp_path, monkeypatch):
        unbounded = cpu_defaults.num_cores()
        (tmp_path / "cpu.max").write_text(quota + "\n")
        monkeypatch.setattr(cpu_defaults, "CGROUP", tmp_path)
        assert cpu_defaults.num_cores() == min(unbounded, cores or unbounded)

    def test_a_container_s_limit_bounds_the_free_memory(self, tmp_path, monkeypatch):
        (tmp_path / "memory.max").write_text("5000\n")
        (tmp_path / "memory.current").write_text("2000\n")
        monkeypatch.setattr(cpu_defaults, "CGROUP", tmp_path)
        assert cpu_defaults.free_memory_bytes() == 3000
