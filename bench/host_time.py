"""Host time of one request's reuse: what its plan, its copies and its rows cost the scheduler's thread.

    python bench/host_time.py                          # this tree
    python bench/host_time.py --against ../main        # and another checkout, in turns

One request of 64 documents and 32,768 tokens, by every policy. Evidence is drawn, so nothing is probed; the pool has
one layer of one head, so that next to nothing is copied; devices are left out: what is timed is work of the host.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

NUM_DOCS, DOC, HEAD, QUESTION = 64, 508, 128, 128
END = HEAD + NUM_DOCS * DOC + QUESTION
REPEATS, WARM = 30, 3


def request(policy: str) -> tuple[Any, dict[str, Any]]:
    """Options, segments and evidence of the request."""
    import numpy as np

    from sglang_blockreuse.blocks.policy import Evidence
    from sglang_blockreuse.types import BlockOptions, Interval, LocalSegment

    spans = tuple(Interval(HEAD + i * DOC, HEAD + (i + 1) * DOC) for i in range(NUM_DOCS))
    options = BlockOptions("reuse", spans, policy, None, 0.05)
    segments = [LocalSegment(span, 1 + i, i, span.start) for i, span in enumerate(spans)]
    draw = np.random.default_rng(0)
    evidence = Evidence(draw.random((3, END), dtype=np.float32), draw.random(END, dtype=np.float32))
    return options, {"segments": segments, "evidence": evidence}


def plan(options: Any, given: dict[str, Any]) -> Any:
    from sglang_blockreuse.blocks.plan import build_plan

    return build_plan(given["segments"], start=0, end=END, options=options, evidence=given["evidence"])


class Step:
    """A prefill step of the one request."""

    def __init__(self) -> None:
        import torch

        from sglang_blockreuse.blocks.load import KvLoader
        from sglang_blockreuse.blocks.manager import BlockManager
        from sglang_blockreuse.blocks.rope import RopeGroup
        from sglang_blockreuse.blocks.step import PrefillSteps
        from sglang_blockreuse.config import Config
        from sglang_blockreuse.kernels.dispatch import Dispatcher
        from sglang_blockreuse.metrics import Metrics

        num_slots, metrics = 2 * END + 1, Metrics()
        pool = torch.zeros((num_slots, 1, 2))
        self.loader = KvLoader([pool], [pool.clone()], [RopeGroup("none", (0,), None, True)], Dispatcher())
        self.copied_s = 0.0
        move = self.loader._move

        def moved(*operands: Any) -> None:
            started = time.thread_time()
            move(*operands)
            self.copied_s += time.thread_time() - started

        self.loader._move = moved  # type: ignore[method-assign]
        blocks = BlockManager(config=Config(), tree=None, bos=None, pool_size=num_slots, metrics=metrics)
        self.steps = PrefillSteps(blocks, self.loader, metrics=metrics, num_layers=1)
        self.table = torch.arange(1, 2 * END + 1, dtype=torch.int32).view(2, END)
        self.homes = list(torch.arange(END + HEAD + 1, END + HEAD + 1 + NUM_DOCS * DOC).split(DOC))

    def milliseconds(self, options: Any, made: Any) -> float:
        """Of preparing the step, without the copy, which is the device's work."""
        import torch
        from sglang.srt.managers.schedule_batch import ScheduleBatch

        from sglang_blockreuse.types import RequestState, Usage

        state = RequestState(options, Usage(), plan=made, home_slots=self.homes)
        req = SimpleNamespace(rid="r", kv=SimpleNamespace(req_pool_idx=0), blockreuse=state)
        lens = torch.tensor([END])
        batch = ScheduleBatch(
            reqs=[req],
            prefix_lens=[0],
            extend_lens=[END],
            extend_logprob_start_lens=[END],
            seq_lens=lens,
            seq_lens_cpu=lens,
            orig_seq_lens=lens.int(),
            req_pool_indices=torch.tensor([0]),
            req_pool_indices_cpu=torch.tensor([0]),
            input_ids=torch.arange(END),
            out_cache_loc=self.table[0].long(),
        )
        self.copied_s, started = 0.0, time.thread_time()
        _, fold = self.steps.prepare(batch, self.table, lambda *forward: None)
        taken_s = time.thread_time() - started - self.copied_s
        assert fold is not None
        return 1e3 * taken_s


def measure() -> dict[str, dict[str, float]]:
    """Median milliseconds by policy: of a plan (at each admission) and of a step."""
    import sglang  # noqa: F401

    from sglang_blockreuse.blocks.policy import POLICIES

    step, found = Step(), {}
    for policy in POLICIES:
        options, given = request(policy)
        plans, steps = [], []
        # a policy that measures would start with a probe; its plan is folded as one of the layout's
        folded, _ = request("seam")
        for _ in range(WARM + REPEATS):
            started = time.thread_time()
            made = plan(options, given)
            plans.append(1e3 * (time.thread_time() - started))
            steps.append(step.milliseconds(folded, made))
        found[policy] = {"plan": median(plans[WARM:]), "step": median(steps[WARM:]), "rows": len(made.runs)}
    return found


def in_another(tree: Path) -> dict[str, dict[str, float]]:
    """The same in a process of its own, with the package of `tree`."""
    environment = {**os.environ, "PYTHONPATH": str(tree.resolve())}
    command = [sys.executable, str(Path(__file__).resolve()), "--json"]
    done = subprocess.run(command, env=environment, cwd=tree, capture_output=True, text=True, check=True)
    result: dict[str, dict[str, float]] = json.loads(done.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, metavar="TREE", help="another checkout, measured in turns")
    parser.add_argument("--json", action="store_true", help="one line of JSON")
    args = parser.parse_args()
    if args.json:
        print(json.dumps(measure()))
        return 0
    here = Path(__file__).resolve().parent.parent
    trees = [here] if args.against is None else [args.against, here]
    print(
        f"{NUM_DOCS} documents, {END} tokens; median of {REPEATS}, ms of CPU time of one thread per request"
    )
    print(f"{'tree':12}{'policy':14}{'rows':>6}{'plan':>8}{'step':>8}{'sum':>8}")
    for _ in range(2 if args.against else 1):
        for tree in trees:
            for policy, ms in in_another(tree).items():
                both = ms["plan"] + ms["step"]
                print(
                    f"{tree.resolve().name:12}{policy:14}{ms['rows']:6}{ms['plan']:8.2f}{ms['step']:8.2f}{both:8.2f}"
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
