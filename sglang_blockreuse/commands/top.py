"""Watch a running server: requests, where prompt tokens came from, compile, guard, decode rows, KV pool, latency.

Reads /metrics and /server_info, so the server needs --enable-metrics. `--once` prints one table and ends.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..top import Line

HELP = "watch a running server in the terminal"
DEFAULT_EVERY_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", required=True, help="of the server, for example http://localhost:30000")
    parser.add_argument(
        "--every", type=_seconds, default=DEFAULT_EVERY_S, metavar="S", help="seconds between looks"
    )
    parser.add_argument(
        "--once", action="store_true", help="print one table, of all since the server started"
    )
    parser.add_argument("--api-key", metavar="KEY", help="of the server, if it was started with --api-key")


def _seconds(word: str) -> float:
    value = float(word)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{word} is no time between looks: give 0.1 to 3600 seconds")
    return value


def run(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from ..top import TopError, lines, scrape

    url = arguments.url.rstrip("/")
    try:
        first = scrape(url, api_key=arguments.api_key)
        if arguments.once:
            Console(highlight=False).print(table(lines(first), url))
            return 0
        _watch(url, arguments, first)
    except KeyboardInterrupt:
        return 130
    except TopError as error:
        print(f"sglang-blockreuse top: {error}", file=sys.stderr)
        return 1
    return 0


def _watch(url: str, arguments: argparse.Namespace, before: Any) -> None:
    """Until interrupted. Raises TopError when the server goes away."""
    from rich.live import Live

    from ..top import lines, scrape

    with Live(table(lines(before), url), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(arguments.every)
            now = scrape(url, api_key=arguments.api_key)
            live.update(table(lines(now, before), url), refresh=True)
            before = now


def table(lines: Iterable[Line], title: str) -> Any:
    """The lines as a table of rich, a rule between groups."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    grid = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
    for heading in ("", "what", "since start", "now", "share"):
        grid.add_column(heading, justify="left" if heading in ("", "what") else "right", no_wrap=True)
    group = None
    for line in lines:
        if line.group != group and group is not None:
            grid.add_section()
        shown = line.group if line.group != group else ""
        group = line.group
        grid.add_row(shown, line.name, _total(line), _now(line), _percent(line.share))
    return grid


def _total(line: Line) -> str:
    if line.total is None:
        return "-"
    if line.unit:
        return f"{line.total:,.0f} {line.unit}"
    return f"{line.total:,.0f}" if line.total == int(line.total) else f"{line.total:,.2f}"


def _now(line: Line) -> str:
    if line.now is None:
        return ""
    return f"{line.now:,.0f} {line.unit}" if line.unit else f"{line.now:,.1f}/s"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"
