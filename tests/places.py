"""Where things of this repository stand, for tests in any folder."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[1]
PLUGIN = ROOT / "tests" / "plugin"  # the tests' own plug-in of SGLang
REHEARSAL_PLUGIN = ROOT / "tests" / "rehearsal" / "plugin"  # a platform that serves on the Triton interpreter
