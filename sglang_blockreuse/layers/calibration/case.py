"""One text with rows that are forced: decode under any plan, compared with dense decode of the same rows.

Dims: N tokens of the context, R rows behind it, Q query heads, H KV heads, G = Q / H, D head dim, J = N + R keys,
      K selected and M pool positions, X layers

A row is a decode step whose input token is given. All rows run in one pass, which equals running them one after the
other: a layer writes the rows' keys and values before it attends, and a row sees the rows before it. The context's KV
is dense, as prefill is served, over the KV that the plan gives each layer (`kv_from`); the rows' KV is what the plan
makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..plan import BoundLayer, BoundPlan, Selection
from .llama import Llama

# a layer's logits: (layer, [Q, R, J], minus infinity in a row's future)
Watch = Callable[[int, Tensor], None]
# what a layer would read: (layer, positions [R, K] or [Q, R, K], what layers lent up to here, its logits)
Note = Callable[[BoundLayer, Tensor, dict[tuple[int, str], Tensor], Tensor], None]


@dataclass(frozen=True)
class Figures:
    """Per row of one case; sums over cases weigh every row alike."""

    kl_R: Tensor  # to dense decode, nats
    nll_R: Tensor  # over that of dense decode, nats
    agrees_R: Tensor  # bool, the same most likely token as dense decode

    @classmethod
    def joined(cls, parts: Sequence[Figures]) -> Figures:
        return cls(
            *(torch.cat([getattr(part, name) for part in parts]) for name in ("kl_R", "nll_R", "agrees_R"))
        )

    @property
    def kl(self) -> float:
        return float(self.kl_R.mean())

    @property
    def nll(self) -> float:
        return float(self.nll_R.mean())

    @property
    def kl_p95(self) -> float:
        return float(self.kl_R.quantile(0.95))

    @property
    def agreement(self) -> float:
        return float(self.agrees_R.float().mean())


@dataclass
class Trace:
    """What each layer of a pass began with, so that a plan that differs from layer l on need not start before."""

    hidden: list[Tensor]
    chosen: list[dict[tuple[int, str], Tensor]]  # what earlier layers lend


class Case:
    """`kind` names the task; `ids` are the context, the rows and the target of the last row."""

    def __init__(self, model: Llama, kind: str, ids: Sequence[int], num_rows: int) -> None:
        tokens = torch.tensor(list(ids))
        self.model, self.kind, self.num_rows = model, kind, num_rows
        self.num_tokens = len(ids) - num_rows - 1
        if self.num_tokens < 1:
            raise ValueError(
                f"a case needs a context before its {num_rows} rows and a target, got {len(ids)} ids"
            )
        self._rows, self._targets = tokens[self.num_tokens : -1], tokens[self.num_tokens + 1 :]
        self._positions = torch.arange(self.num_tokens, self.num_tokens + num_rows)
        self._context = tokens[: self.num_tokens]
        self._kv_layers: tuple[int, ...] | None = (
            None  # whose KV each layer of the context read; None: its own
        )
        self._keys, self._values = model.prefill(self._context, num_rows)
        keys = torch.arange(self.num_tokens + num_rows)
        self.future = keys > self._positions[:, None]  # bool [R, J], keys that a row does not see
        self.dense, _ = self.log_probs(None)

    def check(self, plan: BoundPlan) -> None:
        """Raises ValueError for a plan that this would compute wrongly."""
        if not is_plain(plan):
            raise ValueError(
                f"plan {plan.name}: this case scores exact keys with all heads in every step; judge it as ScoredCase"
            )

    def figures(self, plan: BoundPlan) -> Figures:
        baseline = baseline_of(plan)
        dense = self.dense if baseline is None else self.log_probs(baseline)[0]
        return self.compare(self.log_probs(plan)[0], dense)

    def compare(self, log_probs: Tensor, dense: Tensor | None = None) -> Figures:
        at, dense = self._targets[:, None], self.dense if dense is None else dense
        return Figures(
            kl_R=(dense.exp() * (dense - log_probs)).sum(-1).clamp_min(0),
            nll_R=(dense - log_probs).gather(1, at)[:, 0],
            agrees_R=dense.argmax(-1) == log_probs.argmax(-1),
        )

    def _enter(self, plan: BoundPlan | None) -> None:
        """Prefill the context anew where this plan shares its KV in another way than the one before."""
        kv_layers = plan.kv_layers if plan is not None and plan.shared_layers else None
        if kv_layers != self._kv_layers:
            self._keys, self._values = self.model.prefill(self._context, self.num_rows, kv_layers)
            self._kv_layers = kv_layers

    def log_probs(
        self,
        plan: BoundPlan | None,
        *,
        since: int = 0,
        trace: Trace | None = None,
        watch: Watch | None = None,
    ) -> tuple[Tensor, Trace]:
        """The rows' next-token log-probabilities under a plan (None: dense), and the trace of the pass.

        With `since` the layers before it are taken from `trace`, that of a plan which agrees with this one there.
        """
        self._enter(plan)
        model, new = self.model, Trace([], [])
        hidden, chosen = model.embed(self._rows), dict[tuple[int, str], Tensor]()
        if since and trace is not None:
            hidden, chosen = trace.hidden[since], dict(trace.chosen[since])
            new = Trace(trace.hidden[:since], trace.chosen[:since])
        for layer in range(since, model.num_layers):
            new.hidden.append(hidden)
            new.chosen.append(dict(chosen))
            hidden = self._layer(layer, hidden, plan, chosen, watch)
        return model.log_probs(hidden), new

    def selections(self, plan: BoundPlan, note: Note) -> None:
        """Dense decode, over the KV that the plan gives each layer, in which every layer that is not dense says what
        it would read under the plan."""
        chosen: dict[tuple[int, str], Tensor] = {}

        def watch(layer: int, logits_QRJ: Tensor) -> None:
            bound = plan.layers[layer]
            if bound.role != "dense":
                note(bound, self._indices(bound, plan, logits_QRJ, chosen), chosen, logits_QRJ)

        self.log_probs(plan.all_dense() if plan.shared_layers else None, watch=watch)

    def layer_alone(self, layer: int, dense: Trace, plan: BoundPlan) -> Tensor:
        """The layer's output under a plan on the inputs of dense decode, its anchors on theirs.

        `dense` is the trace of the plan's baseline. The rows' KV is left as this pass wrote it.
        """
        self._enter(baseline_of(plan))
        chosen: dict[tuple[int, str], Tensor] = {}
        lenders: list[int] = []
        bound = plan.layers[layer]
        while bound.anchor is not None:
            bound = plan.layers[bound.anchor]
            lenders.insert(0, bound.layer)
        for lender in lenders:
            self._layer(lender, dense.hidden[lender], plan, chosen, None)
        return self._layer(layer, dense.hidden[layer], plan, chosen, None)

    def _layer(
        self,
        layer: int,
        hidden: Tensor,
        plan: BoundPlan | None,
        chosen: dict[tuple[int, str], Tensor],
        watch: Watch | None,
    ) -> Tensor:
        model = self.model
        q, k, v = model.qkv(layer, hidden, self._positions)
        source = layer if plan is None else plan.kv_layers[layer]
        keys, values = self._keys[source], self._values[source]
        if source == layer:
            keys[:, self.num_tokens :], values[:, self.num_tokens :] = k, v
        logits = self._grouped(q) @ keys.transpose(1, 2) * model.head_dim**-0.5
        logits_QRJ = logits.view(model.num_q_heads, self.num_rows, -1)
        # only rows' own keys can lie in a row's future
        logits_QRJ[..., self.num_tokens :].masked_fill_(self.future[:, self.num_tokens :], -torch.inf)
        if watch is not None:
            watch(layer, logits_QRJ)
        bound = plan.layers[layer] if plan is not None else None
        if plan is not None and bound is not None and bound.role != "dense":
            indices = self._indices(bound, plan, logits_QRJ, chosen)
            if bound.attend == "selected":
                weights = torch.zeros_like(logits_QRJ)
                at = indices.expand(model.num_q_heads, -1, -1)
                weights.scatter_(-1, at, logits_QRJ.gather(-1, at).softmax(-1))
                return self._finish(layer, hidden, weights, values)
        return self._finish(layer, hidden, logits_QRJ.softmax(-1), values)

    def _finish(self, layer: int, hidden: Tensor, weights_QRJ: Tensor, values: Tensor) -> Tensor:
        out = self._grouped(weights_QRJ) @ values
        return self.model.finish(layer, hidden, out.view(self.model.num_q_heads, self.num_rows, -1))

    def _grouped(self, x: Tensor) -> Tensor:
        """[Q, R, …] as [H, G * R, …], a view."""
        return x.reshape(self.model.num_kv_heads, -1, x.shape[-1])

    def _indices(
        self,
        layer: BoundLayer,
        plan: BoundPlan,
        logits_QRJ: Tensor,
        chosen: dict[tuple[int, str], Tensor],
    ) -> Tensor:
        """Positions of the layer [R, K], or [Q, R, K], ascending or not; what it lends to others goes into `chosen`."""
        if layer.role == "reuse":
            return chosen[layer.anchor or 0, "indices"]
        selection = plan.selection
        assert selection is not None
        pool = chosen[layer.anchor or 0, "pool"] if layer.role == "reindex" else None
        shares = self.shares(logits_QRJ, pool)
        scores = self._forcing(shares.sum(0), selection, pool)
        # lent whether or not this plan reads it: a pass that starts late may be that of a plan which does
        if layer.role == "full" and selection.pool_size:
            chosen[layer.layer, "pool"] = _best(scores, selection.pool_size, None)
        chosen[layer.layer, "indices"] = _best(scores, selection.final_k, pool)
        if plan.scorer.heads == "layer":
            return chosen[layer.layer, "indices"]
        per_head = self._forcing(shares.unflatten(0, (self.model.num_kv_heads, -1)).sum(1), selection, pool)
        best = _best(per_head, selection.final_k, pool)
        return best.repeat_interleave(self.model.num_q_heads // self.model.num_kv_heads, 0)

    def shares(self, logits_QRJ: Tensor, pool_RM: Tensor | None) -> Tensor:
        """[Q, R, J], or [Q, R, M] over a pool: each head's softmax among what is scored."""
        if pool_RM is not None:
            logits_QRJ = logits_QRJ.gather(-1, pool_RM.expand(logits_QRJ.shape[0], -1, -1))
        return logits_QRJ.softmax(-1)

    def ranked(self, shares_QRJ: Tensor, selection: Selection) -> Tensor:
        """[R, J], what one list for all heads ranks: infinite on sinks and window, minus infinity in a row's future."""
        return self._forcing(shares_QRJ.sum(0), selection, None)

    def _forcing(self, scores: Tensor, selection: Selection, pool_RM: Tensor | None) -> Tensor:
        """Scores [..., R, J or M] made infinite on sinks and window."""
        positions = torch.arange(scores.shape[-1]).expand(self.num_rows, -1) if pool_RM is None else pool_RM
        scores = scores.masked_fill(self.forced(positions, selection), torch.inf)
        return scores.masked_fill_(positions > self._positions[:, None], -torch.inf)

    def forced(self, positions: Tensor, selection: Selection) -> Tensor:
        """bool [R, …]: sinks, and the row's window up to its own token and beyond."""
        return (positions < selection.sink) | (positions > self._positions[:, None] - selection.window)


