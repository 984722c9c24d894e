"""What the scoring layers of a plan see on some texts, and what the layers they serve attend to.

Dims: B texts, R rows of a text, N its longest number of keys, Q query heads, H KV heads, D head dim, M = H * D

Texts are padded to one length. `legal` says which positions a scorer chooses from: those a row sees, without sinks
and window, which it never has to choose; a padded position is never legal. Teachers are restricted to them before
they are averaged, as the source demands (section 2.1): the mean is over probabilities of one and the same support.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..plan import BoundPlan
from .llama import Llama


@dataclass(frozen=True)
class Samples:
    """One scoring layer on a batch of texts. Float32."""

    q_BRQD: Tensor  # rotated queries
    k_BNM: Tensor  # rotated keys, 0 where padded
    legal_BRN: Tensor  # bool
    teacher_BRN: Tensor  # the group's mean attention over legal positions; sums to 1, 0 elsewhere

    def attention(self) -> Tensor:
        """[B, R, N]: the layer's own scores as exact_qk has them, over legal positions."""
        return head_mean(self.q_BRQD, self.k_BNM, self.legal_BRN)


def groups_of(plan: BoundPlan) -> dict[int, tuple[int, ...]]:
    """The layers that each scoring layer serves: itself, and whoever takes its indices or its pool."""
    return {
        layer.layer: (layer.layer, *sorted({*layer.index_readers, *layer.pool_readers}))
        for layer in plan.layers
        if layer.scores
    }


def collect(
    model: Llama, texts: Sequence[Sequence[int]], plan: BoundPlan, num_rows: int
) -> dict[int, Samples]:
    """Samples of every scoring layer, of `num_rows` rows spread over the last half of every text, dense decode.

    Raises ValueError for a text that is too short to leave its rows anything to choose.
    """
    assert plan.selection is not None
    sink, window = plan.selection.sink, plan.selection.window
    groups, parts = groups_of(plan), dict[int, list[_Part]]()
    for ids in texts:
        rows = torch.linspace(len(ids) // 2, len(ids) - 1, num_rows).long()
        if int(rows[0]) - window <= sink:
            raise ValueError(
                f"a text of {len(ids)} tokens leaves nothing to choose behind {sink} sinks and {window} window "
                f"tokens; give at least {2 * (sink + window + 1)}"
            )
        at = torch.arange(len(ids))
        legal = (at >= sink) & (at <= rows[:, None] - window)
        for layer, part in _of_text(model, ids, rows, legal, groups).items():
            parts.setdefault(layer, []).append(part)
    return {layer: _padded(found) for layer, found in parts.items()}


@dataclass
class _Part:
    q_RQD: Tensor
    k_NM: Tensor
    legal_RN: Tensor
    teacher_RN: Tensor


@torch.no_grad()
def _of_text(
    model: Llama, ids: Sequence[int], rows: Tensor, legal_RN: Tensor, groups: dict[int, tuple[int, ...]]
) -> dict[int, _Part]:
    tokens, parts = torch.tensor(list(ids)), dict[int, _Part]()
    hidden, positions = model.embed(tokens), torch.arange(len(ids))
    for layer in range(model.num_layers):
        q, k, v = model.qkv(layer, hidden, positions)
        q_RQD, k_NM = q[:, rows].transpose(0, 1), k.transpose(0, 1).flatten(1)
        if layer in groups:
            parts[layer] = _Part(q_RQD, k_NM, legal_RN, torch.zeros(legal_RN.shape))
        served = [anchor for anchor, members in groups.items() if layer in members]
        if served:
            attention_RN = head_mean(q_RQD[None], k_NM[None], legal_RN[None])[0]
            for anchor in served:
                parts[anchor].teacher_RN += attention_RN / len(groups[anchor])
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)[0]
        hidden = model.finish(layer, hidden, out)
    return parts


def _padded(parts: Sequence[_Part]) -> Samples:
    longest = max(len(part.k_NM) for part in parts)
    keys = [F.pad(part.k_NM, (0, 0, 0, longest - len(part.k_NM))) for part in parts]
    legal = [F.pad(part.legal_RN, (0, longest - part.legal_RN.shape[1])) for part in parts]
    teachers = [F.pad(part.teacher_RN, (0, longest - part.teacher_RN.shape[1])) for part in parts]
    return Samples(
        torch.stack([part.q_RQD for part in parts]),
        torch.stack(keys),
        torch.stack(legal),
        torch.stack(teachers),
    )


def head_mean(q_BRQD: Tensor, k_BNM: Tensor, legal_BRN: Tensor) -> Tensor:
    """[B, R, N]: softmax over legal positions per query head, then the mean over heads; q carries no scale."""
    head_dim = q_BRQD.shape[-1]
    k_BNHD = k_BNM.unflatten(-1, (-1, head_dim))
    q_BRHGD = q_BRQD.unflatten(2, (k_BNHD.shape[2], -1))
    logits = torch.einsum("brhgd,bnhd->brhgn", q_BRHGD, k_BNHD) * head_dim**-0.5
    hidden = ~legal_BRN[:, :, None, None]
    shares: Tensor = logits.masked_fill(hidden, -torch.inf).softmax(-1)
    return shares.mean((2, 3))
