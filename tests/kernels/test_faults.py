"""The faults of mutation_check.py still fit the source; the check itself is `python tests/mutation_check.py`."""

from __future__ import annotations

import pytest
from mutation_check import FAULTS
from places import ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.file}: {fault.name}")
def test_the_text_to_change_is_there(fault):
    assert fault.old in (ROOT / fault.file).read_text()
    assert fault.new != fault.old
    file = fault.tests.split()[0]
    assert (ROOT / file).is_file()
    assert "nightly" not in file, "the default tier must notice"


def test_there_are_many_and_each_has_a_name_of_its_own():
    assert len({(fault.file, fault.name) for fault in FAULTS}) == len(FAULTS) >= 60
