"""Loss under any scorer that is served: a case whose layers choose as the plan's scorer does and attend as ever.

Dims as in case.py, and: E key heads of what is scored, C its channels, Q' queries that score, N pages
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels import reference_route as route
from ...kernels.reference_index import IndexMap, index_codes, index_keys, index_queries
from ...kernels.reference_select import dequantise_int4, page_bounds, quantise_int4
from ..plan import BoundLayer, BoundPlan, ScanHeads, Scorer, Selection
from ..plan_support import MAPPED, SERVED
from .case import Case, is_plain
from .llama import Llama

Maps = Mapping[int, IndexMap]
Chosen = dict[tuple[int, str], Tensor]


class ScoredCase(Case):
    """`weights` are the maps of plans that name some, by their file."""

    weights: Mapping[str, Maps] = {}

    def __init__(self, model: Llama, kind: str, ids: Sequence[int], num_rows: int) -> None:
        self._queries = _LastQueries(model)
        super().__init__(self._queries, kind, ids, num_rows)  # type: ignore[arg-type]

    def check(self, plan: BoundPlan) -> None:
        """Raises ValueError for a scorer that is not served, for weights it lacks, and for lists per KV head of
        another scorer than exact keys, or lent to layers whose heads are others."""
        if is_plain(plan):
            return
        scorer = plan.scorer
        if scorer.kind not in SERVED or scorer.heads != "layer":
            raise ValueError(
                f"plan {plan.name}: scorer {scorer} is not evaluated; give heads layer and one of {', '.join(SERVED)}, "
                "or exact_qk with heads kv_head, lend_heads layer"
            )
        if scorer.kind in MAPPED and plan.weights_file not in self.weights:
            raise ValueError(f"plan {plan.name}: scorer {scorer.kind} needs the weights {plan.weights_file}")
        if (scorer.num_routed_heads or 0) > self.model.num_q_heads:
            raise ValueError(
                f"plan {plan.name}: num_routed_heads is {scorer.num_routed_heads}, but the model has "
                f"{self.model.num_q_heads} query heads"
            )

    def _indices(self, layer: BoundLayer, plan: BoundPlan, logits_QRJ: Tensor, chosen: Chosen) -> Tensor:
        if is_plain(plan) or not layer.scores:
            return super()._indices(layer, plan, logits_QRJ, chosen)
        selection = plan.selection
        assert selection is not None
        scored = self._scored(layer, plan, selection)
        if layer.role == "reindex":
            pool, rerank = chosen[layer.anchor or 0, "pool"], True
        else:
            pool, best = self._full(scored, selection)
            chosen[layer.layer, "pool"], rerank = pool, plan.reranks_own_pool
            chosen[layer.layer, "indices"] = best
        if rerank:
            scores = scored.ranked(pool, scored.rerank_heads)
            chosen[layer.layer, "indices"] = _best(scores, selection.final_k, pool)
        return chosen[layer.layer, "indices"]

    def _scored(self, layer: BoundLayer, plan: BoundPlan, selection: Selection) -> _Scored:
        source = layer.layer if layer.key_from is None else layer.key_from
        q_QRD, k_HJD = self._queries.last_QRD, self._keys[source]
        q_QRC, k_EJC = q_QRD, k_HJD
        if plan.scorer.kind == "int4_keys":
            k_EJC = dequantise_int4(quantise_int4(k_HJD.transpose(0, 1))).transpose(0, 1)
        elif plan.scorer.kind in MAPPED:
            index = self.weights[plan.weights_file or ""][source]
            q_QRC = index_queries(index, q_QRD.transpose(0, 1)).transpose(0, 1)
            k_EJC = index_keys(index, index_codes(index, k_HJD.transpose(0, 1))).transpose(0, 1)
        return _Scored(plan.scorer, selection, q_QRC, k_EJC, self._positions, self.model.head_dim**-0.5)

    def _full(self, scored: _Scored, selection: Selection) -> tuple[Tensor, Tensor]:
        """(pool [R, M], the best [R, K]) of a full layer, by its scan or by what it kept of an earlier row's."""
        size, every = selection.pool_size or selection.final_k, selection.refresh_every
        if every == 1 or self.num_tokens < size:  # a pool that holds the history is extended to the history
            scores = scored.scanned()
            return _best(scores, size, None), _best(scores, selection.final_k, None)
        pools: list[Tensor] = []
        bests: list[Tensor] = []
        for r in range(self.num_rows):
            row, candidates = scored.row(r), None
            if r % every:
                candidates = torch.cat((pools[-1], self._positions[r].view(1, 1)), 1)
            scores = row.scanned() if candidates is None else row.ranked(candidates, scored.scorer.scan_heads)
            pools.append(_best(scores, size, candidates))
            bests.append(_best(scores, selection.final_k, candidates))
        return torch.cat(pools), torch.cat(bests)


