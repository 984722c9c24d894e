"""The faults of mutation_check.py still fit the kernels; the check itself is `python tests/mutation_check.py`."""

from __future__ import annotations

import pytest
from mutation_check import FAULTS, ROOT


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_the_text_to_change_is_there(fault):
    source = (ROOT / "kernels" / fault.file).read_text()
    assert fault.old in source
    assert (ROOT / fault.tests.split()[0]).is_file()
