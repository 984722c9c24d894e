"""Bytes and operations of one decode step, and the speed-up over dense attention that they allow.

    sglang-blockreuse bench limits --model MODEL_FOLDER --context 32768 131072 --batch 1 16 [--layer-plan NAME|PATH]
    sglang-blockreuse bench limits --heads 8 --q-heads 32 --head-dim 128 --layers 32 --weights-gb 16.06

Everything here is arithmetic on sizes, nothing is measured: a floor that a kernel can approach, never a forecast.
The formulae are those of kernels/README.md, "What a step must read".
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sglang_blockreuse.layers.plan_loader import load_plan


@dataclass(frozen=True)
class Model:
    num_layers: int
    num_heads: int  # KV heads
    num_q_heads: int
    head_dim: int
    kv_bytes: int = 2  # bytes of one stored channel
    weight_bytes: float = 0.0  # read once per step, whatever the batch

    @property
    def kv_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        return 2 * self.key_token_bytes

    @property
    def key_token_bytes(self) -> int:
        return self.num_heads * self.head_dim * self.kv_bytes

    @classmethod
    def from_config(cls, folder: Path, weight_bytes: float | None = None) -> Model:
        """Reads config.json of a Hugging Face model; weights are counted as bfloat16 unless given."""
        config = json.loads((folder / "config.json").read_text())
        num_q_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_q_heads
        if weight_bytes is None:
            weight_bytes = float(sum(file.stat().st_size for file in folder.glob("*.safetensors")))
        return cls(
            config["num_hidden_layers"],
            config.get("num_key_value_heads", num_q_heads),
            num_q_heads,
            head_dim,
            weight_bytes=weight_bytes,
        )


@dataclass(frozen=True)
class Plan:
    """How many layers play each role, and what they read."""

    name: str
    num_dense: int
    num_full: int
    num_reindex: int
    num_reuse: int
    final_k: int  # positions that attention reads in a sparse layer
    pool_size: int = 0  # positions that a reindex layer scores
    index_key_bytes: int = 0  # bytes per token of what a full layer scans and a reindex layer scores
    scores_keys: bool = False  # the scored keys are the KV's own, so only V of the selection is left to read

    @property
    def num_layers(self) -> int:
        return self.num_dense + self.num_full + self.num_reindex + self.num_reuse


def int4_key_bytes(model: Model) -> int:
    """Bytes per token of the int4 copy: half a byte a channel and 8 bytes of ranges a head."""
    return model.num_heads * (model.head_dim // 2 + 8)


def attention_bytes(model: Model, plan: Plan, context: int) -> float:
    """KV and index bytes that one row's step reads.

    dense    N kv                                         full     N index + k kv
    reindex  M index + k kv                               reuse    k kv
    where a layer that scored the keys themselves only reads V of its selection. A row that is not longer than k
    is dense; a pool that is not shorter than the row is the row.
    """
    if context <= plan.final_k:
        return float(plan.num_layers * context * model.kv_token_bytes)
    selected = plan.final_k * model.kv_token_bytes
    scored = selected // 2 if plan.scores_keys else selected
    pool = min(plan.pool_size, context)
    return float(
        plan.num_dense * context * model.kv_token_bytes
        + plan.num_full * (context * plan.index_key_bytes + scored)
        + plan.num_reindex * (pool * plan.index_key_bytes + scored)
        + plan.num_reuse * selected
    )


def dense_plan(model: Model) -> Plan:
    return Plan("dense", model.num_layers, 0, 0, 0, 0)


def step_bytes(model: Model, plan: Plan, context: int, batch: int) -> float:
    """Weights once, attention per row."""
    return model.weight_bytes + batch * attention_bytes(model, plan, context)


def speedup(model: Model, plan: Plan, context: int, batch: int | None = None) -> float:
    """Dense bytes over the plan's bytes: of attention alone, or of a whole step of `batch` rows."""
    if batch is None:
        return attention_bytes(model, dense_plan(model), context) / attention_bytes(model, plan, context)
    return step_bytes(model, dense_plan(model), context, batch) / step_bytes(model, plan, context, batch)


def crossover(model: Model, plan: Plan) -> float:
    """Context N* at which a full layer's scan costs as much as the KV it selects; below it sharing gains little."""
    return plan.final_k * model.kv_token_bytes / plan.index_key_bytes


def decode_flops(model: Model, num_keys: int) -> int:
    """Multiply-adds counted twice: q.k and p.v of every query head over `num_keys` keys of one layer."""
    return 4 * model.num_q_heads * model.head_dim * num_keys


def intensity(model: Model) -> float:
    """Operations per byte of decode attention: 2 G / bytes per channel, far below the ridge of any GPU."""
    return decode_flops(model, 1) / model.kv_token_bytes


def rotate_copy_bytes(model: Model, num_tokens: int) -> int:
    """K and V of every layer read once and written once."""
    return 2 * model.num_layers * num_tokens * model.kv_token_bytes