def baseline_of(plan: BoundPlan) -> BoundPlan | None:
    """What a plan is compared with: dense decode (None), on shared KV where the checkpoint was trained for that."""
    return plan.all_dense() if plan.shared_layers and plan.trained_sharing else None


def is_plain(plan: BoundPlan) -> bool:
    """All heads score the layer's own keys, layers lend one list, every full layer in every step."""
    scorer = plan.scorer
    plain = (scorer.kind, scorer.lends, scorer.scan_heads) == ("exact_qk", "layer", "all")
    plain &= not plan.scorer.reranks_own_pool and all(layer.key_from is None for layer in plan.layers)
    return plain and (plan.selection is None or plan.selection.refresh_every == 1)


def _best(scores: Tensor, size: int, pool_RM: Tensor | None) -> Tensor:
    """[..., R, size] positions of the highest scores [..., R, J or M]."""
    best = scores.topk(min(size, scores.shape[-1]), -1, sorted=False).indices
    return best if pool_RM is None else pool_RM.expand(*best.shape[:-1], -1).gather(-1, best)


def by_kind(cases: Sequence[Case], parts: Sequence[Figures]) -> dict[str, Figures]:
    """The figures of each case, joined by kind of text."""
    kinds: dict[str, list[Figures]] = {}
    for case, figures in zip(cases, parts, strict=True):
        kinds.setdefault(case.kind, []).append(figures)
    return {kind: Figures.joined(found) for kind, found in kinds.items()}


def evaluate(cases: Sequence[Case], plan: BoundPlan) -> list[Figures]:
    """Each case under a plan. Raises ValueError for a plan that it would compute wrongly."""
    windows = [layer.layer for layer in plan.layers if layer.own_window]
    if windows:
        raise ValueError(f"plan {plan.name}: own_window on layers {windows} is not evaluated")
    for case in cases:
        case.check(plan)
    return [case.figures(plan) for case in cases]
