"""Measures, before a prefill step, what a policy or the guard wants to know about loaded KV.

A probe is a forward of its own over a few rows that is left after an early layer: the question's rows, to see
where it looks; all rows, to see which keys change; or the rows that are about to be repaired, for the guard.
What it writes is written again by the step itself.

Dims: T probed tokens of one request, N its positions, Q query heads, H KV heads, G query heads per KV head,
      D head dim, S pool slots
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..types import Interval
from .policy import Evidence

Kind = Literal["question", "deviation", "guard"]

# Layers, as shares of the depth, that the question's attention is averaged over; the probe ends with the last.
QUESTION_LAYERS = (0.1, 0.5)
DEVIATION_DEPTH = (
    1  # layer 0 sees token and position alone, layer 1 is the first whose keys depend on context
)
GUARD_DEPTH = 0.1
# The last tokens of the question that are asked; more of them would mostly repeat the instructions.
MAX_QUESTION_TOKENS = 64


class ProbeDone(Exception):
    """Leaves the model's forward after the last layer that a probe looks at."""


@contextmanager
def probing(backend: Any, probe: Probe) -> Iterator[None]:
    """Let `backend` show its layers to `probe`, and take the probe's leaving for the end of the forward."""
    backend.probe = probe
    try:
        yield
    except ProbeDone:
        return
    finally:
        backend.probe = None
    raise RuntimeError("a probe's forward ran to its end: the attention backend did not show its layers")


@dataclass(slots=True)
class Subject:
    """One request in a probe; mutable, collects what the layers show."""

    kind: Kind
    slots_N: Tensor  # int64, the request's slots by position
    rows: tuple[Interval, ...]  # positions that the probe computes, ascending
    first: int  # index of the request's first token in the probe's forward
    asked_T: Tensor | None = None  # indices, among the request's probed tokens, of the question
    attention_N: Tensor | None = None  # float32
    change_2T: Tensor | None = None  # float32: squared |k_new - k_old| and |k_new| per probed token

    @property
    def num_tokens(self) -> int:
        return sum(len(r) for r in self.rows)

    def positions(self) -> Tensor:
        return torch.cat([torch.arange(r.start, r.end) for r in self.rows])


@dataclass(slots=True)
class Probe:
    """Rides on the attention backend for one forward; the backend calls it in every layer."""

    subjects: Sequence[Subject]
    num_layers: int
    reduce: Callable[[Tensor], Tensor] = field(default=lambda x: x)  # sum over tensor-parallel ranks
    _question_layers: range = field(init=False)
    _compared: dict[str, int] = field(init=False)  # kind -> the layer whose keys are compared
    _last: int = field(init=False)

    def __post_init__(self) -> None:
        kinds = {s.kind for s in self.subjects}
        self._question_layers = question_layers(self.num_layers) if "question" in kinds else range(0)
        compared = {
            "deviation": min(DEVIATION_DEPTH, self.num_layers - 1),
            "guard": guard_layer(self.num_layers),
        }
        self._compared = {kind: layer for kind, layer in compared.items() if kind in kinds}
        self._last = max(0, *self._compared.values(), *self._question_layers)

    def before_write(self, layer: Any, k_THD: Tensor, pool_SHD: Tensor) -> None:
        """New keys of the forward's tokens, and the pool that still holds the old ones."""
        for subject in self.subjects:
            if self._compared.get(subject.kind) == layer.layer_id:
                self._compare(subject, k_THD, pool_SHD)

    def after_write(self, layer: Any, q_TQD: Tensor, pool_SHD: Tensor) -> None:
        """Queries of the forward's tokens, and the pool with the keys that they see. Raises ProbeDone."""
        if layer.layer_id in self._question_layers:
            for subject in self.subjects:
                if subject.kind == "question":
                    _attend(subject, q_TQD, pool_SHD, scale=layer.scaling)
        if layer.layer_id == self._last:
            raise ProbeDone

    def evidence(self) -> list[Evidence]:
        """What was found, per subject, equal on every rank."""
        return [self._evidence(subject) for subject in self.subjects]

    def _evidence(self, subject: Subject) -> Evidence:
        if subject.attention_N is not None:
            return Evidence(attention_N=_numpy(self.reduce(subject.attention_N)))
        if subject.change_2T is None:
            return Evidence()
        change_T, norm_T = self.reduce(subject.change_2T).cpu().sqrt()
        deviation_N = torch.zeros(len(subject.slots_N))
        deviation_N[subject.positions()] = change_T / norm_T.clamp_min(1e-6)
        return Evidence(deviation_N=_numpy(deviation_N))

    def _compare(self, subject: Subject, k_THD: Tensor, pool_SHD: Tensor) -> None:
        new_THD = k_THD[subject.first : subject.first + subject.num_tokens].float()
        old_THD = pool_SHD[subject.slots_N[subject.positions().to(subject.slots_N.device)]].float()
        subject.change_2T = torch.stack(
            [(new_THD - old_THD).square().sum(dim=(1, 2)), new_THD.square().sum(dim=(1, 2))]
        )


def question_layers(num_layers: int) -> range:
    first, last = (round(share * (num_layers - 1)) for share in QUESTION_LAYERS)
    return range(first, last + 1)


def guard_layer(num_layers: int) -> int:
    return min(max(DEVIATION_DEPTH, round(GUARD_DEPTH * num_layers)), num_layers - 1)


def mean_deviation(evidence: Evidence, local: Sequence[Interval]) -> float:
    """Mean deviation of the given positions, which were copied and are computed anew; 0 where there are none."""
    if evidence.deviation_N is None or not local:
        return 0.0
    values = np.concatenate([evidence.deviation_N[i.start : i.end] for i in local])
    return float(values.mean()) if values.size else 0.0


def _attend(subject: Subject, q_TQD: Tensor, pool_SHD: Tensor, *, scale: float) -> None:
    """Add the attention mass that the question puts on each position, summed over its tokens and all heads."""
    assert subject.asked_T is not None
    asked = subject.asked_T.to(q_TQD.device)
    q_AQD = q_TQD[subject.first + asked].float()
    k_NHD = pool_SHD[subject.slots_N].float()
    num_asked, num_heads, num_kv_heads = q_AQD.shape[0], q_AQD.shape[1], k_NHD.shape[1]
    q_HBD = q_AQD.unflatten(1, (num_kv_heads, num_heads // num_kv_heads)).permute(1, 2, 0, 3).flatten(1, 2)
    logits_HBN = torch.matmul(q_HBD, k_NHD.permute(1, 2, 0)) * scale
    position_A = subject.positions()[subject.asked_T].to(q_TQD.device)
    hidden_AN = torch.arange(len(subject.slots_N), device=q_TQD.device) > position_A[:, None]
    logits_HGAN = logits_HBN.unflatten(1, (-1, num_asked)).masked_fill(hidden_AN, -torch.inf)
    mass_N = logits_HGAN.softmax(dim=-1).sum(dim=(0, 1, 2))
    subject.attention_N = mass_N if subject.attention_N is None else subject.attention_N + mass_N


def _numpy(values: Tensor) -> NDArray[np.float32]:
    found: NDArray[np.float32] = values.float().cpu().numpy()
    return found
