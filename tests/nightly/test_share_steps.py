"""A hundred thousand random steps of the state that layers share, against its model."""

from __future__ import annotations

import pytest
from share_steps import take_steps


@pytest.mark.nightly(twin="tests/unit/test_share_state.py::test_five_thousand_steps_agree_with_the_model")
def test_a_hundred_thousand_steps_agree_with_the_model():
    assert take_steps(100_000) >= 100_000
