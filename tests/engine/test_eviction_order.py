"""What leaves a full pool first: paths that nobody asked for, before homes that a few requests did without."""

from __future__ import annotations

import pytest
from laws.distinct_orders import DOC_LEN, FLAGS, distinct_orders, generate, know_all
from looks import counts, risen
from prompts import usage
from servers import lease

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def server():
    with lease(*FLAGS) as running:
        yield running


def test_documents_that_fit_the_pool_stay_in_it_whatever_orders_they_come_in(server):
    """Every order is new, so hardly a path is used again; in the order of last use they would push out 11 homes."""
    know_all(server)
    again = sum(usage(generate(server, order))["compiled_tokens"] for order in distinct_orders(15))
    assert again <= 2 * DOC_LEN


@pytest.mark.parametrize(("num_asked", "is_kept"), [(1, True), (0, False)], ids=["asked for", "control"])
def test_a_path_that_was_asked_for_once_is_kept_like_a_home(server, num_asked, is_kept):
    """The control: nobody asked for it, and it is gone after a few orders."""
    know_all(server)
    order = (4, 3, 2, 1, 0)
    before = counts(server)
    for _ in range(1 + num_asked):
        generate(server, order)
    assert bool(risen(server, before, "path_tokens_total")) == bool(num_asked)
    for other in distinct_orders(4, seed=3):
        generate(server, other)
    before = counts(server)
    generate(server, order)
    assert bool(risen(server, before, "path_tokens_total")) == is_kept
