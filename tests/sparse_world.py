"""A small token pool with rows on it, and the law of a layer plan in plain PyTorch, for tests of sparse decode.

Dims as in sglang_blockreuse/layers/sparse_decode.py. Every slot that no row owns holds NaN.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels import reference_route as route
from sglang_blockreuse.kernels import reference_select as law
from sglang_blockreuse.kernels.cpu_attention import KeyBias
from sglang_blockreuse.kernels.reference_index import IndexMap, index_codes, index_keys
from sglang_blockreuse.kernels.reference_pages import page_token_scores
from sglang_blockreuse.kernels.reference_tail import tail_attention
from sglang_blockreuse.layers.decode_step import Batch, Step
from sglang_blockreuse.layers.plan import TAIL_BLOCK, BoundPlan
from sglang_blockreuse.layers.plan_loader import LayerPlan
from sglang_blockreuse.layers.plan_schema import read_spec
from sglang_blockreuse.layers.sparse_decode import SparseDecoder

H, G, D = 3, 3, 64
SCALE = D**-0.5
ROLES = {"D": "dense", "F": "full", "X": "reindex", "R": "reuse"}


def make_plan(
    pattern: str,
    *,
    heads: str = "layer",
    scorer: dict[str, object] | None = None,
    folder: Path | None = None,
    attend_all: Sequence[int] = (),
    key_from: dict[int, int] | None = None,
    kv_from: dict[int, int] | None = None,
    tails: dict[int, str] | None = None,
    **selection: Any,
) -> BoundPlan:
    """A plan from one letter per layer; X takes the pool of the latest F, R the indices of the latest F or X."""
    entries, full, indices = [], None, None
    for layer, letter in enumerate(pattern):
        entry: dict[str, object] = {"layers": layer, "role": ROLES[letter]}
        if letter == "F" and layer in attend_all:
            entry["attend"] = "all"
        if layer in (key_from or {}):
            entry["key_from"] = key_from[layer]
        if layer in (kv_from or {}):
            entry["kv_from"] = kv_from[layer]
        if layer in (tails or {}):
            entry["tail"] = tails[layer]
        if letter in "XR":
            entry["anchor"] = full if letter == "X" else indices
        full = layer if letter == "F" else full
        indices = layer if letter in "FX" else indices
        entries.append(entry)
    raw = {"version": 1, "name": pattern, "layers": entries, "scorer": {"heads": heads, **(scorer or {})}}
    if selection:
        raw["selection"] = selection
    spec = read_spec(json.dumps(raw), "test.json")
    return LayerPlan(spec, "test", None if folder is None else str(folder)).bind(len(pattern), None)


class World:
    """Rows of `lens` keys in scattered slots, at request slots 2, 3, … in batch order reversed."""

    def __init__(
        self, plan: BoundPlan, lens: Sequence[int], *, dtype: torch.dtype = torch.float32, seed: int = 0
    ) -> None:
        torch.manual_seed(seed)
        self.plan, self.dtype, self.lens = plan, dtype, list(lens)
        self.requests = [len(lens) + 1 - r for r in range(len(lens))]
        self.row_ids = np.arange(100, 100 + len(lens))
        num_slots = 2 * sum(lens) + 8
        self.table = torch.zeros(len(lens) + 3, max(lens) + 4, dtype=torch.int32)
        free = (torch.randperm(num_slots - 1) + 1).int()
        self.k = [torch.full((num_slots, H, D), torch.nan, dtype=dtype) for _ in plan.layers]
        self.v = [torch.full((num_slots, H, D), torch.nan, dtype=dtype) for _ in plan.layers]
        self.tags = torch.full((num_slots,), 255, dtype=torch.uint8)
        for request, n in zip(self.requests, lens, strict=True):
            mine, free = free[:n], free[n:]
            self.table[request, :n] = mine
            self.tags[mine.long()] = torch.randint(0, 4, (n,), dtype=torch.uint8)
            for pool in (*self.k, *self.v):
                pool[mine.long()] = (torch.randn(n, H, D) * 2).to(dtype)
        self.q = [torch.randn(len(lens), H * G, D).to(dtype) for _ in plan.layers]
        self.bias: KeyBias | None = None
        self.maps: dict[int, IndexMap] = {}  # of the layers that score, for a scorer that has weights

    def decoder(self, **options: object) -> SparseDecoder:
        num_requests = self.table.shape[0]
        return SparseDecoder(
            self.plan, num_requests=num_requests, num_q_heads=H * G, k_pools=self.k, **options
        )

    def batch(self, dense: Sequence[int] = (), order: Sequence[int] | None = None) -> Batch:
        """The rows as one decode batch, or those of `order`; `dense` are row numbers."""
        order = range(len(self.lens)) if order is None else order
        return Batch(
            slot_table=self.table,
            requests=[self.requests[r] for r in order],
            lens=[self.lens[r] for r in order],
            row_ids=self.row_ids[list(order)],
            dense=np.array([r in dense for r in order], np.uint8),
            bias=self.bias,
        )

    def run(
        self, decoder: SparseDecoder, step: Step, layer: int, order: Sequence[int] | None = None
    ) -> Tensor:
        q = self.q[layer] if order is None else self.q[layer][list(order)]
        out = torch.full_like(q, torch.nan)
        decoder.run(step, layer, q, self.k[layer], self.v[layer], out, scale=SCALE)
        return out

    def run_all(self, decoder: SparseDecoder, **batch: object) -> list[Tensor]:
        step = decoder.begin(self.batch(**batch))
        assert step is not None
        return [self.run(decoder, step, layer, batch.get("order")) for layer in range(self.plan.num_layers)]

    # -- the law -----------------------------------------------------------------------------

    def expected(self) -> list[Tensor]:
        """Output of every layer in float64, with every row sparse."""
        return [self._expected(layer) for layer in range(self.plan.num_layers)]

    def _expected(self, layer: int) -> Tensor:
        bound = self.plan.layers[layer]
        if bound.role == "dense" or bound.attend == "all":
            return self.dense(layer)
        positions, counts = self.indices(layer)
        if bound.tail == "block_mean":
            return self.with_tail(layer, positions, counts)
        return self.attention(layer, positions, counts)

    def with_tail(self, layer: int, positions_RXK: Tensor, counts_R: Tensor) -> Tensor:
        """float64 attention of every row over its listed positions and the means of the others."""
        q, k, v = self.q[layer].double(), self.k[layer].double(), self.v[layer].double()
        counts_RX = counts_R.view(len(self.lens), -1).expand(-1, positions_RXK.shape[1])
        words = {"block_size": TAIL_BLOCK, "scale": SCALE, **self._bias_words()}
        return tail_attention(q, k, v, positions_RXK, counts_RX, *self._history(), **words)

    def dense(self, layer: int) -> Tensor:
        positions = [torch.arange(n).expand(1, -1) for n in self.lens]
        padded = torch.full((len(positions), 1, max(self.lens)), -1)
        for r, p in enumerate(positions):
            padded[r, :, : p.shape[1]] = p
        return self.attention(layer, padded, torch.tensor(self.lens))

    def attention(self, layer: int, positions_RXK: Tensor, counts_R: Tensor) -> Tensor:
        """float64 attention of every row over its listed positions; counts [R], or [R, X] of ragged lists."""
        num_lists = positions_RXK.shape[1]
        counts_RX = counts_R.view(len(self.lens), -1).expand(-1, num_lists)
        out_RQD = torch.empty(self.q[layer].shape, dtype=torch.float64)
        for (r, request), x in itertools.product(enumerate(self.requests), range(num_lists)):
            slots = self.table[request][positions_RXK[r, x, : counts_RX[r, x]].long()]
            heads, queries = (
                (slice(x, x + 1), slice(x * G, x * G + G)) if num_lists > 1 else (slice(None),) * 2
            )
            out_RQD[r, queries] = reference.decode_attention(
                self.q[layer][r : r + 1, queries].double(),
                self.k[layer][:, heads].double(),
                self.v[layer][:, heads].double(),
                slots,
                torch.tensor([0, len(slots)]),
                scale=SCALE,
                **self._bias_words(),
            )[0][0]
        return out_RQD

    @functools.cache  # noqa: B019 - worlds live for one test
    def indices(self, layer: int, *, lent: bool = False) -> tuple[Tensor, Tensor]:
        """By which the layer attends, or which it lends."""
        bound, scorer = self.plan.layers[layer], self.plan.scorer
        lists = scorer.lends if lent else scorer.heads
        if bound.role == "reuse":
            return self.indices(bound.anchor, lent=True)
        if bound.role == "full" and self.plan.reranks_own_pool:
            return self._rerank(layer, layer, lists)
        if bound.role == "full":
            return self._scan(layer, self.plan.selection.final_k, lists, self.plan.selection.share)
        return self._rerank(layer, bound.anchor, lists)

    def _rerank(self, layer: int, anchor: int, lists: str) -> tuple[Tensor, Tensor]:
        scorer = self.plan.scorer
        pool, counts = self._scan(anchor, self.plan.selection.pool_size, scorer.lends)
        heads, k = scorer.rerank_heads or scorer.scan_heads, self.plan.selection.final_k
        if heads == "routed":
            scores = self._routed(layer, pool, counts, lists)
        else:
            words = {"pool_RXM": pool, "pool_lens_R": counts, **self._words(lists)}
            scores = law.pooled_scores(*self._scored(layer, heads), *self._history(), **words)
        inside = {
            "positions_RXW": pool.expand(-1, scores.shape[1], -1),
            "row_lens_R": torch.tensor(self.lens),
        }
        return self._kept(scores, counts, k, heads, self.plan.selection.share, **inside)

    def _kept(
        self, scores_RXW: Tensor, lens_R: Tensor, size: int, heads: str, share: float | None, **inside: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The best, or with a share those whose queries give it to them on average."""
        if share is None:
            return law.top_k(scores_RXW, lens_R, size, **inside, **self._forced())
        num_queries, scorer = {"all": H * G, "fused": H}.get(heads), self.plan.scorer
        if num_queries is None:
            num_chosen = scorer.num_routed_heads * (H if scorer.heads == "kv_head" else 1)
            num_queries = H * G if scorer.residual else num_chosen
        least = share * num_queries / scores_RXW.shape[1]
        return law.above(scores_RXW, lens_R, least, size, **inside, **self._forced())

    def _scan(self, layer: int, size: int, lists: str, share: float | None = None) -> tuple[Tensor, Tensor]:
        heads, lens_R = self.plan.scorer.scan_heads, torch.tensor(self.lens)
        if self.plan.scorer.kind == "page_minmax":
            scores = page_token_scores(
                *self._scored(layer, heads),
                *self._history(),
                page_size=self.plan.scorer.tokens_per_page,
                **self._words(lists),
            )
        elif heads == "routed":
            scores = self._routed(layer, None, lens_R, lists)
        else:
            scores = law.pooled_scores(*self._scored(layer, heads), *self._history(), **self._words(lists))
        return self._kept(scores, lens_R, size, heads, share)

    def _routed(self, layer: int, pool: Tensor | None, counts_R: Tensor, lists: str) -> Tensor:
        """Scores [R, X, W] of a few heads, over the history or a pool. Heads are chosen for the lists by which a
        layer attends; one list that is lent is their sum."""
        q, k = self._scored(layer, "all")
        num_chosen_for = k.shape[1] if self.plan.scorer.heads == "kv_head" else 1
        scores = torch.full((len(self.lens), num_chosen_for, int(counts_R.max())), -torch.inf).double()
        for r, x in itertools.product(range(len(self.lens)), range(num_chosen_for)):
            pooled = None if pool is None else pool[r].expand(num_chosen_for, -1)[x, : counts_R[r]]
            positions = torch.arange(self.lens[r]) if pooled is None else pooled.long()
            slots = self.table[self.requests[r], positions].long()
            heads = slice(None) if num_chosen_for == 1 else slice(x, x + 1)
            q_QD = q[r].unflatten(0, (k.shape[1], -1))[heads].flatten(0, 1)
            scores[r, x, : len(slots)] = self._routed_list(q_QD, k[slots][:, heads], positions, slots, r)
        return scores.sum(1, keepdim=True) if lists == "layer" else scores

    def _routed_list(self, q_QD: Tensor, k_CED: Tensor, positions: Tensor, slots: Tensor, r: int) -> Tensor:
        scorer, selection = self.plan.scorer, self.plan.selection
        bias = (
            None
            if self.bias is None
            else reference.key_bias(self.tags, slots, self.bias.alpha, self.bias.beta)
        )
        logits_EGC = torch.einsum("egd,ced->egc", q_QD.unflatten(0, (k_CED.shape[1], -1)), k_CED) * SCALE
        logits_QC = logits_EGC.flatten(0, 1) + (0 if bias is None else bias)
        forced = (positions < selection.sink) | (positions >= self.lens[r] - selection.window)
        chosen = route.choose(route.worth(logits_QC, forced), scorer.num_routed_heads)
        return route.routed_scores(q_QD, k_CED, chosen, bias, scale=SCALE, residual=scorer.residual)

    def _scored(self, layer: int, heads: str) -> tuple[Tensor, Tensor]:
        """The queries and keys of float64 that the plan's scorer compares."""
        source = self.plan.layers[layer].key_from
        q, k = self.q[layer], self.k[layer if source is None else source]
        if self.plan.scorer.kind == "int4_keys":
            k = law.dequantise_int4(law.quantise_int4(k))
        elif layer in self.maps:
            index = IndexMap(*(x.double() for x in self.maps[layer]))
            q = torch.einsum("rqd,qcd->rqc", q.double(), index.query_QCD)
            k = index_keys(index, index_codes(self.maps[layer], k))
        if heads == "fused":
            q = q.double().unflatten(1, (k.shape[1], -1)).mean(2)
        return q.double(), k.double()

    def _history(self) -> tuple[Tensor, Tensor]:
        rows = [self.table[request, :n] for request, n in zip(self.requests, self.lens, strict=True)]
        return torch.cat(rows), torch.tensor([0, *np.cumsum(self.lens)])

    def _words(self, lists: str) -> dict[str, object]:
        return {
            "scale": SCALE,
            "heads": lists,
            **self._bias_words(),
        }

    def _forced(self) -> dict[str, int]:
        return {"num_sinks": self.plan.selection.sink, "window": self.plan.selection.window}

    def _bias_words(self) -> dict[str, object]:
        return (
            {}
            if self.bias is None
            else {"tags_S": self.tags, "alpha": self.bias.alpha, "beta": self.bias.beta}
        )
