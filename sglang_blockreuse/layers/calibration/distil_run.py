"""`calibrate --distil`: train or choose what a plan's scorer reads, write it beside the plan, show what it buys.

The folder gets plan.yaml, weights.safetensors and distil.md. The table is over held-out texts: the share of the
group's attention, over positions that are neither sink nor window, which a scorer's best positions hold.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch
from msgspec.structs import replace
from torch import Tensor

from ...kernels.reference_index import IndexMap
from ...kernels.reference_select import dequantise_int4, quantise_int4
from ..index_weights import IndexWeights, model_identity
from ..plan import BoundPlan, Scorer
from ..plan_explain import KVShape
from ..plan_loader import LayerPlan, load_plan
from .case import Figures
from .distil import Training, distil, label_index, principal_map, shuffled, student
from .llama import Llama
from .samples import Samples, collect, head_mean
from .scored_case import ScoredCase
from .texts import HELD_OUT, KINDS, Texts

NUM_ROWS = 24  # of each text, in its last half
WEIGHTS_FILE = "weights.safetensors"
_SCORERS = {
    "exact_qk": Scorer(),
    "int4_keys": Scorer(kind="int4_keys"),
    "label_channels": Scorer(kind="label_channels"),
    "learned": Scorer(kind="learned"),
}


class Recall(msgspec.Struct, frozen=True):
    """One scorer on held-out texts, the mean over scoring layers."""

    scorer: str
    bytes_per_token: float  # read per token and layer
    mass: float  # share of the group's attention that the best positions hold
    mass_p5: float  # the 5th percentile over rows
    agreement: float  # share of exact_qk's best positions that it finds
    kl: float | None = None  # to dense decode, nats, of held-out rows under the plan with this scorer


def run(
    folder: Path, plan_name: str, out: Path, *, lengths: tuple[int, int], kind: str, num_channels: int
) -> list[Recall]:
    """Distil for a Llama model and a plan; returns the table. Raises PlanError, UnsupportedModel, ValueError."""
    model, texts = Llama(folder), Texts(folder)
    source = load_plan(plan_name)
    plan = source.bind(model.num_layers, model.architecture)
    if plan.selection is None:
        raise ValueError(f"plan {plan.name} has no layer that scores, so there is nothing to distil")
    torch.manual_seed(0)
    train = collect(model, _texts(texts, 0, lengths), plan, NUM_ROWS)
    held_out = collect(model, _texts(texts, HELD_OUT, lengths), plan, NUM_ROWS)
    labels = {layer: label_index(samples, 16) for layer, samples in train.items()}
    learned = {layer: _train(layer, samples, num_channels) for layer, samples in train.items()}
    table = _table(plan, model, train, held_out, labels, learned, num_channels)
    table = _with_loss(table, plan, model, texts, lengths, {"label_channels": labels, "learned": learned})
    maps = learned if kind == "learned" else labels
    _write(source, kind, num_channels, maps, model_identity(folder), out)
    (out / "distil.md").write_text(_markdown(plan, table))
    return table


def _texts(texts: Texts, first_seed: int, lengths: tuple[int, int]) -> list[list[int]]:
    low, high = lengths
    step = (high - low) // max(1, len(KINDS) - 1)
    return [texts.make(kind, first_seed, low + i * step) for i, kind in enumerate(KINDS)]


def _train(layer: int, samples: Samples, num_channels: int) -> IndexMap:
    def report(step: int, loss: float) -> None:
        if step % 20 == 0:
            print(f"layer {layer}, step {step}: {loss:.3f} nats", file=sys.stderr)

    return distil(samples, Training(num_channels=num_channels), report)


def _table(
    plan: BoundPlan,
    model: Llama,
    train: dict[int, Samples],
    held_out: dict[int, Samples],
    labels: dict[int, IndexMap],
    learned: dict[int, IndexMap],
    num_channels: int,
) -> list[Recall]:
    assert plan.selection is not None
    chosen = plan.selection.final_k - plan.selection.sink - plan.selection.window
    shape = KVShape(num_kv_heads=model.num_kv_heads, head_dim=model.head_dim)
    before = {layer: principal_map(samples, num_channels) for layer, samples in train.items()}
    mixed = {layer: shuffled(index) for layer, index in learned.items()}
    small = Scorer(kind="learned", num_channels=num_channels)

    def mapped(maps: dict[int, IndexMap]) -> Callable[[int, Samples], Tensor]:
        return lambda layer, samples: student(samples, maps[layer])

    rows: list[tuple[str, Scorer, Callable[[int, Samples], Tensor]]] = [
        ("exact_qk", Scorer(), lambda layer, samples: samples.attention()),
        ("int4_keys", Scorer(kind="int4_keys"), lambda layer, samples: _int4(samples, model.head_dim)),
        ("label_channels", Scorer(kind="label_channels"), mapped(labels)),
        ("learned", small, mapped(learned)),
        ("learned, before training", small, mapped(before)),
        ("learned, weights shuffled", small, mapped(mixed)),
    ]
    with torch.no_grad():
        return [
            _recall(name, shape.index_bytes(scorer), scores, held_out, chosen)
            for name, scorer, scores in rows
        ]


def _with_loss(
    table: list[Recall],
    plan: BoundPlan,
    model: Llama,
    texts: Texts,
    lengths: tuple[int, int],
    maps: dict[str, dict[int, IndexMap]],
) -> list[Recall]:
    """The table with the loss of whole decode rows, for the scorers that can be served."""
    cases = [
        ScoredCase(model, kind, ids, NUM_ROWS)
        for kind, ids in zip(KINDS, _texts(texts, HELD_OUT, lengths), strict=True)
    ]
    rows = []
    for row in table:
        if row.scorer in _SCORERS:
            # maps that are not in a file yet go by the name of their kind
            judged = replace(plan, scorer=_SCORERS[row.scorer], weights_file=row.scorer)
            for case in cases:
                case.weights = maps
            kl = Figures.joined([case.figures(judged) for case in cases]).kl
            row = msgspec.structs.replace(row, kl=kl)
        rows.append(row)
    return rows


def _int4(samples: Samples, head_dim: int) -> Tensor:
    keys = samples.k_BNM.unflatten(-1, (-1, head_dim))
    rounded = dequantise_int4(quantise_int4(keys.flatten(0, 1))).view(keys.shape)
    return head_mean(samples.q_BRQD, rounded.flatten(2), samples.legal_BRN)


def _recall(
    name: str,
    num_bytes: float,
    scores: Callable[[int, Samples], Tensor],
    held_out: dict[int, Samples],
    chosen: int,
) -> Recall:
    masses, agreements = [], []
    for layer, samples in held_out.items():
        best = _best(scores(layer, samples), chosen)
        masses.append((samples.teacher_BRN * best).sum(-1).flatten())
        exact = _best(samples.attention(), chosen)
        agreements.append(float(((best & exact).sum(-1) / exact.sum(-1)).mean()))
    mass = torch.cat(masses)
    return Recall(
        name, num_bytes, float(mass.mean()), float(mass.quantile(0.05)), sum(agreements) / len(agreements)
    )


def _best(scores_BRN: Tensor, size: int) -> Tensor:
    at = scores_BRN.topk(min(size, scores_BRN.shape[-1]), -1).indices
    return torch.zeros(scores_BRN.shape, dtype=torch.bool).scatter_(-1, at, True)


def _write(
    source: LayerPlan, kind: str, num_channels: int, maps: dict[int, IndexMap], model: str, out: Path
) -> None:
    out.mkdir(parents=True, exist_ok=True)
    digest = IndexWeights(kind, model, maps).save(out / WEIGHTS_FILE)
    words: dict[str, Any] = {"kind": kind, "weights": WEIGHTS_FILE, "weights_sha256": digest}
    if kind == "learned":
        words["num_channels"] = num_channels
    spec = msgspec.structs.replace(
        source.spec,
        name=f"{source.name}-{kind}",
        scorer=Scorer(**words),
        evidence="distil.md beside this file",
    )
    (out / "plan.yaml").write_text(LayerPlan(spec, str(out / "plan.yaml"), str(out)).to_yaml())


def _markdown(plan: BoundPlan, table: list[Recall]) -> str:
    assert plan.selection is not None
    chosen = plan.selection.final_k - plan.selection.sink - plan.selection.window
    lines = [
        f"# Scorers for {plan.name}",
        "",
        f"The best {chosen} positions of each scorer, on held-out texts of {len(KINDS)} kinds: the share of the",
        "group's attention (without sinks and window) that they hold, and how many of exact_qk's best are among them.",
        "",
        f"KL to dense decode is the mean over {NUM_ROWS} forced rows of each text, under the plan.",
        "",
        "| scorer | bytes per token and layer | mass | mass, worst 5 % of rows | found of exact_qk's | KL |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.scorer} | {r.bytes_per_token:.0f} | {r.mass:.3f} | {r.mass_p5:.3f} | {r.agreement:.3f} | "
        + ("|" if r.kl is None else f"{r.kl:.3f} |")
        for r in table
    ]
    return "\n".join(lines) + "\n"
