"""One place chooses the kernel: forced kinds, gates that fall back and count, contracts that raise."""

from __future__ import annotations

import inspect
import logging
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from sglang_blockreuse.kernels import dispatch, reference, reference_select
from sglang_blockreuse.kernels.dispatch import Dispatcher, Operands

GPU = Operands("cuda", torch.bfloat16, torch.bfloat16, 128, 4, 1)
CPU = replace(GPU, device="cpu")


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda: (9, 0))


@pytest.fixture
def ampere(monkeypatch):
    monkeypatch.setattr(dispatch, "_capability", lambda: (8, 0))


@pytest.mark.parametrize(
    ("choice", "operands", "kind", "counted"),
    [
        ("auto", GPU, "triton", False),
        ("auto", CPU, "reference", False),
        ("triton", CPU, "reference", True),
        ("reference", GPU, "reference", False),
        ("auto", replace(GPU, head_dim=512), "reference", True),
        ("auto", replace(GPU, group=128), "reference", True),
        ("auto", replace(GPU, dtype=torch.float64), "reference", True),
        ("auto", replace(GPU, page_size=64), "triton", False),
    ],
)
def test_a_gate_falls_back_and_counts(hopper, choice, operands, kind, counted):
    dispatcher = Dispatcher(choice)
    assert dispatcher.kind_for("decode_attention", operands) == kind
    assert bool(dispatcher.fallbacks) == counted


def test_float8_needs_a_device_that_has_it(ampere):
    dispatcher = Dispatcher()
    assert dispatcher.kind_for("rotate_copy", replace(GPU, kv_dtype=torch.float8_e4m3fn)) == "reference"
    assert dispatcher.fallbacks == {("rotate_copy", "float8 on sm_80"): 1}
    assert dispatcher.kind_for("rotate_copy", replace(GPU, kv_dtype=torch.float8_e5m2)) == "triton"


@pytest.mark.parametrize(
    ("choice", "operands", "kind"),
    [
        ("auto", GPU, "flashinfer"),
        ("flashinfer", GPU, "flashinfer"),
        ("triton", GPU, "triton"),
        ("auto", replace(GPU, head_dim=80), "triton"),
        ("flashinfer", replace(GPU, head_dim=80), "triton"),
        ("auto", CPU, "reference"),
        ("reference", GPU, "reference"),
    ],
)
def test_planned_attention_prefers_flashinfer(hopper, choice, operands, kind):
    assert Dispatcher(choice).planned_kind(operands) == kind


def test_the_choice_is_logged_once(caplog):
    dispatcher = Dispatcher()
    with caplog.at_level(logging.INFO, logger=dispatch.__name__):
        for _ in range(3):
            dispatcher.kind_for("scan", CPU)
    assert [record.getMessage() for record in caplog.records] == [
        "blockreuse: scan runs on the reference kernel (device cpu is outside the Triton kernels)"
    ]


def test_an_unknown_choice_is_refused():
    with pytest.raises(
        ValueError, match="'cuda' is no kind of kernel; use auto, reference, triton or flashinfer"
    ):
        Dispatcher("cuda")


def test_what_moves_blocks_on_the_cpu_is_the_law():
    torch.manual_seed(0)
    dispatcher = Dispatcher()
    k, v = torch.randn(20, 2, 16), torch.randn(20, 2, 16)
    moved = k.clone()
    angles = reference.delta_cos_sin(torch.ones(8), torch.tensor([3]))
    dispatcher.rotate_copy(moved, v, torch.tensor([1]), torch.tensor([2]), *angles)
    assert torch.equal(moved[2], reference.rotate_keys(k[1:2], *angles)[0])


@pytest.mark.parametrize(
    ("module", "name", "law"),
    [
        ("rotate_copy", "rotate_copy", reference.rotate_copy),
        ("extend_attention", "extend_attention", reference.extend_attention),
        ("decode_attention", "decode_attention", reference.decode_attention),
        ("scan", "pooled_scores", reference_select.pooled_scores),
        ("top_k", "top_k", reference_select.top_k),
    ],
)
def test_a_twin_takes_every_argument_of_its_law(module, name, law):
    twin = dispatch._triton(name, module)
    expected, got = inspect.signature(law).parameters, inspect.signature(twin).parameters
    assert list(expected) == [p for p in got if p in expected]
    assert all(got[p].default == expected[p].default and got[p].kind == expected[p].kind for p in expected)
    assert all(got[p].default is not inspect.Parameter.empty for p in got if p not in expected)


def test_kernels_import_neither_sglang_nor_triton_before_a_call():
    code = (
        "import sys; from sglang_blockreuse.kernels import dispatch, flashinfer_attention\n"
        "bad = [m for m in sys.modules if m.split('.')[0] in ('sglang', 'flashinfer')]\n"
        "assert not bad, bad[:5]\n"
        "import sglang_blockreuse.kernels.scan, sglang_blockreuse.kernels.rotate_copy\n"
        "assert 'sglang' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
