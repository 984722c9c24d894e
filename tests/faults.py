"""Deliberate faults: what is changed in which file, and the tests of the default tier that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    name: str
    file: str  # from the root of the repository
    old: str  # must stand in the file, once
    new: str
    tests: str  # pytest arguments that must notice
