"""Warm a running server: prefill documents, so that the first request that brings them reuses them.

Every FILE is a document; with --separator a file is cut at that text into several. A document is taken as it
stands, white space included, because the block of a request must have the same text to have the same tokens.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "prefill documents on a running server"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="text file of one document, UTF-8"
    )
    parser.add_argument("--url", required=True, help="of the server, for example http://localhost:30000")
    prefix = parser.add_mutually_exclusive_group()
    prefix.add_argument(
        "--compile-prefix",
        metavar="TEXT",
        help="what stands in front of the first document in your requests, as the chat template renders it; not "
        "needed where the server has blocks.compile_prefix_text",
    )
    prefix.add_argument("--prefix-file", type=Path, metavar="F", help="a file with that text")
    parser.add_argument("--separator", metavar="TEXT", help="cut every file at this text into documents")
    parser.add_argument("--cache-salt", metavar="S", help="compile for requests with this cache_salt")
    parser.add_argument("--extra-key", metavar="K", help="compile for requests with this extra_key")
    parser.add_argument("--api-key", metavar="KEY", help="of the server, if it was started with --api-key")


def run(arguments: argparse.Namespace) -> int:
    from ..warm import Options, WarmError, warm

    try:
        warm(
            Options(
                url=arguments.url.rstrip("/"),
                files=tuple(arguments.files),
                prefix=arguments.compile_prefix,
                prefix_file=arguments.prefix_file,
                separator=arguments.separator,
                cache_salt=arguments.cache_salt,
                extra_key=arguments.extra_key,
                api_key=arguments.api_key,
            )
        )
    except KeyboardInterrupt:
        print("\nsglang-blockreuse compile: stopped", file=sys.stderr)
        return 130
    except WarmError as error:
        print(f"sglang-blockreuse compile: {error}", file=sys.stderr)
        return 1
    return 0
