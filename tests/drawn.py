"""How many cases a drawn test takes."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(num: int, **others: Any) -> settings:
    """`num` cases of a random seed under `--hypothesis-profile nightly`, else half as many, always the same."""
    nightly = settings.get_current_profile_name() == "nightly"
    return settings(max_examples=num if nightly else num // 2, **others)
