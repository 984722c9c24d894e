"""Leased servers: one start for one setting, an empty tree at each lease, and no server that somebody broke."""

from __future__ import annotations

import os
import signal

import pytest
from nursery import STARTS
from prompts import Library, ask, usage
from servers import lease

pytestmark = pytest.mark.engine
LIBRARY = Library(seed=71, doc_lens=(60, 50))


def known(server) -> int:
    """Tokens of the library's prompt that the server has."""
    return usage(ask(server, LIBRARY.prompt((0, 1))[0], new_tokens=1, blockreuse_mode="exact"))[
        "prefix_tokens"
    ]


def test_the_same_setting_is_the_same_server_with_an_empty_tree():
    with lease() as first:
        assert known(first) == 0
        assert known(first) > 100
        assert first.new_counts()["requests_total mode_exact"] == 2
    before = STARTS.total()
    with lease() as second:
        assert (second.pid, STARTS.total()) == (first.pid, before)
        assert second.new_counts() == {}
        assert "/generate" not in second.new_log_text()
        assert known(second) == 0, "nothing is left of the first lease"


def test_a_server_that_a_test_has_ended_is_started_anew():
    with lease("--max-running-requests", "2") as ended:
        os.killpg(ended.pid, signal.SIGKILL)
    with lease("--max-running-requests", "2") as server:
        assert server.pid != ended.pid
        assert known(server) == 0
