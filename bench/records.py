"""Measurements as JSON lines: written as they come, so that a run that was stopped is a shorter run."""

from __future__ import annotations

import argparse
import gzip
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any


class Log:
    """Appends records to a file; keeps those of this run."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)

    def add(self, record: dict[str, Any]) -> None:
        self.records.append(record)
        with self.path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def of(self, **values: Any) -> list[dict[str, Any]]:
        """Records that hold these values."""
        return [r for r in self.records if all(r.get(key) == value for key, value in values.items())]


def plain(options: argparse.Namespace) -> dict[str, Any]:
    """Options as JSON can carry them: paths and infinities as text."""
    return {
        key: str(value) if isinstance(value, Path) or value == math.inf else value
        for key, value in vars(options).items()
    }


def read(paths: Iterable[Path]) -> list[dict[str, Any]]:
    """All records of these files; a name that ends in .gz is compressed.

    Raises:
        ValueError: a line is not JSON; the message has file and number.
    """
    records = []
    for path in paths:
        data = path.read_bytes()
        text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
        for number, line in enumerate(text.splitlines(), 1):
            try:
                records.append(json.loads(line))
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}:{number}: not JSON: {error}") from None
    return records
