"""The rows of `bench tasks` are reused on a real server; nightly, lm-eval asks them."""

from __future__ import annotations

import pytest
import tasks
from looks import counts, risen
from marked import SEP, start

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(("separator", "reused"), [(SEP, True), ("<other>", False)], ids=["known", "unknown"])
def test_rows_are_reused_where_their_marks_arrive(tmp_path, separator, reused):
    words = ["--out", str(tmp_path), "--separator", separator, "--requests", "3", "--per-prompt", "3"]
    rows = list(tasks.facts(tasks.parse([*words, "--documents", "4"])))
    with start({"separator": SEP}) as server:
        before = counts(server)
        for row in rows:
            server.post("/v1/completions", model="small", prompt=row["prompt"], max_tokens=2, temperature=0)
        assert (risen(server, before, "tokens_total reused") > 0) is reused
