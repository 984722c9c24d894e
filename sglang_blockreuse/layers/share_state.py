"""What the layers of a group hand to each other, per request slot, and the checks that keep it from going stale.

The source's state of group r (equation 8) is S_r = (P_KV, P_I, P_Ω, P_T, v_r, n_r). Here:

    P_Ω, P_T    a `Table` per writing layer, whose rows belong to request slots of the host, so a row that moves
                inside the batch leaves its state where it is
    stamp       int64 [B, 6] beside each table: whose row it is, v_r, n_r, the layers that P_KV and P_I name, and a
                digest of the positions and slots

A consumer takes a row only if every field is what it expects in this step. A row that fails is scanned anew by the
consumer (fail closed) and counted, or raises StaleShareState in a strict state. Ω and T live for one step of one
row: `begin` makes all older versions stale. Nothing here is sized by the context.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from ..kernels.choose import cpu_ops
from ..kernels.ops import FIELDS, VOID, Checked, Expected, Lent, Ops, Table
from .plan import BoundLayer, BoundPlan

Kind = Literal["pool", "indices"]
CONSUMERS = ("reindex", "reuse")


class StaleShareState(RuntimeError):
    """A consumer met state that does not belong to its row and step."""


class NotTheWriterError(RuntimeError):
    """A layer asked to write a field that its role does not own."""


class ShareState:
    """The tables and stamps of a bound plan. Not thread-safe: one forward at a time.

    Everything is on the device of the KV pool, and nothing is read back unless the state is strict: a captured step
    finds its version, its rows and what it counts where they were.
    """

    def __init__(
        self,
        plan: BoundPlan,
        num_requests: int,
        num_lists: int,
        *,
        num_lent: int | None = None,
        strict: bool = False,
        ops: Ops | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """`num_lists` are those of a layer's own attention, `num_lent` those it lends; as many when absent."""
        if plan.selection is None:
            raise ValueError(f"plan {plan.name} has no sparse layer, so its layers share nothing")
        self.plan, self.strict = plan, strict
        self._ops = cpu_ops() if ops is None else ops
        self._device = device
        self.version_1 = torch.zeros(1, dtype=torch.int64, device=device)
        num_lent = num_lists if num_lent is None else num_lent
        self._lent: dict[tuple[int, Kind], Lent] = {}
        for layer in plan.layers:
            pooled = layer.pool_readers or plan.reranks_own_pool or plan.selection.refresh_every > 1
            if layer.role == "full" and pooled and plan.selection.pool_size:
                self._add(layer.layer, "pool", num_requests, num_lent, plan.selection.pool_size)
            if layer.scores and layer.index_readers:
                self._add(layer.layer, "indices", num_requests, num_lent, plan.selection.final_k)
        # keys of a row when its pool was last made of the whole history, by full layer
        self._scanned: dict[int, Tensor] = {}
        if plan.selection.refresh_every > 1:
            for at in [at for at, kind in self._lent if kind == "pool"]:
                self._scanned[at] = torch.full((num_requests,), VOID, dtype=torch.int64, device=device)
        # T of layers that nobody follows, and of consumers that scanned for themselves
        self.own = Table.empty(num_requests, num_lists, plan.selection.final_k, device)
        # rows that were stale, by the first field that differed, and all of them
        self.stale = {
            role: torch.zeros(len(FIELDS) + 1, dtype=torch.int64, device=device)
            for role in (*CONSUMERS, "full")
        }
        none = torch.zeros(0, dtype=torch.int32, device=device)
        self.expected = Expected(none, none, torch.zeros((0, 3), dtype=torch.int64, device=device))

    def _add(self, layer: int, kind: Kind, num_requests: int, num_lists: int, size: int) -> None:
        table = Table.empty(num_requests, num_lists, size, self._device)
        shape = (num_requests, len(FIELDS))
        stamps_B6 = torch.full(shape, VOID, dtype=torch.int64, device=self._device)
        self._lent[layer, kind] = Lent(table, stamps_B6)

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for lent in self._lent.values() for tensor in (*lent.table, lent.stamps_B6)]
        return sum(int(tensor.nbytes) for tensor in (*tensors, *self.own, *self._scanned.values()))

    @property
    def counts(self) -> Counter[str]:
        """How many rows were stale, by field. Waits for the device."""
        counts: Counter[str] = Counter()
        for stale_F1 in self.stale.values():
            for field, num in zip(FIELDS, stale_F1.tolist(), strict=False):
                counts.update({f"stale_{field}": num} if num else {})
        return counts

    # -- steps -------------------------------------------------------------------------------

    def begin(self, requests_R: Tensor, row_ids_R: Tensor, lens_R: Tensor) -> None:
        """A new step of these request slots (int32), each held by a row of this identity (int64), with these many
        keys (int32)."""
        self.version_1 += 1
        values = (row_ids_R, self.version_1.expand(len(requests_R)), lens_R.long())
        self.expected = Expected(requests_R, lens_R, torch.stack(values, 1))

    def invalidate(self, requests: Sequence[int]) -> None:
        """The requests ended, were retracted or aborted: what their slots hold is nobody's."""
        for lent in self._lent.values():
            lent.stamps_B6[requests] = VOID

    def truncate(self, request: int, num_tokens: int) -> None:
        """Roll a row back to `num_tokens` keys: state that saw more of them is void, the row's KV stays."""
        for lent in self._lent.values():
            if lent.stamps_B6[request, 2] > num_tokens:
                lent.stamps_B6[request] = VOID

    # -- writers -----------------------------------------------------------------------------

    def table_to_write(self, layer: BoundLayer, kind: Kind) -> Table:
        """The table that `layer` fills and then seals. Raises NotTheWriterError.

        A full layer owns its pool and its indices, a reindex layer its indices, a reuse layer nothing.
        """
        return self._own_of(layer, kind).table

    def seal(self, layer: BoundLayer, kind: Kind) -> None:
        """Stamp what the layer wrote for the rows of this step. Raises NotTheWriterError."""
        self._ops.seal(self.expected, self._own_of(layer, kind), pointers(layer))

    def _own_of(self, layer: BoundLayer, kind: Kind) -> Lent:
        roles = ("full",) if kind == "pool" else ("full", "reindex")
        if layer.role not in roles or (layer.layer, kind) not in self._lent:
            raise NotTheWriterError(
                f"layer {layer.layer} is {layer.role} and has no {kind} of its own to write; writers are "
                f"{[at for at, of in self._lent if of == kind]}."
            )
        return self._lent[layer.layer, kind]

    def note_scans(self, layer: BoundLayer, pooled_R: Tensor) -> None:
        """The rows with pooled_R = 0 (uint8) made the pool that was just sealed from their whole history."""
        scanned_B, requests_R = self._scanned[layer.layer], self.expected.requests_R.long()
        scans_R = (pooled_R == 0) & (self.expected.lens_R > 0)
        lens_R = torch.where(scans_R, self.expected.values_R3[:, 2], scanned_B[requests_R])
        scanned_B.index_copy_(0, requests_R, lens_R)

    # -- consumers ---------------------------------------------------------------------------

    def resume(self, layer: BoundLayer) -> tuple[Table, Tensor, Tensor]:
        """A full layer's own pool of an earlier step, for `refresh_every` above 1: what may be extended, not taken.

        Returns the table, the keys that each row's pool has seen (int64 [R], 0: the row must scan) and the steps
        since its scan. A pool may be extended only if it is of this row, untouched, not of its future, and its scan
        is less than `refresh_every` tokens old.
        """
        assert self.plan.selection is not None
        lent, scanned_B = self._lent[layer.layer, "pool"], self._scanned[layer.layer]
        refresh_every = self.plan.selection.refresh_every
        seen_R, age_R = self._ops.resume(
            self.expected, lent, pointers(layer), scanned_B, refresh_every, self.stale["full"]
        )
        return lent.table, seen_R, age_R

    def take(self, layer: BoundLayer) -> tuple[Table, Checked]:
        """What the layer's anchor left for it, and which rows of this step may use it.

        Rows that may not are counted under `stale_<field>`, the first field that differs; a strict state raises
        StaleShareState for them.
        """
        if layer.anchor is None:
            raise ValueError(f"layer {layer.layer} is {layer.role} and takes nothing from an anchor")
        kind: Kind = "pool" if layer.role == "reindex" else "indices"
        lent, written_by = self._lent[layer.anchor, kind], pointers(self.plan.layers[layer.anchor])
        checked = self._ops.check(self.expected, lent, written_by, self.stale[layer.role])
        if self.strict and checked.good_RF is not None and not checked.good_RF.all():
            self._raise(layer, kind, checked.good_RF)
        return lent.table, checked

    def _raise(self, layer: BoundLayer, kind: Kind, good_RF: Tensor) -> None:
        rows = ", ".join(
            f"request slot {request}: {FIELDS[good_F.index(False)]}"
            for request, good_F in zip(self.expected.requests_R.tolist(), good_RF.tolist(), strict=True)
            if not all(good_F)
        )
        raise StaleShareState(
            f"layer {layer.layer} takes the {kind} of layer {layer.anchor}, stale in {rows}"
        )

    # -- tests -------------------------------------------------------------------------------

    def written(self) -> dict[tuple[int, Kind], tuple[Table, Any]]:
        """Every table with its stamps, for tests that look inside or plant faults."""
        return {at: (lent.table, lent.stamps_B6) for at, lent in self._lent.items()}


def pointers(layer: BoundLayer) -> tuple[int, int]:
    """P_KV and P_I of what a layer writes: the layers whose main KV and whose scored keys its positions are of."""
    own = layer.layer
    kv, keys = layer.kv_from, layer.key_from
    return own if kv is None else kv, own if keys is None else keys
