"""What the tests of sparse decode share: a selection, rows, types, and how results are compared."""

from __future__ import annotations

import torch
from tolerances import EXACT, KERNEL_OUT

SELECTION = {"final_k": 24, "pool_size": 60, "sink": 4, "window": 8}
LENS = [700, 61, 513, 130, 300]
DTYPES = [torch.float32, torch.bfloat16]
LISTS = {
    "layer": {"heads": "layer"},
    "kv_head": {"heads": "kv_head"},
    "kv_head, lends layer": {"heads": "kv_head", "lend_heads": "layer"},
}


def check(got, expected, dtype):
    absolute, relative = KERNEL_OUT["cpu_attention", dtype]
    torch.testing.assert_close(got.double(), expected, atol=absolute, rtol=relative)


def same(got, expected):
    torch.testing.assert_close(got, expected, atol=EXACT[0], rtol=EXACT[1])
