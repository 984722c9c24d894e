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
from torch import Tensor

from ..types import Interval
from .intervals import positions_of
from .policy import Evidence
from .upload import upload

Kind = Literal["question", "deviation", "guard"]

# Layers, as shares of the depth, whose attention from the question counts; the probe ends with the last. Early
# layers look for the same words, late-middle ones for what the answer needs.
QUESTION_LAYERS = (0.4, 0.83)
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
    probe.begin(backend.token_to_kv_pool.get_key_buffer)
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
    at_T: Tensor | None = None  # positions of the probed tokens, beside the pool
    old_THD: Tensor | None = None  # their keys of the compared layer as they were before the forward
    attention_3N: Tensor | None = None  # float32: summed over the question, its maximum, its last token's
    change_2T: Tensor | None = None  # float32: squared |k_new - k_old| and |k_new| per probed token

    @property
    def num_tokens(self) -> int:
        return sum(len(r) for r in self.rows)

    @property
    def measured(self) -> Tensor | None:
        return self.attention_3N if self.attention_3N is not None else self.change_2T


@dataclass(slots=True)
class Probe:
    """Rides on the attention backend for one forward; the backend calls it in every layer.

    The old keys are kept aside before the forward begins: a model may rotate and write its keys in one operation of
    its own, so by the time that attention is called the pool may hold the new ones already.

    shared_layers: layers without KV of their own, whose new keys nobody keeps and nothing can be compared with.
    """

    subjects: Sequence[Subject]
    num_layers: int
    reduce: Callable[[Tensor], Tensor] = field(default=lambda x: x)  # sum over tensor-parallel ranks
    shared_layers: frozenset[int] = frozenset()
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
        self._compared = {kind: self._with_keys(layer) for kind, layer in compared.items() if kind in kinds}
        self._last = max(0, *self._compared.values(), *self._question_layers)

    def _with_keys(self, layer: int) -> int:
        """The first layer from `layer` on that keeps keys of its own; the last of all where none follows."""
        own = [at for at in range(self.num_layers) if at not in self.shared_layers]
        return next((at for at in own if at >= layer), own[-1])

    def begin(self, keys: Callable[[int], Tensor]) -> None:
        """keys: the key pool [S, H, D] of a layer, which still holds what was loaded."""
        nobody = np.empty(0, dtype=np.int64)
        numbers = [
            part
            for s in self.subjects
            for part in (positions_of(s.rows), nobody if s.asked_T is None else s.asked_T.numpy())
        ]
        there = iter(upload(numbers, self.subjects[0].slots_N.device))
        for subject in self.subjects:
            subject.at_T, asked_T = next(there), next(there)
            if subject.asked_T is not None:
                subject.asked_T = asked_T
            layer = self._compared.get(subject.kind)
            if layer is not None:
                subject.old_THD = keys(layer)[subject.slots_N[subject.at_T]]

    def after_write(self, layer: Any, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor) -> None:
        """Queries of the forward's tokens, and the pools with what they see. Raises ProbeDone."""
        for subject in self.subjects:
            if self._compared.get(subject.kind) == layer.layer_id:
                _compare(subject, k_SHD)
        if layer.layer_id in self._question_layers:
            for subject in self.subjects:
                if subject.kind == "question":
                    _attend(subject, q_TQD, k_SHD, v_SHD, scale=layer.scaling)
        if layer.layer_id == self._last:
            raise ProbeDone

    def evidence(self) -> list[Evidence]:
        """What was found, per subject, equal on every rank. The host waits for the probe here, once."""
        measured = [s.measured for s in self.subjects if s.measured is not None]
        if not measured:
            return [Evidence() for _ in self.subjects]
        flat = self.reduce(torch.cat([values.flatten() for values in measured])).cpu()
        parts = iter(flat.split([values.numel() for values in measured]))
        return [
            Evidence() if s.measured is None else _evidence(s, next(parts).view(s.measured.shape))
            for s in self.subjects
        ]


def question_layers(num_layers: int) -> range:
    first, last = (round(share * (num_layers - 1)) for share in QUESTION_LAYERS)
    return range(first, last + 1)


def guard_layer(num_layers: int) -> int:
    return min(max(DEVIATION_DEPTH, round(GUARD_DEPTH * num_layers)), num_layers - 1)


def _compare(subject: Subject, k_SHD: Tensor) -> None:
    """Old and new keys as the pool holds them: what a repair would replace, and by what."""
    assert subject.old_THD is not None
    new_THD, old_THD = k_SHD[subject.slots_N[subject.at_T]].float(), subject.old_THD.float()
    subject.change_2T = torch.stack(
        [(new_THD - old_THD).square().sum(dim=(1, 2)), new_THD.square().sum(dim=(1, 2))]
    )


def _attend(subject: Subject, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, *, scale: float) -> None:
    """Add how much of each position the question takes up: attention times the length of the value.

    The length matters: sinks draw attention and give nothing, their values are short.
    """
    assert subject.asked_T is not None
    assert subject.at_T is not None
    slots_N, asked_A = subject.slots_N, subject.asked_T
    k_NHD, v_NHD = k_SHD[slots_N].float(), v_SHD[slots_N].float()
    q_AHGD = q_TQD[subject.first + asked_A].float().unflatten(1, (k_NHD.shape[1], -1))
    logits_HGAN = torch.einsum("ahgd,nhd->hgan", q_AHGD, k_NHD) * scale
    position_A = subject.at_T[asked_A]
    hidden_AN = torch.arange(len(slots_N), device=q_TQD.device) > position_A[:, None]
    weights_HGAN = logits_HGAN.masked_fill_(hidden_AN, -torch.inf).softmax(dim=-1)
    taken_HGAN = weights_HGAN * v_NHD.norm(dim=-1).T[:, None, None]
    by_query = (taken_HGAN.sum(dim=2), taken_HGAN.amax(dim=2), taken_HGAN[:, :, -1])
    found_3N = torch.stack([x.sum(dim=(0, 1)) for x in by_query])
    subject.attention_3N = found_3N if subject.attention_3N is None else subject.attention_3N + found_3N


def _evidence(subject: Subject, measured: Tensor) -> Evidence:
    """measured: what the subject's ranks found together, on the host."""
    if subject.attention_3N is not None:
        return Evidence(attention_3N=measured.numpy())
    change_T, norm_T = measured.sqrt()
    deviation_N = torch.zeros(len(subject.slots_N))
    deviation_N[torch.from_numpy(positions_of(subject.rows))] = change_T / norm_T.clamp_min(1e-6)
    return Evidence(deviation_N=deviation_N.numpy())
