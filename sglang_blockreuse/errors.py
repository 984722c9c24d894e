"""What errors say of a value: enough to recognise it, bounded whatever was sent, and safe to print."""

from __future__ import annotations

import reprlib
from typing import Any

MAX_LEN = 80
MAX_TEXT_LEN = 300


class _Repr(reprlib.Repr):
    """Looks at the beginning of a value only."""

    def repr_dict(self, x: Any, level: int) -> str:
        return "an object"  # `reprlib` would sort the keys of a large one


_bounded = _Repr()
_bounded.maxstring = _bounded.maxother = _bounded.maxlong = MAX_LEN


def short(value: object) -> str:
    """`repr` of a value in at most MAX_LEN printable characters; takes no longer for a large one."""
    try:
        text = _bounded.repr(value)
    except ValueError:  # Python refuses to print an integer of many digits
        text = f"<{type(value).__name__} too long to print>"
    return text if len(text) <= MAX_LEN else text[: MAX_LEN - 3] + "..."


def clipped(error: object) -> str:
    """A message of somebody else's, which may hold a value: its beginning and its end, printable."""
    text = "".join(c if c.isprintable() else " " for c in str(error))
    half = MAX_TEXT_LEN // 2
    return text if len(text) <= MAX_TEXT_LEN else f"{text[:half]} ... {text[-half:]}"