def sample_plans(model: Model, final_k: int, pool_size: int) -> list[Plan]:
    """The plans of the limits table: every layer full, and a quarter full with reuse or with a pool."""
    n, quarter, int4 = model.num_layers, model.num_layers // 4, int4_key_bytes(model)
    exact = model.key_token_bytes
    return [
        dense_plan(model),
        Plan("selected KV only", 0, 0, 0, n, final_k),
        Plan("exact keys, every layer full", 0, n, 0, 0, final_k, 0, exact, True),
        Plan("exact keys, 1/4 full + reuse", 0, quarter, 0, n - quarter, final_k, 0, exact, True),
        Plan("int4 keys, every layer full", 0, n, 0, 0, final_k, 0, int4),
        Plan("int4 keys, 1/4 full + reuse", 0, quarter, 0, n - quarter, final_k, 0, int4),
        Plan(f"int4 keys, 1/4 full + pool {pool_size}", 0, quarter, n - quarter, 0, final_k, pool_size, int4),
    ]


def plan_from_file(name_or_path: str, model: Model) -> Plan:
    """Counts the roles of a layer plan. Raises ValueError for a scorer whose bytes are not known here."""
    plan = load_plan(name_or_path).bind(model.num_layers, None)
    roles = Counter(layer.role for layer in plan.layers)
    if plan.selection is None:
        return dataclasses.replace(dense_plan(model), name=plan.name)
    known = {"exact_qk": model.key_token_bytes, "int4_keys": int4_key_bytes(model)}
    if plan.scorer.kind not in known:
        raise ValueError(
            f"{plan.source}: scorer.kind: {plan.scorer.kind} has no byte count here; known are {', '.join(known)}"
        )
    return Plan(
        plan.name,
        roles["dense"],
        roles["full"],
        roles["reindex"],
        roles["reuse"],
        plan.selection.final_k,
        plan.selection.pool_size or 0,
        known[plan.scorer.kind],
        plan.scorer.kind == "exact_qk",
    )


def table(model: Model, plans: Iterable[Plan], contexts: list[int], batches: list[int]) -> str:
    lines = [
        f"{model.kv_token_bytes} B of KV per token and layer, {intensity(model):.0f} operations per byte",
        "",
    ]
    lines.append(f"{'MB of KV and index per row and step':38}" + "".join(f"{c:>22,}" for c in contexts))
    for plan in plans:
        cells = []
        for context in contexts:
            megabytes = attention_bytes(model, plan, context) / 1e6
            cells.append(f"{megabytes:>13,.0f} ({speedup(model, plan, context):5.1f}x)")
        lines.append(f"{plan.name:38}" + "".join(f"{cell:>22}" for cell in cells))
        for batch in batches if model.weight_bytes else []:
            whole = "".join(f"{speedup(model, plan, context, batch):>21.2f}x" for context in contexts)
            lines.append(f"{f'  whole step, batch {batch}':38}" + whole)
        if plan.index_key_bytes:
            lines.append(f"  a scan costs its selection at N* = {crossover(model, plan):,.0f} tokens")
    return "\n".join(lines)


def plot(model: Model, plans: Iterable[Plan], path: Path, batch: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    contexts = [1 << p for p in range(12, 21)]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for plan in plans:
        axes.plot(contexts, [speedup(model, plan, c, batch) for c in contexts], marker=".", label=plan.name)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel("context (tokens)")
    axes.set_ylabel(f"upper bound over dense, batch {batch}, weights included")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench limits", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="folder with config.json; replaces the five sizes below")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--heads", type=int, default=8, help="KV heads")
    parser.add_argument("--q-heads", type=int, default=32)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--kv-bytes", type=int, default=2, help="bytes of a stored channel")
    parser.add_argument("--weights-gb", type=float, help="10^9 bytes of weights read by a step")
    parser.add_argument(
        "--layer-plan", type=Path, action="append", default=[], help="a plan file; may be repeated"
    )
    parser.add_argument("--final-k", type=int, default=2048)
    parser.add_argument("--pool-size", type=int, default=8192)
    parser.add_argument("--context", type=int, nargs="+", default=[8192, 32768, 131072, 524288])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--plot", type=Path, help="writes a PNG of the last batch size")
    args = parser.parse_args()
    weight_bytes = None if args.weights_gb is None else args.weights_gb * 1e9
    if args.model:
        model = Model.from_config(args.model, weight_bytes)
    else:
        model = Model(
            args.layers, args.heads, args.q_heads, args.head_dim, args.kv_bytes, weight_bytes or 0.0
        )
    plans = sample_plans(model, args.final_k, args.pool_size)
    plans += [plan_from_file(name, model) for name in args.layer_plan]
    print(table(model, plans, args.context, args.batch))
    if args.plot:
        plot(model, plans, args.plot, args.batch[-1])
    return 0


if __name__ == "__main__":
    sys.exit(main())
