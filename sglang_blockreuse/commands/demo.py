"""Show what document reuse does: the same prompts on a stock server and on ours, in turn.

Every prompt is a system message, some documents from a small pool in random order, and a question.
After a warm-up in which both servers see every document, time to first token, time per token and the
distributions of the first answer tokens are compared. Results go to results.json and ttft.png.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

HELP = "measure a stock server against ours on multi-document prompts"
DEFAULT_OUT = Path("blockreuse-demo")
QUICK_PROMPTS = 3


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--quick", action="store_true", help=f"{QUICK_PROMPTS} prompts, to see that all works"
    )
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, metavar="DIR", help=f"default: {DEFAULT_OUT}/"
    )
    parser.add_argument(
        "--prompts", type=positive_number, default=12, metavar="N", help="measured prompts (default: 12)"
    )
    parser.add_argument(
        "--documents",
        type=positive_number,
        default=12,
        metavar="M",
        help="documents in the pool (default: 12)",
    )
    parser.add_argument(
        "--per-prompt", type=positive_number, default=8, metavar="K", help="documents per prompt (default: 8)"
    )
    parser.add_argument(
        "--new-tokens", type=positive_number, default=24, metavar="N", help="tokens per answer (default: 24)"
    )
    parser.add_argument(
        "--scored", type=positive_number, default=8, metavar="N", help="answer tokens compared (default: 8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of documents, orders and questions (default: 0)")
    parser.add_argument(
        "--model-path", type=Path, metavar="P", help="default: SmolLM2-135M-Instruct, made if missing"
    )
    parser.add_argument(
        "--stock-attention",
        default="blockreuse",
        metavar="NAME",
        help="attention backend of the stock server; blockreuse (default) leaves reuse as the only difference, "
        "torch_native is what SGLang itself has for a CPU",
    )
    parser.add_argument(
        "server_flags", nargs="*", metavar="-- FLAG", help="SGLang flags for both servers, behind --"
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.per_prompt > arguments.documents:
        print(
            f"sglang-blockreuse demo: --per-prompt {arguments.per_prompt} is more than --documents "
            f"{arguments.documents}; a prompt holds each document at most once",
            file=sys.stderr,
        )
        return 2
    import requests

    from ..demo.run import NothingReused, Options
    from ..demo.run import run as run_demo
    from ..model import ModelError
    from ..server_process import ServerFailed

    options = Options(
        out=arguments.out,
        model_path=arguments.model_path,
        num_prompts=min(QUICK_PROMPTS, arguments.prompts) if arguments.quick else arguments.prompts,
        num_documents=arguments.documents,
        per_prompt=arguments.per_prompt,
        num_new_tokens=arguments.new_tokens,
        num_scored=min(arguments.scored, arguments.new_tokens),
        seed=arguments.seed,
        stock_attention=arguments.stock_attention,
        server_flags=tuple(arguments.server_flags),
    )
    try:
        run_demo(options)
    except KeyboardInterrupt:
        print("\nsglang-blockreuse demo: stopped", file=sys.stderr)
        return 130
    except (ServerFailed, ModelError, NothingReused, requests.RequestException) as error:
        print(f"sglang-blockreuse demo: {error}", file=sys.stderr)
        return 1
    return 0


def positive_number(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not allowed: give 1 or more")
    return number
