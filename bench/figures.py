"""Measure every figure that README and docs/results.md show, and write their tables from what was measured.

    sglang-blockreuse bench figures --out DIR                     all stages, about two hours on two CPU cores
    sglang-blockreuse bench figures --out DIR --quick             the same stages, small, in minutes: does all work?
    sglang-blockreuse bench figures --out DIR --only cold soak    some of them
    sglang-blockreuse bench figures --out DIR --publish           results into bench/results, tables into the pages

A stage whose result is there is not measured again, so a run that was stopped goes on; --again measures anew. Each
stage is a command of its own, shown before it runs, in a folder of its name. Times need a machine without other work.
"""

from __future__ import annotations

import argparse
import gzip
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import launch
import published_tables
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
PUBLISHED = ROOT / "bench" / "results" / "cpu"
FRONT_DOOR = (sys.executable, "-m", "sglang_blockreuse.cli")
# exit statuses of a benchmark that measured: 1 says that a gate is red or a bar was missed, which is a result
MEASURED = (0, 1)


@dataclass(frozen=True)
class Stage:
    """One command and what it leaves.

    words: behind `sglang-blockreuse`; "{out}" is the stage's folder, "{model}" that of the small model.
    quick: words that are added for a quick run.
    result: its records, relative to the folder; figure: its picture, if it makes one.
    """

    name: str
    words: tuple[str, ...]
    result: str
    figure: str | None = None
    quick: tuple[str, ...] = ("--quick",)

    def command(self, out: Path, *, quick: bool) -> list[str]:
        given = [word.format(out=out, model=_model(word)) for word in self.words]
        if not quick:
            return [*FRONT_DOOR, *given]
        # flags for the servers stay last, behind their dashes
        end = given.index("--") if "--" in given else len(given)
        return [*FRONT_DOOR, *given[:end], *self.quick, *given[end:]]


def bench(name: str, words: str) -> tuple[str, ...]:
    return ("bench", name, "--out", "{out}", *words.split())


PLANS = ("reuse", "reuse-9", "pool", "pool-8", "three-role")

STAGES = (
    Stage("demo", ("demo", "--out", "{out}"), "results.json", "ttft.png"),
    Stage(
        "quality",
        bench(
            "quality",
            "--split held-out --seed 41 42 43 --per-category 2 --new-tokens 16 --oracle-only "
            "--policies query seam@0.05 random@0.05 --budgets 0.025 0.05 0.1 --homes library-2 leading prompt-2 "
            "-- --dtype float32",
        ),
        "quality.jsonl",
        "quality.png",
    ),
    Stage(
        "quality-leading",
        bench(
            "quality",
            "--split held-out --per-category 4 --new-tokens 16 --homes leading -- --dtype float32",
        ),
        "quality.jsonl",
        "quality.png",
    ),
    Stage(
        "serving",
        bench(
            "serving",
            "--arms stock seam query --policies seam query --rounds 3 --requests 24",
        ),
        "serving.jsonl",
        "serving.png",
    ),
    Stage(
        "cold",
        bench("serving", "--traffic cold --arms stock seam --rounds 4 --requests 8 --clients 1 --sample 16"),
        "serving.jsonl",
    ),
    Stage(
        "unmarked",
        bench(
            "serving", "--traffic cold --arms stock unmarked --rounds 6 --requests 8 --clients 4 --sample 4"
        ),
        "serving.jsonl",
    ),
    Stage(
        "plans",
        (
            *(
                "calibrate",
                "{model}",
                "--out",
                "{out}",
                "--texts",
                "2",
                "--rows",
                "32",
                "--k",
                "64",
                "128",
                "256",
            ),
            *("--evaluate", *(f"smollm2-135m-{name}" for name in PLANS)),
        ),
        "report.json",
        quick=("--rows", "4", "--texts", "1"),
    ),
    Stage(
        "layer-plan",
        bench("layer-plan", "--plan smollm2-135m-three-role --batch 1 8 --context 2048 4096 7500 --stock"),
        "layer-plan.jsonl",
        "layer-plan.png",
    ),
    Stage("retrieval", bench("retrieval", "--plan smollm2-135m-facts --seed 1 --tries 8"), "retrieval.jsonl"),
    Stage(
        "attention",
        ("bench", "attention", "--json", "{out}/attention.json"),
        "attention.json",
        quick=("--repeats", "3", "--case", "decode-1x4096"),
    ),
    Stage("soak", bench("soak", "--minutes 20"), "soak.jsonl", quick=("--minutes", "1")),
)


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    chosen = [stage for stage in STAGES if stage.name in options.only]
    if options.publish:
        return publish(chosen, options.out)
    failed = []
    for stage in tqdm(chosen, desc="stages", file=sys.stderr):
        folder = options.out / stage.name
        if finished(folder) and not options.again:
            tqdm.write(f"{stage.name}: measured already, see {folder}", file=sys.stderr)
        elif (status := run_stage(stage, folder, quick=options.quick)) not in MEASURED:
            failed.append(f"{stage.name} (exit status {status})")
    if failed:
        print(f"bench figures: did not measure: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    names = [stage.name for stage in STAGES]
    parser = argparse.ArgumentParser(
        prog="bench figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a folder for each stage")
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="STAGE", help=", ".join(names)
    )
    parser.add_argument("--quick", action="store_true", help="every stage as small as it can be")
    parser.add_argument("--again", action="store_true", help="measure what is measured already")
    parser.add_argument("--publish", action="store_true", help="measure nothing, write what --out holds")
    return parser.parse_args(argv)


