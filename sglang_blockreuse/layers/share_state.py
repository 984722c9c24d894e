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

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from ..kernels.cpu_select import Table
from .plan import BoundLayer, BoundPlan

Kind = Literal["pool", "indices"]
FIELDS = ("row", "version", "length", "kv", "keys", "digest")
_VOID = -1  # a version that no step has


class StaleShareState(RuntimeError):
    """A consumer met state that does not belong to its row and step."""


class NotTheWriterError(RuntimeError):
    """A layer asked to write a field that its role does not own."""


class ShareState:
    """The tables and stamps of a bound plan. Not thread-safe: one forward at a time."""

    def __init__(
        self,
        plan: BoundPlan,
        num_requests: int,
        num_lists: int,
        *,
        num_lent: int | None = None,
        strict: bool = False,
    ) -> None:
        """`num_lists` are those of a layer's own attention, `num_lent` those it lends; as many when absent."""
        if plan.selection is None:
            raise ValueError(f"plan {plan.name} has no sparse layer, so its layers share nothing")
        self.plan, self.strict = plan, strict
        self.version = 0
        self.counts: Counter[str] = Counter()
        num_lent = num_lists if num_lent is None else num_lent
        self._tables: dict[tuple[int, Kind], Table] = {}
        self._stamps: dict[tuple[int, Kind], Any] = {}
        for layer in plan.layers:
            pooled = layer.pool_readers or plan.reranks_own_pool or plan.selection.refresh_every > 1
            if layer.role == "full" and pooled and plan.selection.pool_size:
                self._add(layer.layer, "pool", Table.empty(num_requests, num_lent, plan.selection.pool_size))
            if layer.scores and layer.index_readers:
                self._add(layer.layer, "indices", Table.empty(num_requests, num_lent, plan.selection.final_k))
        # keys of a row when its pool was last made of the whole history, by full layer
        self._scanned: dict[int, Any] = {}
        if plan.selection.refresh_every > 1:
            pools = (at for at, kind in self._tables if kind == "pool")
            self._scanned = {at: np.full(num_requests, _VOID, np.int64) for at in pools}
        # T of layers that nobody follows, and of consumers that scanned for themselves
        self.own = Table.empty(num_requests, num_lists, plan.selection.final_k)
        self._requests_R: Any = np.zeros(0, np.int32)
        self._expected_R3: Any = np.zeros((0, 3), np.int64)

    def _add(self, layer: int, kind: Kind, table: Table) -> None:
        self._tables[layer, kind] = table
        self._stamps[layer, kind] = np.full((len(table.counts), len(FIELDS)), _VOID, np.int64)

    @property
    def num_bytes(self) -> int:
        arrays = [array for table in (*self._tables.values(), self.own) for array in table]
        arrays += [*self._stamps.values(), *self._scanned.values()]
        return sum(int(array.nbytes) for array in arrays)

    # -- steps -------------------------------------------------------------------------------

    def begin(self, requests_R: Any, row_ids_R: Any, lens_R: Any) -> None:
        """A new step of these request slots (int32), each held by a row of this identity, with these many keys."""
        self.version += 1
        self._requests_R = requests_R
        self._expected_R3 = np.empty((len(requests_R), 3), np.int64)
        self._expected_R3[:, 0] = row_ids_R
        self._expected_R3[:, 1] = self.version
        self._expected_R3[:, 2] = lens_R

    def invalidate(self, requests: Sequence[int]) -> None:
        """The requests ended, were retracted or aborted: what their slots hold is nobody's."""
        for stamp_B6 in self._stamps.values():
            stamp_B6[requests] = _VOID

    def truncate(self, request: int, num_tokens: int) -> None:
        """Roll a row back to `num_tokens` keys: state that saw more of them is void, the row's KV stays."""
        for stamp_B6 in self._stamps.values():
            if stamp_B6[request, 2] > num_tokens:
                stamp_B6[request] = _VOID

    # -- writers -----------------------------------------------------------------------------

    def table_to_write(self, layer: BoundLayer, kind: Kind) -> Table:
        """The table that `layer` fills and then seals. Raises NotTheWriterError.

        A full layer owns its pool and its indices, a reindex layer its indices, a reuse layer nothing.
        """
        self._require_owner(layer, kind)
        return self._tables[layer.layer, kind]

    def seal(self, layer: BoundLayer, kind: Kind) -> None:
        """Stamp what the layer wrote for the rows of this step. Raises NotTheWriterError."""
        self._require_owner(layer, kind)
        requests_R, stamp_B6 = self._requests_R, self._stamps[layer.layer, kind]
        stamp_B6[requests_R, :3] = self._expected_R3
        stamp_B6[requests_R, 3:5] = pointers(layer)
        stamp_B6[requests_R, 5] = digest()(requests_R, *self._tables[layer.layer, kind])

    def _require_owner(self, layer: BoundLayer, kind: Kind) -> None:
        roles = ("full",) if kind == "pool" else ("full", "reindex")
        if layer.role not in roles or (layer.layer, kind) not in self._tables:
            raise NotTheWriterError(
                f"layer {layer.layer} is {layer.role} and has no {kind} of its own to write; writers are "
                f"{[at for at, of in self._tables if of == kind]}."
            )

    def note_scans(self, layer: BoundLayer, pooled_R: Any) -> None:
        """The rows with pooled_R = 0 (uint8) made the pool that was just sealed from their whole history."""
        scanned = pooled_R == 0
        self._scanned[layer.layer][self._requests_R[scanned]] = self._expected_R3[scanned, 2]

    # -- consumers ---------------------------------------------------------------------------

    def resume(self, layer: BoundLayer) -> tuple[Table, Any, Any]:
        """A full layer's own pool of an earlier step, for `refresh_every` above 1: what may be extended, not taken.

        Returns the table, the keys that each row's pool has seen (int64 [R], 0: the row must scan) and the steps
        since its scan. A pool may be extended only if it is of this row, untouched, not of its future, and its scan
        is less than `refresh_every` tokens old.
        """
        assert self.plan.selection is not None
        table, stamp_B6 = self._tables[layer.layer, "pool"], self._stamps[layer.layer, "pool"]
        requests_R = self._requests_R
        stamp_R6, scanned_R = stamp_B6[requests_R], self._scanned[layer.layer][requests_R]
        seen_R, lens_R = stamp_R6[:, 2], self._expected_R3[:, 2]
        age_R = lens_R - scanned_R
        good_R = (stamp_R6[:, 0] == self._expected_R3[:, 0]) & (stamp_R6[:, 1] < self.version)
        good_R &= (stamp_R6[:, 3:5] == pointers(layer)).all(1)
        good_R &= (scanned_R > 0) & (scanned_R <= seen_R) & (seen_R < lens_R)
        good_R &= age_R < self.plan.selection.refresh_every
        if good_R.any():
            intact_R = digest()(requests_R, *table) == stamp_R6[:, 5]
            self.counts["stale_digest"] += int((good_R & ~intact_R).sum())
            good_R &= intact_R
        return table, np.where(good_R, seen_R, 0), np.where(good_R, age_R, 0)

    def take(self, layer: BoundLayer) -> tuple[Table, Any]:
        """What the layer's anchor left for it, and which rows of this step may use it (uint8 [R]).

        Rows that may not are counted under `stale_<field>`, the first field that differs; a strict state raises
        StaleShareState for them.
        """
        if layer.anchor is None:
            raise ValueError(f"layer {layer.layer} is {layer.role} and takes nothing from an anchor")
        kind: Kind = "pool" if layer.role == "reindex" else "indices"
        table, stamp_B6 = self._tables[layer.anchor, kind], self._stamps[layer.anchor, kind]
        requests_R = self._requests_R
        expected_R6 = np.empty((len(requests_R), len(FIELDS)), np.int64)
        expected_R6[:, :3] = self._expected_R3
        expected_R6[:, 3:5] = pointers(self.plan.layers[layer.anchor])
        expected_R6[:, 5] = digest()(requests_R, *table)
        good_R6 = stamp_B6[requests_R] == expected_R6
        fresh_R = good_R6.all(1)
        if not fresh_R.all():
            self._stale(layer, kind, good_R6, fresh_R)
        return table, fresh_R.view(np.uint8)

    def _stale(self, layer: BoundLayer, kind: Kind, good_R6: Any, fresh_R: Any) -> None:
        stale = np.flatnonzero(~fresh_R)
        fields = [FIELDS[at] for at in good_R6[stale].argmin(1)]
        self.counts.update(f"stale_{field}" for field in fields)
        if self.strict:
            rows = ", ".join(
                f"request slot {self._requests_R[row]}: {field}"
                for row, field in zip(stale, fields, strict=True)
            )
            raise StaleShareState(
                f"layer {layer.layer} takes the {kind} of layer {layer.anchor}, stale in {rows}"
            )

    # -- tests -------------------------------------------------------------------------------

    def written(self) -> dict[tuple[int, Kind], tuple[Table, Any]]:
        """Every table with its stamps, for tests that look inside or plant faults."""
        return {at: (table, self._stamps[at]) for at, table in self._tables.items()}


