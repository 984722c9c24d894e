"""Nobody's answer depends on who else is in the step: two thousand hands, spread over every way to start the server."""

from __future__ import annotations

import pytest
from neighbour_run import run
from neighbour_table import TABLES, write_model

pytestmark = pytest.mark.engine
NUM_HANDS = 2000


@pytest.mark.nightly(twin="tests/engine/test_neighbours.py::test_neighbours_do_not_change_an_answer")
@pytest.mark.parametrize("name", TABLES)
def test_neighbours_do_not_change_an_answer(name, tmp_path):
    said: list[str] = []
    num = -(-NUM_HANDS // len(TABLES))
    tally = run(write_model(tmp_path / "model"), name, num=num, number=1, folder=tmp_path, say=said.append)
    assert not tally.found, "\n".join(said)
    assert tally.num_hands == num
    assert tally.num_met >= num // 5, "too few hands had neighbours in a folded step"
