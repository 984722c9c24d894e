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
from .case import Case, Chosen, is_plain
from .lists import Lists, least, listed
from .llama import Llama

Maps = Mapping[int, IndexMap]


class ScoredCase(Case):
    """`weights` are the maps of plans that name some, by their file."""

    weights: Mapping[str, Maps] = {}

    def __init__(self, model: Llama, kind: str, ids: Sequence[int], num_rows: int) -> None:
        self._queries = _LastQueries(model)
        super().__init__(self._queries, kind, ids, num_rows)  # type: ignore[arg-type]

    def check(self, plan: BoundPlan) -> None:
        """Raises ValueError for a scorer that is not served, for weights it lacks, and for lists per KV head that are
        lent to layers whose heads are others."""
        if is_plain(plan):
            return
        scorer = plan.scorer
        if scorer.kind not in SERVED or (scorer.kind == "learned" and scorer.heads != "layer"):
            raise ValueError(
                f"plan {plan.name}: scorer {scorer} is not evaluated; give one of {', '.join(SERVED)}, learned with "
                "heads layer"
            )
        keeps_pools = plan.scorer.reranks_own_pool or (plan.selection and plan.selection.refresh_every > 1)
        lends = keeps_pools or any(layer.anchor is not None for layer in plan.layers)
        if scorer.lends == "kv_head" and lends:
            raise ValueError(
                f"plan {plan.name}: lists per KV head that are lent are not evaluated; give lend_heads layer"
            )
        if scorer.kind in MAPPED and plan.weights_file not in self.weights:
            raise ValueError(f"plan {plan.name}: scorer {scorer.kind} needs the weights {plan.weights_file}")
        num_heads = self.model.num_q_heads
        if scorer.heads == "kv_head":
            num_heads //= self.model.num_kv_heads
        if (scorer.num_routed_heads or 0) > num_heads:
            raise ValueError(
                f"plan {plan.name}: num_routed_heads is {scorer.num_routed_heads}, but the model has {num_heads} query "
                "heads for a list"
            )

    def _indices(self, layer: BoundLayer, plan: BoundPlan, logits_QRJ: Tensor, chosen: Chosen) -> Lists:
        if is_plain(plan) or not layer.scores:
            return super()._indices(layer, plan, logits_QRJ, chosen)
        selection = plan.selection
        assert selection is not None
        scored = self._scored(layer, plan, selection)
        if layer.role == "reindex":
            pool, ranked = chosen[layer.anchor or 0, "pool"], None
        else:
            pool, ranked = self._full(scored, selection)
            chosen[layer.layer, "pool"] = pool
        if ranked is None or plan.reranks_own_pool:
            ranked = scored.lists(scored.ranked(pool, scored.rerank_heads), pool, scored.rerank_heads)
        chosen[layer.layer, "indices"], own = ranked
        return own

    def _scored(self, layer: BoundLayer, plan: BoundPlan, selection: Selection) -> _Scored:
        source = layer.layer if layer.key_from is None else layer.key_from
        q_QRD, k_HJD = self._queries.last_QRD, self._keys[plan.kv_layers[source]]
        q_QRC, k_EJC = q_QRD, k_HJD
        if plan.scorer.kind == "int4_keys":
            k_EJC = dequantise_int4(quantise_int4(k_HJD.transpose(0, 1))).transpose(0, 1)
        elif plan.scorer.kind in MAPPED:
            index = self.weights[plan.weights_file or ""][source]
            q_QRC = index_queries(index, q_QRD.transpose(0, 1)).transpose(0, 1)
            k_EJC = index_keys(index, index_codes(index, k_HJD.transpose(0, 1))).transpose(0, 1)
        num_lists = self.model.num_kv_heads if plan.scorer.heads == "kv_head" else 1
        scale = self.model.head_dim**-0.5
        return _Scored(plan.scorer, selection, num_lists, q_QRC, k_EJC, self._positions, scale)

    def _full(self, scored: _Scored, selection: Selection) -> tuple[Tensor, tuple[Lists, Lists]]:
        """The pool [R, M] of a full layer, and its lists, by its scan or by what it kept of an earlier row's."""
        size, every = selection.pool_size or selection.final_k, selection.refresh_every
        heads = scored.scorer.scan_heads
        if every == 1 or self.num_tokens < size:  # a pool that holds the history is extended to the history
            scores = scored.scanned()
            return _best(scores.sum(0), size, None).at, scored.lists(scores, None, heads)
        pools: list[Tensor] = []
        lists: list[tuple[Lists, Lists]] = []
        for r in range(self.num_rows):
            row, candidates = scored.row(r), None
            if r % every:
                candidates = torch.cat((pools[-1], self._positions[r].view(1, 1)), 1)
            scores = row.scanned() if candidates is None else row.ranked(candidates, heads)
            pools.append(_best(scores.sum(0), size, candidates).at)
            lists.append(row.lists(scores, candidates, heads))
        lent, own = (Lists.of_rows(parts) for parts in zip(*lists, strict=True))
        return torch.cat(pools), (lent, own)


