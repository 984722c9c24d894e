"""The command `sglang-blockreuse`: one file per command in sglang_blockreuse/commands/.

A command module has `HELP` (one line), `add_arguments(parser)` and `run(arguments) -> exit status`.
Those of HANDED_ON get the words as they stand: what follows `serve` belongs to SGLang, what follows
`calibrate-blocks` to a script that is no part of the wheel.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any

from . import __version__

# In the order of `--help`; the name of a command is the name of its module.
COMMANDS = (
    "serve",
    "model",
    "check",
    "demo",
    "compile",
    "top",
    "explain-request",
    "plan",
    "calibrate",
    "calibrate-blocks",
    "bench",
)
HANDED_ON = ("serve", "calibrate-blocks")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; 2 for words that make no command."""
    words = list(sys.argv[1:] if argv is None else argv)
    if words and words[0] in HANDED_ON:
        return int(_load(words[0]).run(words[1:]))
    arguments = build_parser().parse_args(words)
    return int(arguments.run(arguments))


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="sglang-blockreuse",
        description="Document-block KV reuse and layer plans for SGLang.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = _load(name)
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=module.__doc__,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser


def _load(name: str) -> Any:
    return importlib.import_module(f".commands.{name.replace('-', '_')}", __package__)


if __name__ == "__main__":
    sys.exit(main())
