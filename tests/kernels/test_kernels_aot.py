"""kernels/aot_table.json describes the kernels as they are, and what it describes is fit for a hot path."""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest
from places import ROOT

SCRIPT = ROOT / "bench" / "kernel_aot.py"
REMEDY = "run `python bench/kernel_aot.py` and commit kernels/aot_table.json"

# what one block may take: bytes of shared memory by target, registers of a multiprocessor
MAX_SHARED_BYTES = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024}
MAX_REGISTERS = 65536


@pytest.fixture(scope="module")
def aot():
    spec = importlib.util.spec_from_file_location("kernel_aot", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["kernel_aot"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def table():
    return json.loads((ROOT / "kernels" / "aot_table.json").read_text())


def entries(table):
    for key, launch in table["launches"].items():
        for target in MAX_SHARED_BYTES:
            if target in launch:
                yield key, target, launch["constants"], launch[target]


def test_the_table_was_made_from_this_code(aot, table):
    assert table["code"] == aot.code_digests(), f"a kernel changed after the table was made: {REMEDY}"


def test_the_table_holds_every_launch_with_its_constants(aot, table):
    constants = {key: launch["constants"] for key, launch in table["launches"].items()}
    assert constants == aot.launch_constants(), f"a launch changed after the table was made: {REMEDY}"


def test_every_launch_was_compiled_for_every_target_of_its_types(aot, table):
    for config in aot.configs():
        launches = [
            launch for key, launch in table["launches"].items() if key.startswith(f"{config.name} · ")
        ]
        assert launches, config.name
        for launch in launches:
            missing = [t for t in aot.TARGETS if t >= config.min_target and f"sm_{t}" not in launch]
            assert not missing, f"{config.name}: not compiled for {missing}; {REMEDY}"


def test_no_kernel_spills_or_uses_local_memory(table):
    wrong = {
        f"{target} {key}": used
        for key, target, _, used in entries(table)
        if used["stack_bytes"] or used["local_bytes"]
    }
    assert not wrong


def test_every_block_fits_its_multiprocessor(table):
    for key, target, constants, used in entries(table):
        assert used["shared_bytes"] <= MAX_SHARED_BYTES[target], (key, target)
        assert used["registers"] * 32 * constants.get("num_warps", 4) <= MAX_REGISTERS, (key, target)


def test_a_kernel_that_spills_is_seen(aot, table):
    """The negative control: the bounds above are not met by everything."""
    spilling = json.loads(json.dumps(table))
    next(iter(spilling["launches"].values()))["sm_90"]["stack_bytes"] = 8
    with pytest.raises(AssertionError):
        test_no_kernel_spills_or_uses_local_memory(spilling)
