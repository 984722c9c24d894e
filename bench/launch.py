"""Starts the servers of a benchmark with a bar, or names one that runs already."""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from tqdm import tqdm

from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import (
    START_MARKS,
    Server,
    extended_command,
    running_server,
    stock_command,
)

# Where cores are few, threads that spin while they wait take the other server's time.
QUIET = {"OMP_WAIT_POLICY": "PASSIVE"}
# A scheduler polls without pause unless told to sleep, which the servers that wait their turn must.
SLEEPING = ("--sleep-on-idle",)


def add_server_arguments(parser: argparse.ArgumentParser, *, max_total_tokens: int) -> None:
    """What every benchmark asks about its servers."""
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct, made if missing")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="DIR", help="folder of the results and logs"
    )
    parser.add_argument("--port", type=int, help="first of the ports to use; default: free ones")
    parser.add_argument(
        "--start-timeout", type=float, default=600.0, metavar="S", help="for each server (default: 600)"
    )
    parser.add_argument(
        "--max-total-tokens",
        type=int,
        default=max_total_tokens,
        help=f"KV pool of each server (default: {max_total_tokens})",
    )
    parser.add_argument(
        "--blocks",
        nargs="*",
        default=[],
        metavar="KEY=VALUE",
        help="keys of the `blocks` section of our server's configuration, e.g. beta=-1 alpha=-0.5",
    )
    parser.add_argument(
        "server_flags", nargs="*", metavar="-- FLAG", help="SGLang flags for every server, behind --"
    )


def guarded(name: str, main: Callable[[], int]) -> int:
    """Run a benchmark; what a user can mend is a message and a status, not a traceback."""
    try:
        return main()
    except KeyboardInterrupt:
        print(f"\n{name}: stopped; what was measured is in --out", file=sys.stderr)
        return 130
    # failed servers and models are RuntimeErrors, refused requests OSErrors
    except (ValueError, OSError, RuntimeError) as error:
        print(f"{name}: {error}", file=sys.stderr)
        return 1


def model_of(options: argparse.Namespace) -> Path:
    options.model = options.model or ensure_model()
    return Path(options.model)


def blocks_section(words: Sequence[str]) -> dict[str, Any]:
    """`["beta=-1"]` → `{"beta": -1}`; values are YAML.

    Raises:
        ValueError: a word without an equals sign.
    """
    section = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"--blocks {word}: give KEY=VALUE")
        section[key] = yaml.safe_load(value)
    return section


@contextlib.contextmanager
def stock(
    options: argparse.Namespace,
    *,
    name: str = "stock",
    offset: int = 0,
    attention: str = "blockreuse",
    flags: Sequence[str] = (),
) -> Iterator[Server]:
    """SGLang without block reuse, on our attention kernels unless told otherwise."""
    command = stock_command([*_flags(options), "--attention-backend", attention, *flags])
    with _started(name, command, options, offset) as server:
        yield server


@contextlib.contextmanager
def ours(
    options: argparse.Namespace,
    *,
    name: str = "ours",
    offset: int = 0,
    blocks: Mapping[str, Any] | None = None,
    layers: Mapping[str, Any] | None = None,
    flags: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    """`sglang-blockreuse serve` with these sections of its configuration; `blocks` else from the options."""
    sections = {
        "blocks": blocks_section(options.blocks) if blocks is None else dict(blocks),
        "layers": dict(layers or {}),
    }
    options.out.mkdir(parents=True, exist_ok=True)
    config = options.out / f"{name}.yaml"
    config.write_text(yaml.safe_dump(sections))
    command = extended_command([*_flags(options), "--blockreuse-config", str(config), *flags])
    with _started(name, command, options, offset, env) as server:
        yield server


def running(url: str) -> Server:
    """A server that somebody else runs."""
    return Server(url=url.rstrip("/"), log=Path("/dev/null"), pid=0)


def _flags(options: argparse.Namespace) -> list[str]:
    flags = ["--model-path", str(model_of(options)), "--max-total-tokens", str(options.max_total_tokens)]
    return [*flags, *SLEEPING, *options.server_flags]


@contextlib.contextmanager
def _started(
    name: str,
    command: Sequence[str],
    options: argparse.Namespace,
    offset: int,
    env: Mapping[str, str] | None = None,
) -> Iterator[Server]:
    port = options.port + offset if options.port else None
    with contextlib.ExitStack() as stack:
        # redrawn for a reader, not for a file
        bar = stack.enter_context(
            tqdm(total=len(START_MARKS), desc=f"{name}: start", file=sys.stderr, disable=None)
        )

        def show(marks: int) -> None:
            if marks > bar.n:
                bar.update(marks - bar.n)

        log = options.out / f"{name}.log"
        server = stack.enter_context(
            running_server(
                command,
                log=log,
                port=port,
                env={**QUIET, **(env or {})},
                timeout_s=options.start_timeout,
                on_progress=show,
            )
        )
        bar.close()
        yield server
