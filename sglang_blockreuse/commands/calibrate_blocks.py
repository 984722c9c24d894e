"""Finds policy, budget, alpha, beta and the guard's bound for a model, and writes them as a configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from . import bench

HELP = "find the blocks configuration for a model (from a clone of the repository)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """None here: the words are handed on to bench/calibrate_blocks.py."""


def run(words: Sequence[str]) -> int:
    return bench.run_script("calibrate_blocks", words)
