"""bench/gpu_check.py: the whole check on a device (-m gpu), its dry run and its gate everywhere."""

from __future__ import annotations

import importlib.util
import inspect
import json
import re
import subprocess
import sys

import pytest
import torch
from places import ROOT

SCRIPT = ROOT / "bench" / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-W", "ignore", str(SCRIPT), *arguments], capture_output=True, text=True
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_every_kernel_on_the_device(tmp_path):
    done = run("--json", str(tmp_path / "report.json"))
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert json.loads((tmp_path / "report.json").read_text())["timings"]


def test_the_dry_run_checks_everything_and_times_nothing(tmp_path):
    done = run("--interpret", "--json", str(tmp_path / "report.json"))
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["passed"]
    assert report["timings"] == []
    assert report["copy_bytes_per_second"] is None
    assert len(report["checks"]) >= 60
    assert not re.search(r"\bus\b|GB/s", done.stdout), "a time without a device"


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is there")
def test_without_a_device_it_says_so():
    done = run()
    assert done.returncode == 2
    assert "no CUDA device" in done.stderr


@pytest.fixture(scope="module")
def gpu_check():
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module
    spec.loader.exec_module(module)
    return module


def test_a_wrong_result_is_no_pass(gpu_check):
    x = torch.randn(8)
    assert gpu_check.compare("decode_attention", torch.bfloat16, x, x).passed
    assert not gpu_check.compare("decode_attention", torch.bfloat16, x + 0.1, x).passed
    assert not gpu_check.compare("decode_attention", torch.bfloat16, x / 0, x).passed
    assert not gpu_check.same("ids", torch.int32, torch.tensor([1]), torch.tensor([2])).passed


def test_flashinfer_takes_the_keywords_of_the_dense_decode(gpu_check):
    import flashinfer

    source = inspect.getsource(gpu_check.flashinfer_decode)
    keywords = re.findall(r"^\s+(\w+)=", source.split("wrapper.plan(")[1].split("    )\n")[0], re.MULTILINE)
    assert len(keywords) == 9
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper
    named, documented = inspect.signature(wrapper.plan).parameters, wrapper.plan.__doc__
    assert all(keyword in named or f"{keyword} : " in documented for keyword in keywords)
    assert "use_tensor_cores" in inspect.signature(wrapper.__init__).parameters
