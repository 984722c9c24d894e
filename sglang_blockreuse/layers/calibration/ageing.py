"""How a list ages: chosen in one layer and step, read by a later layer in a later step.

A plan may reuse a choice across layers and, with `refresh_every`, across steps. The table holds one age fresh and lets
the other grow along its first row and column, and has both together elsewhere. Sinks and window are left out: they are
read anyway. A token that has left the window since the choice counts as missed where it is wanted, which a pool that
grows along does not lose.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..plan import Selection
from .case import Case
from .measures import aged_recall, mask_of

DISTANCES, STEPS = (0, 1, 2, 3, 4, 6, 8), (0, 1, 2, 4, 8, 16)  # layers from the choice, steps since it


def ageing(cases: Sequence[Case], selection: Selection) -> list[list[float]]:
    """Mean recall by DISTANCES and STEPS over all pairs of layers, rows and texts; NaN where no rows are so far apart.

    Empty where the texts are too short to choose from. Lists are those of exact keys, one for a layer, on dense decode.
    """
    parts: dict[tuple[int, int], list[Tensor]] = {(d, s): [] for d in DISTANCES for s in STEPS}
    cases = [case for case in cases if case.num_tokens > selection.final_k]
    for case in cases:
        chosen: list[Tensor] = []

        def watch(layer: int, logits_QRJ: Tensor, case: Case = case, chosen: list[Tensor] = chosen) -> None:
            ranked_RJ = case.ranked(logits_QRJ.softmax(-1), selection)
            best_RJ = mask_of(ranked_RJ.topk(selection.final_k, -1).indices, ranked_RJ.shape[-1])
            chosen.append(best_RJ & ~ranked_RJ.isinf())
            for distance, steps in parts:
                if distance <= layer and steps < case.num_rows:
                    held_RJ = chosen[layer - distance]
                    parts[distance, steps].append(aged_recall(held_RJ, chosen[layer], steps))

        case.log_probs(None, watch=watch)
    if not cases:
        return []
    return [[_mean(parts[distance, steps]) for steps in STEPS] for distance in DISTANCES]


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat(list(parts)).mean()) if parts else float("nan")
