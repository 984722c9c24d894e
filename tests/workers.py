"""Which tests stay on one worker of a run with several: those of one file, and of files that share their servers."""

from __future__ import annotations

from pathlib import PurePath

from xdist.scheduler import LoadScopeScheduling

# server -> files whose tests take it; all other files are on their own
SHARED = {
    "common": (
        "test_exactness test_leases test_bench_retrieval_run test_api test_sparse_server test_public_reports "
        "test_unmarked test_top_of_servers"
    ),
    "language model": "test_language_model test_examples test_bench_engine",
    "marked": "test_marking_server test_bench_tasks_rows",
}
SERVER_OF = {file: server for server, files in SHARED.items() for file in files.split()}


class ByServer(LoadScopeScheduling):
    """Hands files to workers as a whole, and those that share a server to the same one."""

    def _split_scope(self, nodeid: str) -> str:
        file = PurePath(nodeid.split("::")[0]).stem
        return SERVER_OF.get(file, file)
