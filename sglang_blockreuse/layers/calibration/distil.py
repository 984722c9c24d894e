"""Group distillation for a frozen model: one small key per token and scoring layer, trained on whom it serves.

Dims as in samples.py, and: C channels, E index heads (1)

The student of layer a scores s with q_a(s) = mean over query heads of softmax_s(scale (W_i q_i) . (W_k k_s)), k_s all
KV heads beside each other. It minimises equation (10) of the source,

    L = 1 / |G| sum_{l in G} sum_t KL(p_t^(l) || q_t^(a)),

whose gradient is that of KL(mean_l p_t^(l) || q_t^(a)): the teachers' probabilities are averaged, not their logits.
It begins at the principal directions of the keys and sees its keys in 4 bits while it learns (straight through).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.reference_index import LEVELS, IndexMap, label_map, measured_ranges
from ...kernels.reference_select import label_channels
from .samples import Samples

Report = Callable[[int, float], None]  # step, loss in nats


@dataclass(frozen=True)
class Training:
    """How a student learns. The defaults take seconds per layer on one core."""

    num_channels: int = 32
    num_steps: int = 80
    learning_rate: float = 3e-3
    batch: int = 2  # texts per step


def principal_map(samples: Samples, num_channels: int) -> IndexMap:
    """The student before training: the directions in which the layer's keys vary most."""
    keys = _real_keys(samples)
    num_q_heads, head_dim = samples.q_BRQD.shape[2:]
    centred = keys - keys.mean(0)
    basis_CM = torch.linalg.eigh(centred.T @ centred).eigenvectors.flip(1)[:, :num_channels].T.contiguous()
    per_head = basis_CM.unflatten(1, (-1, head_dim)).transpose(0, 1)
    query = per_head.repeat_interleave(num_q_heads // len(per_head), 0).contiguous()
    return _with_ranges(basis_CM[None], query, samples)


def label_index(samples: Samples, num_channels: int) -> IndexMap:
    """The label channels of every KV head, chosen on these samples."""
    num_q_heads, head_dim = samples.q_BRQD.shape[2:]
    keys = _real_keys(samples).unflatten(1, (-1, head_dim))
    channels = label_channels(samples.q_BRQD.flatten(0, 1), keys, num_channels)
    return _with_ranges(*label_map(channels, num_q_heads, head_dim), samples)


def distil(samples: Samples, training: Training, report: Report = lambda step, loss: None) -> IndexMap:
    """The student after training. The model's weights take no part in it."""
    start = principal_map(samples, training.num_channels)
    key, query = start.key_ECM.clone().requires_grad_(), start.query_QCD.clone().requires_grad_()
    optimiser = torch.optim.Adam([key, query], lr=training.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, training.num_steps)
    low, step = start.low_EC, start.step_EC
    num_texts = len(samples.k_BNM)
    for number in range(training.num_steps):
        which = [(number * training.batch + i) % num_texts for i in range(min(training.batch, num_texts))]
        if number % 10 == 9:
            low, step = _with_ranges(key.detach(), query.detach(), samples)[2:]
        batch = _chosen(samples, which)
        loss = divergence(batch, student(batch, IndexMap(key, query, low, step)))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        report(number, float(loss.detach()))
    return _with_ranges(key.detach(), query.detach(), samples)


def student(samples: Samples, index: IndexMap) -> Tensor:
    """[B, R, N]: the map's scores over legal positions, its keys in 4 bits; differentiable through the rounding."""
    head_dim = samples.q_BRQD.shape[-1]
    x_BNEC = torch.einsum("bnm,ecm->bnec", samples.k_BNM, index.key_ECM)
    scaled = (x_BNEC - index.low_EC) / index.step_EC
    codes = scaled + ((scaled + 0.5).floor().clamp(0, LEVELS) - scaled).detach()
    q_BRQC = torch.einsum("brqd,qcd->brqc", samples.q_BRQD, index.query_QCD)
    num_heads = index.step_EC.shape[0]
    q_BREGC = q_BRQC.unflatten(2, (num_heads, -1)) * index.step_EC[:, None]
    logits = torch.einsum("bregc,bnec->bregn", q_BREGC, codes) * head_dim**-0.5
    shares: Tensor = logits.masked_fill(~samples.legal_BRN[:, :, None, None], -torch.inf).softmax(-1)
    return shares.mean((2, 3))


def divergence(samples: Samples, scores_BRN: Tensor) -> Tensor:
    """KL(teacher || scores) in nats, the mean over rows; positions that are not legal take no part."""
    teacher, legal = samples.teacher_BRN, samples.legal_BRN
    log_teacher = teacher.clamp_min(1e-20).log()
    log_student = scores_BRN.masked_fill(~legal, 1.0).clamp_min(1e-20).log()
    return (teacher * (log_teacher - log_student)).masked_fill(~legal, 0.0).sum(-1).mean()


def shuffled(index: IndexMap, seed: int = 0) -> IndexMap:
    """The same numbers in another order, as a control: what is left of recall is no merit of training."""
    order = torch.randperm(index.query_QCD.numel(), generator=torch.Generator().manual_seed(seed))
    return index._replace(query_QCD=index.query_QCD.flatten()[order].view(index.query_QCD.shape))


def _real_keys(samples: Samples) -> Tensor:
    """[T, M]: keys that some row may choose; padding is among none of them."""
    return samples.k_BNM[samples.legal_BRN.any(1)]


def _with_ranges(key_ECM: Tensor, query_QCD: Tensor, samples: Samples) -> IndexMap:
    x_TEC = torch.einsum("tm,ecm->tec", _real_keys(samples)[::4], key_ECM)
    return IndexMap(key_ECM, query_QCD, *measured_ranges(x_TEC))


def _chosen(samples: Samples, which: Sequence[int]) -> Samples:
    at = torch.tensor(which)
    return Samples(samples.q_BRQD[at], samples.k_BNM[at], samples.legal_BRN[at], samples.teacher_BRN[at])
