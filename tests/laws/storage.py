"""Homes on storage: what a server finds that another one left there."""

from __future__ import annotations

import json
import time
from pathlib import Path

import requests
from laws.host_memory import DOC_LEN, FLAGS, SYSTEM_LEN, generate
from servers import COMMON, no_company

BEFORE, AFTER = (0, 1, 2, 3), (3, 1, 0, 2)  # the same documents, of which all but the first are moved
NUM_HOMES = 3  # the first document of AFTER is an exact prefix, which the host fetches for the prompt itself


def flags_of(store: Path) -> tuple[str, ...]:
    settings = {"file_storage_path": str(store)}
    storage = ("--hicache-storage-backend", "file", "--hicache-storage-prefetch-policy", "wait_complete")
    # companions are chosen anew by a server that starts
    flags = (*COMMON, *FLAGS, *no_company(store.parent), *storage)
    return (*flags, "--hicache-storage-backend-extra-config", json.dumps(settings))


def fill(server, store: Path, *, wait_s: float = 60.0) -> int:
    """Make the documents known and wait until they are stored; returns how many tokens are."""
    generate(server, BEFORE)
    deadline, exact = time.monotonic() + wait_s, SYSTEM_LEN + len(BEFORE) * DOC_LEN
    while len(list(store.iterdir())) < exact:
        assert time.monotonic() < deadline, "storage is not written"
        time.sleep(0.2)
    return len(list(store.iterdir()))


def refusal(server, method: str, path: str, **body) -> str:
    """What a server answers that does not do it."""
    answer = requests.request(method, server.url + path, json=body, timeout=120)
    assert not (answer.ok and answer.json().get("success", True)), answer.text
    return answer.text
