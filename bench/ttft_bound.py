"""How fast the first token comes with known documents, and how far that is from the compute bound.

    python bench/ttft_bound.py [--prompts 12] [--out FILE.json] [--model-path P]

Three times per prompt, in one run on the same machine:

    stock   SGLang without block reuse, the same attention kernels: a full prefill behind the system prompt
    ours    the extended server, all documents known
    bound   the extended server, nothing marked, extending an exactly cached prefix of the same length by as many
            tokens as `ours` computed: what the computation costs if finding, moving and folding were free
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm
from transformers import AutoTokenizer

from sglang_blockreuse.demo import environment
from sglang_blockreuse.demo.client import EndOfTurn, time_prompt
from sglang_blockreuse.demo.documents import make_documents
from sglang_blockreuse.demo.prompts import Prompt, PromptMaker, measured_prompts, warm_up_prompts
from sglang_blockreuse.model import ensure_model
from sglang_blockreuse.server_process import Server, extended_command, running_server, stock_command

NUM_DOCUMENTS, PER_PROMPT = 12, 8


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=12, help="measured prompts (default: %(default)s)")
    parser.add_argument("--model-path", type=Path, help="default: SmolLM2-135M-Instruct, made if missing")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the measurements as JSON")
    options = parser.parse_args()
    model = options.model_path or ensure_model()
    results = measure(model, options.prompts, options.seed)
    print(report(results))
    if options.out:
        options.out.write_text(json.dumps(results, indent=1) + "\n")
    return 0


def measure(model: Path, num_prompts: int, seed: int) -> dict[str, Any]:
    tokenizer = AutoTokenizer.from_pretrained(model)
    end = EndOfTurn(tokenizer.eos_token_id, tokenizer.eos_token)
    documents = make_documents(
        NUM_DOCUMENTS,
        seed=seed,
        num_tokens=lambda t: len(tokenizer(t, add_special_tokens=False)["input_ids"]),
    )
    maker = PromptMaker(tokenizer, documents)
    warm_up = warm_up_prompts(maker, NUM_DOCUMENTS, per_prompt=PER_PROMPT)
    prompts = measured_prompts(maker, documents, num_prompts=num_prompts, per_prompt=PER_PROMPT, seed=seed)
    rng = random.Random(seed)

    def first_token(server: Server, prompt: Prompt, *, marked: bool) -> Any:
        return time_prompt(server, prompt, marked=marked, num_new_tokens=1, end=end)

    rows: list[dict[str, Any]] = [{"tokens": len(p.input_ids)} for p in prompts]
    with tempfile.TemporaryDirectory() as logs:
        words = ["--model-path", str(model)]
        stock = stock_command([*words, "--attention-backend", "blockreuse"])
        with running_server(stock, log=Path(logs) / "stock.log") as server:
            first_token(server, warm_up[0], marked=False)
            for prompt, row in tqdm(list(zip(prompts, rows, strict=True)), desc="stock", file=sys.stderr):
                row["stock_ms"] = first_token(server, prompt, marked=False).ttft_ms
        with running_server(extended_command(words), log=Path(logs) / "ours.log") as server:
            for prompt in warm_up:
                first_token(server, prompt, marked=True)
            for prompt, row in tqdm(list(zip(prompts, rows, strict=True)), desc="ours", file=sys.stderr):
                before = seconds(server)
                ours = first_token(server, prompt, marked=True)
                usage = ours.usage
                num_computed = usage["repaired_tokens"] + usage["fresh_tokens"]
                row |= {
                    "ours_ms": ours.ttft_ms,
                    "copy_ms": 1e3 * (seconds(server) - before),
                    "computed": num_computed,
                    "reused": usage["reused_tokens"],
                    "prefix": usage["prefix_tokens"],
                    "repaired_share": usage["recompute_ratio"],
                }
                # the same prompt in full, so that all but its end can be an exact prefix
                first_token(server, prompt, marked=False)
                tail = [rng.randrange(100, 40_000) for _ in range(num_computed)]
                extended = Prompt((*prompt.input_ids[:-num_computed], *tail), (), (), "", "")
                bound = first_token(server, extended, marked=False)
                assert bound.cached_tokens == len(prompt.input_ids) - num_computed, (
                    "the bound missed its prefix"
                )
                row["bound_ms"] = bound.ttft_ms
    return {"environment": environment.describe(), "seed": seed, "model": model.name, "prompts": rows}


def seconds(server: Server) -> float:
    """Seconds that the server has spent copying KV so far."""
    counts = server.get("/server_info")["internal_states"][0]["blockreuse"]["counts"]
    return float(counts.get("copy_seconds_total", 0.0))


def report(results: dict[str, Any]) -> str:
    rows = results["prompts"]

    def median(key: str) -> float:
        return statistics.median(row[key] for row in rows)

    stock_ratio = statistics.median(row["stock_ms"] / row["ours_ms"] for row in rows)
    bound_ratio = statistics.median(row["ours_ms"] / row["bound_ms"] for row in rows)
    columns = {
        "tokens": 7,
        "prefix": 7,
        "reused": 7,
        "computed": 9,
        "stock ms": 9,
        "ours ms": 8,
        "bound ms": 9,
    }
    lines = [" ".join(name.rjust(width) for name, width in columns.items())]
    lines += [
        f"{r['tokens']:>7} {r['prefix']:>7} {r['reused']:>7} {r['computed']:>9} "
        f"{r['stock_ms']:>9.0f} {r['ours_ms']:>8.0f} {r['bound_ms']:>9.0f}"
        for r in rows
    ]
    rest = median("ours_ms") - median("bound_ms")
    lines += [
        f"median: stock {median('stock_ms'):.0f} ms, ours {median('ours_ms'):.0f} ms, "
        f"bound {median('bound_ms'):.0f} ms; |T|/N {100 * median('repaired_share'):.1f} %",
        f"stock / ours {stock_ratio:.1f}, ours / bound {bound_ratio:.2f}; "
        f"ours - bound {rest:+.0f} ms, of which copying KV {median('copy_ms'):.0f} ms",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
