"""Timed traffic through SGLang's own load generator, with one dataset class of ours.

The class is registered under a name of its own, so closed and open loops, percentiles and the names of the results are
`sglang.benchmark.serving`'s. Its command line takes no dataset from outside, so the generator is called from here.
"""

from __future__ import annotations

import contextlib
import random
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from documents import Marking, RagRequest
from sglang.benchmark import serving
from sglang.benchmark.datasets import DATASET_MAPPING
from sglang.benchmark.datasets.common import BaseDataset, DatasetRow
from sglang.test.test_utils import get_benchmark_args

from sglang_blockreuse.server_process import Server

DATASET = "blockreuse-rag"


@dataclass
class RagDataset(BaseDataset):
    """Rows of ready requests; handed over in `args.blockreuse_rows`, because they are more than a path and a number."""

    rows: list[DatasetRow]

    @classmethod
    def from_args(cls, args: Namespace) -> RagDataset:
        return cls(args.blockreuse_rows)

    def load(self, tokenizer: Any, model_id: str | None = None) -> list[DatasetRow]:
        return self.rows


def rows_of(
    requests: Sequence[RagRequest], marking: Marking | None, *, num_new_tokens: int
) -> list[DatasetRow]:
    """The requests as SGLang sends them; without a marking none carries marks."""
    rows = []
    for request in requests:
        ids = list(request.prompt.input_ids)
        # a row's sampling parameters replace the generator's, so all of them stand here
        sampling: dict[str, Any] = {"temperature": 0, "max_new_tokens": num_new_tokens, "ignore_eos": True}
        # the generator times text, and an end-of-turn token is none unless asked for
        sampling["skip_special_tokens"] = False
        if marking is not None and request.marked:
            params: dict[str, Any] = {"blockreuse_spans": list(request.prompt.spans)}
            params["blockreuse_policy"] = marking.policy
            if marking.budget is not None:
                params["blockreuse_budget"] = marking.budget
            sampling["custom_params"] = params
        rows.append(
            DatasetRow(
                prompt=ids,
                prompt_len=len(ids),
                output_len=num_new_tokens,
                extra_request_body={"sampling_params": sampling},
            )
        )
    return rows


def run_load(
    server: Server,
    rows: Sequence[DatasetRow],
    *,
    model: Path,
    clients: int | None,
    rate: float,
    seed: int,
    log: Path,
) -> dict[str, Any]:
    """Send the rows and return SGLang's result, per-request lists included.

    clients: requests in flight at most; with rate inf a closed loop.
    rate: arrivals per second, Poisson; inf: all at once.

    Raises:
        RuntimeError: not every request was answered.
    """
    DATASET_MAPPING[DATASET] = RagDataset
    args = get_benchmark_args(
        base_url=server.url,
        dataset_name=DATASET,
        tokenizer=str(model),
        num_prompts=len(rows),
        request_rate=rate,
        max_concurrency=clients,
        seed=seed,
    )
    args.model = str(model)
    args.blockreuse_rows = list(rows)
    args.cache_report = True
    args.warmup_requests = 0
    args.disable_tqdm = True
    args.output_file = str(log.with_suffix(".sglang.jsonl"))
    state = random.getstate()
    # the generator prints its own tables
    with log.open("a") as text, contextlib.redirect_stdout(text):
        result: dict[str, Any] = serving.run_benchmark(args)
    random.setstate(state)
    failed = [error for error in result["errors"] if error]
    if failed or result["completed"] != len(rows):
        first = failed[0].strip().splitlines()[-1] if failed else "no error was reported"
        raise RuntimeError(f"{result['completed']} of {len(rows)} requests were answered: {first}")
    return result
