"""Results of earlier runs as Markdown and figures.

    sglang-blockreuse bench report --out DIR results/*/quality.jsonl results/*/serving.jsonl results/*/layer-plan.jsonl

Each file is one run and gets its own section; kind and options stand in its records. For every run a PNG of its name is
written to --out, and all sections to report.md. Runs of other configurations (another `--blocks beta=…`) are compared
by giving their files together.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import launch
import records
import report_decode
import report_quality
import report_serving

Record = dict[str, Any]
OTHERS = ("retrieval", "tasks", "kernels")  # runs that write a page of their own
KINDS = ("quality", "serving", "layer-plan", "soak")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="bench report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+", type=Path, metavar="JSONL")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    options = parser.parse_args(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    sections = [section(path, options.out) for path in options.files if is_shown(path)]
    text = "\n".join(sections)
    (options.out / "report.md").write_text(text)
    print(text)
    return 0


def is_shown(path: Path) -> bool:
    """Whether the file is a run that is drawn here; others are named and left out.

    Raises:
        ValueError: there is no such file.
    """
    if not path.is_file():
        raise ValueError(
            f"{path}: there is no such file. Run that benchmark first, or leave the file out; "
            "results/*/*.jsonl takes all that there are."
        )
    first = next(iter(records.read([path])), {})
    if first.get("record") not in OTHERS:
        return True
    print(f"{path}: a run of {first['record']} has a page of its own beside it, left out", file=sys.stderr)
    return False


def section(path: Path, out: Path) -> str:
    """One run's tables; its figure goes to `out`.

    Raises:
        ValueError: the file's first record names no kind of run.
    """
    found = records.read([path])
    kind = found[0]["record"] if found else "nothing"
    figure = out / f"{path.parent.name}-{path.stem}.png"
    if kind == "quality":
        text, problems = report_quality.tables(found)
        if not problems:
            report_quality.plot(found, figure)
    elif kind == "serving":
        text, _ = report_serving.tables(found)
        report_serving.plot(found, figure)
    elif kind == "layer-plan":
        text = report_decode.tables(found)
        report_decode.plot(found, figure)
    elif kind == "soak":
        return soak_section(found)
    else:
        raise ValueError(f"{path}: begins with {kind!r}, but a run begins with {', '.join(KINDS)}")
    return f"{text}\n![{figure.stem}]({figure.name})\n" if figure.exists() else text


def soak_section(found: Sequence[Record]) -> str:
    run, result = found[0], found[-1]
    if result["record"] != "soak_result":
        return f"### Soak\n\nStopped after {result.get('seconds', 0)} s, no result.\n"
    numbers = ", ".join(f"{kind} {num}" for kind, num in sorted(result["requests"].items()))
    slope = result["rss_mb_per_hour"]
    memory = "not watched" if slope is None else f"{slope:+,.0f} MB/h"
    verdict = "all held" if not result["problems"] else f"**{len(result['problems'])} problems**"
    shown = "".join(f"\n- {problem}" for problem in result["problems"][:10])
    return (
        f"### Soak: {run['options']['minutes']:g} minutes\n\n{report_quality.machine(run)}\n\n"
        f"{numbers}; {result['retracted']} retracted; resident memory {memory}; {verdict}.{shown}\n"
    )


if __name__ == "__main__":
    sys.exit(launch.guarded("bench report", main))
