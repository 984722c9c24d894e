"""Scores an answer by whether it holds the asked fact, whatever else it says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def process_results(doc: dict[str, Any], results: Sequence[str]) -> dict[str, float]:
    return {"contains": float(doc["answer"].casefold() in results[0].casefold())}