@dataclass(frozen=True)
class _Scored:
    """The queries and keys that a scorer compares in one layer, for some rows."""

    scorer: Scorer
    selection: Selection
    num_lists: int  # X, by which the layer attends
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
            self.num_lists,
            self.q_QRC[:, r : r + 1],
            self.k_EJC,
            self.positions_R[r : r + 1],
            self.scale,
        )

    def lists(self, scores_XRM: Tensor, columns_RM: Tensor | None, heads: ScanHeads) -> tuple[Lists, Lists]:
        """What the layer lends, one list for all heads, and the lists by which it attends."""
        size, share, weight = self.selection.final_k, self.selection.share, self._weight(heads)
        lent = _best(scores_XRM.sum(0), size, columns_RM, least(share, weight))
        if self.num_lists == 1:
            return lent, lent
        own = _best(scores_XRM, size, columns_RM, least(share, weight / self.num_lists))
        return lent, own.for_heads(len(self.q_QRC))

    def _weight(self, heads: ScanHeads) -> float:
        """What the queries of a row count for together."""
        if heads == "fused":
            return len(self.k_EJC)
        if heads == "routed" and not self.scorer.residual:
            return self.num_lists * (self.scorer.num_routed_heads or 0)
        return len(self.q_QRC)

    def scanned(self) -> Tensor:
        """[X, R, J], infinite on sinks and window."""
        every_RJ = torch.arange(self.k_EJC.shape[1]).expand(len(self.positions_R), -1)
        if self.scorer.kind == "page_minmax":
            return self._forcing(self._by_pages(), every_RJ)
        return self.ranked(every_RJ, self.scorer.scan_heads)

    def ranked(self, columns_RM: Tensor, heads: ScanHeads) -> Tensor:
        """[X, R, M] of ascending positions, normalised among them, infinite on sinks and window."""
        queries, weights_QR, key_heads = self._mixed(heads, columns_RM)
        shares_QRM = self._logits(queries, key_heads, columns_RM).softmax(-1)
        return self._forcing(self._summed(shares_QRM * weights_QR[..., None], key_heads), columns_RM)

    def _summed(self, shares_QRM: Tensor, key_heads: Tensor) -> Tensor:
        """[X, R, M]: the queries of each list."""
        if self.num_lists == 1:
            return shares_QRM.sum(0, keepdim=True)
        return torch.zeros(self.num_lists, *shares_QRM.shape[1:]).index_add_(0, key_heads, shares_QRM)

    def _by_pages(self) -> Tensor:
        """[X, R, J], every position with the share of its page."""
        size, (_, num_keys, _) = self.scorer.tokens_per_page, self.k_EJC.shape
        columns_RJ = torch.arange(num_keys).expand(len(self.positions_R), -1)
        queries, weights_QR, key_heads = self._mixed(self.scorer.scan_heads, columns_RJ)
        full_JED = self.k_EJC[:, : num_keys // size * size].transpose(0, 1)
        low, high = page_bounds(full_JED.unflatten(0, (-1, size)))
        scores_XRJ = torch.zeros(self.num_lists, len(self.positions_R), num_keys)
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
            shares_Q1N = (bounds_QN[:, None] * self.scale).softmax(-1) * weights_QR[:, r, None, None]
            page_XN = self._summed(shares_Q1N, key_heads)[:, 0]
            scores_XRJ[:, r, :row_len] = page_XN.repeat_interleave(size, -1)[:, :row_len]
        return scores_XRJ

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
        worths = route.worth(logits_QRM, forced_RM).chunk(self.num_lists)
        chosen_QR = torch.cat([route.choose(worth, self.scorer.num_routed_heads) for worth in worths])
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

    def _forcing(self, scores_XRM: Tensor, columns_RM: Tensor) -> Tensor:
        scores_XRM = scores_XRM.masked_fill(self._forced(columns_RM), torch.inf)
        return scores_XRM.masked_fill(columns_RM > self.positions_R[:, None], -torch.inf)


def _best(scores: Tensor, size: int, columns_RM: Tensor | None, least: float | None = None) -> Lists:
    """Positions of the `size` highest scores [..., R, M], ascending; equal scores by the lower one, as pages have
    them. Of these those that exceed `least`."""
    best = scores.sort(dim=-1, descending=True, stable=True).indices[..., :size].sort(-1).values
    return listed(best, scores, columns_RM, least)


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