def pointers(layer: BoundLayer) -> tuple[int, int]:
    """P_KV and P_I of what a layer writes: the layers whose main KV and whose scored keys its positions are of."""
    own = layer.layer
    kv, keys = layer.kv_from, layer.key_from
    return own if kv is None else kv, own if keys is None else keys


@functools.cache
def digest() -> Callable[..., Any]:
    """int64 [R] over the rows' positions, slots and counts; any single change of a value shows."""
    import numba

    @numba.njit(nogil=True)
    def compiled(requests_R, positions, slots, counts):  # type: ignore[no-untyped-def]
        digests = np.empty(requests_R.shape[0], np.int64)
        for r in range(requests_R.shape[0]):
            request = requests_R[r]
            total = np.int64(0)
            for x in range(positions.shape[1]):
                count = max(0, min(counts[request, x], positions.shape[2]))
                total += np.int64(2 * x + 1) * counts[request, x]
                for j in range(count):
                    # odd factors: a changed value never vanishes modulo 2 ** 64, nor does an exchange of two
                    factor = np.int64(2 * (x * positions.shape[2] + j) + 3)
                    total += factor * (
                        positions[request, x, j] + np.int64(0x9E3779B97F4A7C) * slots[request, x, j]
                    )
            digests[r] = total
        return digests

    return compiled  # type: ignore[no-any-return]