def run_stage(stage: Stage, folder: Path, *, quick: bool) -> int:
    """Run the command; a mark is left only where it measured and its result is there."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "finished").unlink(missing_ok=True)
    command = stage.command(folder, quick=quick)
    tqdm.write(f"{stage.name}: sglang-blockreuse {' '.join(command[len(FRONT_DOOR) :])}", file=sys.stderr)
    status = subprocess.run(command, check=False).returncode
    if status in MEASURED and (folder / stage.result).is_file():
        (folder / "finished").write_text(f"exit status {status}{', quick' if quick else ''}\n")
        return status
    return status if status not in MEASURED else 2


def finished(folder: Path) -> bool:
    return (folder / "finished").is_file()


def publish(stages: Sequence[Stage], out: Path) -> int:
    """Copy what was measured in full into bench/results, and write the published tables from what lies there.

    Raises:
        ValueError: a stage was measured with --quick only: no figure comes from that.
    """
    PUBLISHED.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        folder = out / stage.name
        if not finished(folder):
            print(f"{stage.name}: not measured in {out}, what was published before stays", file=sys.stderr)
            continue
        if "quick" in (folder / "finished").read_text():
            raise ValueError(f"{folder} was measured with --quick; measure it in full to publish it")
        text = (folder / stage.result).read_text()
        write_result(text, PUBLISHED / f"{stage.name}{Path(stage.result).suffix}.gz")
        if stage.figure:
            shutil.copyfile(folder / stage.figure, PUBLISHED / f"{stage.name}.png")
        if (page := (folder / stage.result).with_suffix(".md")).is_file():
            shutil.copyfile(page, PUBLISHED / f"{stage.name}.md")
    for page in published_tables.PAGES:
        path = ROOT / page
        path.write_text(published_tables.rewrite(path.read_text(), PUBLISHED))
    return 0


def write_result(text: str, path: Path) -> None:
    """Records without the paths of the machine they were measured on, compressed to the same bytes every time."""
    documents = text.splitlines() if path.name.endswith(".jsonl.gz") else [text]
    clean = "".join(json.dumps(without_paths(json.loads(one))) + "\n" for one in documents)
    path.write_bytes(gzip.compress(clean.encode(), mtime=0))


def without_paths(value: Any) -> Any:
    """Absolute paths by their last part alone."""
    if isinstance(value, dict):
        return {key: without_paths(part) for key, part in value.items()}
    if isinstance(value, list):
        return [without_paths(part) for part in value]
    is_path = isinstance(value, str) and value.startswith("/") and " " not in value and "\n" not in value
    return Path(value).name if is_path else value


def _model(word: str) -> str:
    """The small model's folder, made only for the commands that name it."""
    if "{model}" not in word:
        return ""
    from sglang_blockreuse.model import ensure_model

    return str(ensure_model())


if __name__ == "__main__":
    sys.exit(launch.guarded("bench figures", main))