@dataclass(frozen=True)
class _Scored:
    """The queries and keys that a scorer compares in one layer, for some rows."""

    scorer: Scorer
    selection: Selection
    q_QRC: Tensor
    k_EJC: Tensor
    positions_R: Tensor  # of the rows' own tokens
    scale: float

    @property
    def rerank_heads(self) -> ScanHeads:
        return self.scorer.rerank_heads or self.scorer.scan_heads

    def row(self, r: int) -> _Scored:
        return _Scored(
            self.scorer,
            self.selection,
            self.q_QRC[:, r : r + 1],
            self.k_EJC,
            self.positions_R[r : r + 1],
            self.scale,
        )

    def scanned(self) -> Tensor:
        """[R, J], infinite on sinks and window."""
        every_RJ = torch.arange(self.k_EJC.shape[1]).expand(len(self.positions_R), -1)
        if self.scorer.kind == "page_minmax":
            return self._forcing(self._by_pages(), every_RJ)
        return self.ranked(every_RJ, self.scorer.scan_heads)

    def ranked(self, columns_RM: Tensor, heads: ScanHeads) -> Tensor:
        """[R, M] of ascending positions, normalised among them, infinite on sinks and window."""
        queries, weights_QR, key_heads = self._mixed(heads, columns_RM)
        shares_QRM = self._logits(queries, key_heads, columns_RM).softmax(-1)
        return self._forcing((shares_QRM * weights_QR[..., None]).sum(0), columns_RM)

    def _by_pages(self) -> Tensor:
        """[R, J], every position with the share of its page."""
        size, (_, num_keys, _) = self.scorer.tokens_per_page, self.k_EJC.shape
        columns_RJ = torch.arange(num_keys).expand(len(self.positions_R), -1)
        queries, weights_QR, key_heads = self._mixed(self.scorer.scan_heads, columns_RJ)
        full_JED = self.k_EJC[:, : num_keys // size * size].transpose(0, 1)
        low, high = page_bounds(full_JED.unflatten(0, (-1, size)))
        scores_RJ = torch.zeros(len(self.positions_R), num_keys)
        for r, row_len in enumerate((self.positions_R + 1).tolist()):
            num_full = row_len // size
            rest = self.k_EJC[:, num_full * size : row_len].transpose(0, 1)
            parts = [(low[:num_full], high[:num_full])]
            if len(rest):
                parts.append(page_bounds(rest[None]))
            low_QND, high_QND = (
                torch.cat(part)[:, key_heads].transpose(0, 1) for part in zip(*parts, strict=True)
            )
            q_Q1D = queries[:, r, None]
            bounds_QN = (q_Q1D.clamp_max(0) * low_QND + q_Q1D.clamp_min(0) * high_QND).sum(-1)
            page_N = ((bounds_QN * self.scale).softmax(-1) * weights_QR[:, r, None]).sum(0)
            scores_RJ[r, :row_len] = page_N.repeat_interleave(size)[:row_len]
        return scores_RJ

    def _mixed(self, heads: ScanHeads, columns_RM: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(queries [Q', R, C], what their shares count for [Q', R], their key heads [Q'])."""
        q_QRC, num_heads = self.q_QRC, len(self.k_EJC)
        groups = q_QRC.unflatten(0, (num_heads, -1))
        own = torch.arange(num_heads)
        each = own.repeat_interleave(groups.shape[1])
        if heads == "fused":
            return groups.mean(1), torch.ones(num_heads, q_QRC.shape[1]), own
        if heads == "all":
            return q_QRC, torch.ones(q_QRC.shape[:2]), each
        assert self.scorer.num_routed_heads is not None
        logits_QRM = self._logits(q_QRC, each, columns_RM)
        forced_RM = self._forced(columns_RM) | (columns_RM > self.positions_R[:, None])
        chosen_QR = route.choose(route.worth(logits_QRM, forced_RM), self.scorer.num_routed_heads)
        if not self.scorer.residual:
            return q_QRC, chosen_QR.float(), each
        left = ~chosen_QR.unflatten(0, (num_heads, -1))
        num_left = left.sum(1)
        means = (groups * left[..., None]).sum(1) / num_left.clamp_min(1)[..., None]
        weights = torch.cat((chosen_QR.float(), num_left.float()))
        return torch.cat((q_QRC, means)), weights, torch.cat((each, own))

    def _logits(self, queries: Tensor, key_heads: Tensor, columns_RM: Tensor) -> Tensor:
        """[Q', R, M], -inf in a row's future."""
        logits = queries @ self.k_EJC[key_heads].transpose(1, 2) * self.scale
        if columns_RM.shape[1] != logits.shape[2]:
            logits = logits.gather(-1, columns_RM.expand(len(queries), -1, -1))
        return logits.masked_fill(columns_RM > self.positions_R[:, None], -torch.inf)

    def _forced(self, columns_RM: Tensor) -> Tensor:
        selection = self.selection
        return (columns_RM < selection.sink) | (columns_RM > self.positions_R[:, None] - selection.window)

    def _forcing(self, scores_RM: Tensor, columns_RM: Tensor) -> Tensor:
        scores_RM = scores_RM.masked_fill(self._forced(columns_RM), torch.inf)
        return scores_RM.masked_fill(columns_RM > self.positions_R[:, None], -torch.inf)


def _best(scores_RM: Tensor, size: int, columns_RM: Tensor | None) -> Tensor:
    """[R, size] positions, ascending; equal scores by the lower one, as pages have them."""
    best = scores_RM.sort(dim=-1, descending=True, stable=True).indices[:, :size].sort(-1).values
    return best if columns_RM is None else columns_RM.gather(-1, best)


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
