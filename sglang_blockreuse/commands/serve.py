"""Launch an SGLang server with document-block reuse."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

HELP = "launch SGLang with block reuse; takes every flag of `sglang serve`"
EXAMPLES = {"--layer-plan": "full", "--blockreuse-config": "blockreuse.yaml"}
OUR_BACKENDS = {"--radix-cache-backend": "blockreuse", "--attention-backend": "blockreuse"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command; its words are not parsed here but handed to SGLang."""
    parser.usage = "sglang-blockreuse serve --model-path MODEL [options] [any flag of `sglang serve`]"
    parser.add_argument("--model-path", metavar="MODEL", help="folder or hub name of the model")
    parser.add_argument(
        "--blockreuse-config",
        metavar="PATH",
        help="YAML or JSON file; default: $SGLANG_BLOCKREUSE_CONFIG, else defaults",
    )
    parser.add_argument(
        "--layer-plan", metavar="NAME|PATH", help="layer plan for decode, shipped or in a file"
    )
    parser.epilog = (
        "Added unless you give them: "
        + " ".join(f"{flag} {value}" for flag, value in OUR_BACKENDS.items())
        + "\nEvery other word goes to SGLang unchanged: `sglang serve --help` lists its flags."
    )


def run(words: Sequence[str]) -> int:
    """Hand over to `sglang serve` in this process."""
    if any(word in ("-h", "--help") for word in words):
        parser = argparse.ArgumentParser(
            description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        add_arguments(parser)
        parser.print_help()
        return 0
    if problem := _problem(words):
        print(f"sglang-blockreuse serve: {problem}", file=sys.stderr)
        return 1
    from sglang.cli.main import main

    from ..config import ConfigError
    from ..layers.plan import PlanError

    sys.argv = ["sglang", "serve", *sglang_words(words)]
    try:
        main()
    except (ConfigError, PlanError) as error:
        print(f"sglang-blockreuse serve: {error}", file=sys.stderr)
        return 1
    return 0


def _problem(words: Sequence[str]) -> str | None:
    """What SGLang would say late, at length or not at all."""
    for flag in ("--layer-plan", "--blockreuse-config"):
        at = [i for i, word in enumerate(words) if word.partition("=")[0] == flag]
        if len(at) > 1:
            return f"{flag} stands {len(at)} times, but a server has one. Leave all but one out."
        if at and words[at[0]] == flag and (at[0] + 1 == len(words) or words[at[0] + 1].startswith("--")):
            return f"{flag} has no value. Give it one, for example {flag} {EXAMPLES[flag]}."
    for before, word in itertools.pairwise(words):
        is_local = word.startswith(("/", "./", "../", "~"))
        if before in ("--model-path", "--model") and is_local and not Path(word).expanduser().exists():
            return (
                f"{before} is {word}, and there is no such folder. Give the folder of a model, a hub name, or "
                '"$(sglang-blockreuse model --path)" for the small one.'
            )
    return None


def sglang_words(words: Sequence[str]) -> list[str]:
    """Add our backends where the user chose none, by a flag or in the file of SGLang's --config."""
    chosen = {word.partition("=")[0] for word in words} | _flags_in_config_file(words)
    ours = [word for flag, value in OUR_BACKENDS.items() if flag not in chosen for word in (flag, value)]
    # `sglang serve MODEL` takes the model first; of two equal flags argparse keeps the last, the user's
    first = 1 if words and not words[0].startswith("-") else 0
    return [*words[:first], *ours, *words[first:]]


def _flags_in_config_file(words: Sequence[str]) -> set[str]:
    """Flags set by `--config FILE`; SGLang reports a file that cannot be read, so this stays silent."""
    if "--config" not in words[:-1]:
        return set()
    import yaml

    try:
        settings = yaml.safe_load(Path(words[words.index("--config") + 1]).read_text())
    except (OSError, yaml.YAMLError):
        return set()
    keys = settings if isinstance(settings, dict) else {}
    return {f"--{str(key).replace('_', '-')}" for key in keys}
