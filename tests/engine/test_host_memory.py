"""Homes in host memory, written through; nightly with the other write policies, tight pools and two ranks."""

from __future__ import annotations

import pytest
from laws.host_memory import FLAGS, SMALL, HostMemory, reused_when_known, run
from servers import lease

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def wanted():
    with lease() as large:
        return run(large)


class TestWriteThrough(HostMemory):
    @pytest.fixture(scope="class")
    def server(self):
        with lease(*FLAGS) as running:
            yield running


def test_without_host_memory_most_of_the_library_is_lost(wanted):
    """The control of the first law."""
    with lease(*SMALL) as small:
        found = run(small)
    assert reused_when_known(found) < reused_when_known(wanted) / 2
