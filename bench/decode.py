"""Decode time per token on real servers: attention backend `blockreuse` against SGLang's `torch_native`, and with
--layer-plan `blockreuse` under that plan too.

    python bench/decode.py [--dtype bfloat16] [--contexts 4096 7500] [--batch 8] [--layer-plan NAME|PATH]
                           [--only plan blockreuse] [--out FILE.json]

One server after the other in one run, same model, same prompts. A batch shares all of its prompt but the last
tokens, so that its prefill is short; its decode reads as many keys per request as any other.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.client import EndOfTurn, time_prompt
from sglang_blockreuse.demo.prompts import Prompt
from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import Server, extended_command, running_server, stock_command

BACKENDS = ("torch_native", "blockreuse", "plan")
NEVER = EndOfTurn(-1, "\0")  # answers are never cut


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model-path", type=Path, help="default: SmolLM2-135M-Instruct, made if missing")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--contexts", type=int, nargs="+", default=[4096, 7500])
    parser.add_argument(
        "--batch", type=int, default=8, help="requests of the batched case at the longest context"
    )
    parser.add_argument("--tokens", type=int, default=32, help="decoded tokens per request")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layer-plan", metavar="NAME|PATH", help="a third server, under this plan")
    parser.add_argument("--only", nargs="+", choices=BACKENDS, help="leave the other servers out")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model = options.model_path or ensure_model()
    cases = [(1, n) for n in options.contexts] + [(options.batch, max(options.contexts))]
    wanted = [b for b in options.only or BACKENDS if b != "plan" or options.layer_plan]
    times = {backend: run_backend(backend, model, cases, options) for backend in wanted}
    print(
        f"{'batch':>6} {'context':>8} "
        + " ".join(f"{backend + ' ms':>17} {'ratio':>6}" for backend in wanted)
    )
    for case in cases:
        medians = [statistics.median(times[backend][str(case)]) for backend in wanted]
        cells = (f"{median:>17.1f} {median / medians[0]:>6.2f}" for median in medians)
        print(f"{case[0]:>6} {case[1]:>8} " + " ".join(cells))
    if options.out:
        record = {"environment": environment.describe(), "dtype": options.dtype, "tpot_ms": times}
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def run_backend(
    backend: str, model: Path, cases: list[tuple[int, int]], options: Any
) -> dict[str, list[float]]:
    flags = ["--model-path", str(model), "--dtype", options.dtype]
    flags += ["--max-total-tokens", "24000", "--max-running-requests", str(options.batch)]
    if backend == "plan":
        command = extended_command([*flags, "--layer-plan", options.layer_plan])
    else:
        # prefill of long prompts by ours everywhere: it is not what is timed, and torch_native's takes minutes
        backends = ["--prefill-attention-backend", "blockreuse", "--decode-attention-backend", backend]
        command = stock_command([*flags, *backends])
    times: dict[str, list[float]] = {}
    with (
        tempfile.TemporaryDirectory() as logs,
        running_server(command, log=Path(logs) / "server.log") as server,
        tqdm(total=len(cases) * (options.repeats + 1), desc=backend, file=sys.stderr) as bar,
    ):
        for case in cases:
            samples = []
            # the first pass prefills what the others find cached
            for _ in range(options.repeats + 1):
                samples.append(time_per_token(server, *case, options.tokens))
                bar.update()
            times[str(case)] = samples[1:]
    return times


def time_per_token(server: Server, batch: int, context: int, num_tokens: int) -> float:
    """Median over the requests of the mean time between tokens, in ms."""
    rng = random.Random(context)
    ids = [rng.randrange(100, 40_000) for _ in range(context - 8)]
    prompts = [Prompt((*ids, *range(1000 + 8 * i, 1008 + 8 * i)), (), (), "", "") for i in range(batch)]

    def tpot(prompt: Prompt) -> float:
        return time_prompt(server, prompt, marked=False, num_new_tokens=num_tokens, end=NEVER).tpot_ms

    if batch > 1:
        tpot(prompts[0])
    with concurrent.futures.ThreadPoolExecutor(batch) as pool:
        return statistics.median(pool.map(tpot, prompts))


if __name__ == "__main__":
    sys.exit(main())
