"""Send one request to a running server and show which of its tokens were repaired, in which document, and why.

FILE holds the JSON body of a /generate or a chat request, with its marks, as your client sends it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..explained import Explained

HELP = "show where each token of one request came from"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="JSON body of the request")
    parser.add_argument("--url", required=True, help="of the server, for example http://localhost:30000")
    parser.add_argument("--html", type=Path, metavar="F", help="write a page instead of coloured text")
    parser.add_argument("--api-key", metavar="KEY", help="of the server, if it was started with --api-key")


def run(arguments: argparse.Namespace) -> int:
    from ..explained import ExplainError, explain, page, read_body

    try:
        found = explain(arguments.url.rstrip("/"), read_body(arguments.file), api_key=arguments.api_key)
    except ExplainError as error:
        print(f"sglang-blockreuse explain-request: {error}", file=sys.stderr)
        return 1
    if arguments.html:
        arguments.html.write_text(page(found), encoding="utf-8")
        print(f"{found.summary()}\nWritten: {arguments.html}")
    else:
        show(found)
    return 0


def show(found: Explained) -> None:
    """In the terminal, coloured where that shows colours."""
    from rich.console import Console
    from rich.text import Text

    from ..explained import LEGEND, STYLES

    console = Console(highlight=False)
    console.print(Text(found.summary()))
    for kind, text in LEGEND.items():
        console.print(Text(kind, STYLES[kind][0]), Text(text))
    for title, pieces in found.documents():
        console.print(Text(f"\n[{title}]", "bold"))
        console.print(Text.assemble(*((piece.text, STYLES[piece.kind][0]) for piece in pieces)))
