"""Loss under a scorer that reads a copy of the keys: a case whose layers choose by index keys and attend as ever.

Dims as in case.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.reference_index import IndexMap, index_codes, index_keys, index_queries
from ...kernels.reference_select import dequantise_int4, quantise_int4
from ..plan import BoundLayer, Selection
from .case import Case
from .llama import Llama

Maps = dict[int, IndexMap]


class ScoredCase(Case):
    """`scorer` is exact_qk, int4_keys, or the maps of the scoring layers; it may be set anew between plans."""

    scorer: str | Maps = "exact_qk"

    def __init__(self, model: Llama, kind: str, ids: Sequence[int], num_rows: int) -> None:
        self._queries = _LastQueries(model)
        super().__init__(self._queries, kind, ids, num_rows)  # type: ignore[arg-type]

    def _indices(
        self,
        layer: BoundLayer,
        selection: Selection,
        logits_QRJ: Tensor,
        chosen: dict[tuple[int, str], Tensor],
    ) -> Tensor:
        if layer.scores and self.scorer != "exact_qk":
            logits_QRJ = self._index_logits(layer).masked_fill(self.future, -torch.inf)
        return super()._indices(layer, selection, logits_QRJ, chosen)

    def _index_logits(self, layer: BoundLayer) -> Tensor:
        """[Q, R, J]"""
        source = layer.layer if layer.kv_from is None else layer.kv_from
        k_JHD, q_RQD = self._keys[source].transpose(0, 1), self._queries.last_QRD.transpose(0, 1)
        if isinstance(self.scorer, str):
            q, k = q_RQD, dequantise_int4(quantise_int4(k_JHD))
        else:
            index = self.scorer[layer.layer]
            q, k = index_queries(index, q_RQD), index_keys(index, index_codes(index, k_JHD))
        q_REGC = q.unflatten(1, (k.shape[1], -1))
        logits: Tensor = torch.einsum("regc,jec->egrj", q_REGC, k) * self.model.head_dim**-0.5
        return logits.flatten(0, 1)


class _LastQueries:
    """A model that remembers the queries it made last."""

    def __init__(self, model: Llama) -> None:
        self._model = model
        self.last_QRD = torch.zeros(0)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def qkv(self, layer: int, hidden_NC: Tensor, positions_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        found = self._model.qkv(layer, hidden_NC, positions_N)
        self.last_QRD = found[0]
        return found
