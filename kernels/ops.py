"""Operations of decode under a layer plan: records and verbs, with one signature on every device.

Dims: R rows, Q = H * G query heads, H KV heads, D head dim, S pool slots, B request slots of the host, X lists per row
      (1, or one per KV head), W columns of scores, M positions of a table row, F fields of a stamp

Three implementations: `ops_law` (plain PyTorch, which says what is right), `ops_cpu` (compiled), `ops_triton`.
`choose` takes one of them. Records hold tensors of the device that serves; nothing here asks which one it is.

Everything that differs from step to step is data in these records. A row of length 0 neither reads nor writes, so
rows that are padding, or that do not select, stay in a batch whose shape was captured.

    score    every column's worth to the queries: of the row's history, or of a pool of candidates
    keep     the best of them, as positions and slots, into a table
    attend   over what a table lists, or over everything
    seal     say whose a table's rows are, in this step
    check    whether they are still what a consumer expects
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from .cpu_rows import KeyBias
from .cpu_scan import Mix
from .reference_select import Int4Keys

FIELDS = ("row", "version", "length", "kv", "keys", "digest")  # of a stamp
VOID = -1  # a version that no step has


class IndexCodes(NamedTuple):
    """Packed codes of index keys (`reference_index`), scored by queries that carry their steps."""

    codes: Tensor  # uint8 [S, E, C / 2]


Keys = Tensor | Int4Keys | IndexCodes


class _Rows(NamedTuple):
    requests_R: Tensor  # int32, rows of the slot table and of every table
    lens_R: Tensor  # int32, keys of a row that selects, its own token among them; 0: the row selects nothing
    slot_table: Tensor  # int32 [B, positions]
    bias: KeyBias | None = None  # logit terms by slot tag
    # int32, keys of every row, where rows that select nothing attend to all of theirs; None: such rows do nothing
    dense_lens_R: Tensor | None = None


class Rows(_Rows):
    """The rows of one decode step."""

    @cached_property
    def arrays(self) -> Any:
        """Views for the compiled kernels of the CPU."""
        from .ops_cpu import rows_arrays

        return rows_arrays(self)

    @cached_property
    def first_R(self) -> Tensor:
        """int64, where each row begins in the flattened slot table."""
        return self.requests_R.long() * self.slot_table.stride(0)

    def selecting(self, lens_R: Tensor) -> Rows:
        """The same rows, of which those select whose length is not 0 here."""
        kept = Rows(*self._replace(lens_R=lens_R))
        if "first_R" in self.__dict__:
            kept.__dict__["first_R"] = self.first_R
        return kept


class _Table(NamedTuple):
    positions: Tensor  # int32 [B, X, M], ascending; what lies beyond a row's count is undefined
    slots: Tensor  # int32 [B, X, M], the same entries in the pool, translated once
    counts: Tensor  # int32 [B]


class Table(_Table):
    """Positions by request slot, so that rows may move between steps."""

    @cached_property
    def arrays(self) -> Any:
        """Views for the compiled kernels of the CPU."""
        from .cpu_select import Table as Arrays

        return Arrays(*(tensor.numpy() for tensor in self))

    @classmethod
    def empty(cls, num_requests: int, num_lists: int, size: int, device: torch.device | str = "cpu") -> Table:
        """A table for `num_requests` request slots; its content is undefined."""
        shape = (num_requests, num_lists, size)
        positions, slots = (torch.zeros(shape, dtype=torch.int32, device=device) for _ in range(2))
        return cls(positions, slots, torch.zeros(num_requests, dtype=torch.int32, device=device))


class Chosen(NamedTuple):
    """What each row attends to: the shared table where it is fresh, its own where it is not."""

    shared: Table
    own: Table | None = None
    fresh_R: Tensor | None = None  # uint8; None: all are fresh


class Queries(NamedTuple):
    """Queries as an implementation wants them; made once per layer."""

    values: Tensor  # [R, Q, D]
    scale: float  # still to be applied to a dot product


class Routing(NamedTuple):
    """Which heads are chosen, and on what they are measured."""

    num_heads: int  # key heads
    num_lists: int  # each chooses for itself
    num_chosen: int
    residual: bool
    sinks: int
    window: int


class _Expected(NamedTuple):
    requests_R: Tensor  # int32
    lens_R: Tensor  # int32; rows of length 0 are not looked at
    values_R3: Tensor  # int64: row, version, length


class Expected(_Expected):
    """What stamps of this step say, by row."""

    @cached_property
    def arrays(self) -> Any:
        """(requests, values), views for the compiled kernels of the CPU."""
        return self.requests_R.numpy(), self.values_R3.numpy()

    @cached_property
    def live_arrays(self) -> Any:
        """The same of rows that select."""
        live_R = self.lens_R.numpy() > 0
        requests_R, values_R3 = self.arrays
        return (requests_R, values_R3) if live_R.all() else (requests_R[live_R], values_R3[live_R])


class _Lent(NamedTuple):
    table: Table
    stamps_B6: Tensor  # int64, see FIELDS


class Lent(_Lent):
    """A table that a layer fills for others, and whose its rows are."""

    @cached_property
    def stamps(self) -> Any:
        """A view for the compiled kernels of the CPU."""
        return self.stamps_B6.numpy()


class Checked(NamedTuple):
    """What a consumer may take."""

    fresh_R: Tensor  # uint8: the row is as expected, or selects nothing
    stale_lens_R: Tensor  # int32: keys of the others, which scan for themselves, and 0
    good_RF: Tensor | None  # bool, by field, where a caller may look at it


class Ops(Protocol):
    """The verbs. Rows of length 0 are left out by each of them, and what they would write stays as it is."""

    @property
    def gives_shares(self) -> bool:
        """Whether `score` leaves every query's own shares, by which `attend_shares` can attend."""
        ...

    def queries(self, q_RQD: Tensor, scale: float) -> Queries: ...

    def route(
        self,
        q: Queries,
        keys: Keys,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        heads: Routing,
    ) -> tuple[Queries, Mix]:
        """The queries that score for all, and what they count for: see `reference_route`."""
        ...

    def num_worths(self, num_queries: int) -> int:
        """Floats that `score` leaves per row and column for so many queries."""
        ...

    def scratch(self, num_rows: int, num_queries: int, width: int) -> Tensor:
        """Room for the scores of one layer, [R, `num_worths`, W], undefined."""
        ...

    def score(
        self, q: Queries, keys: Keys, rows: Rows, pool: Table, pooled_R: Tensor, work: Tensor, mix: Mix | None
    ) -> None:
        """Fills `work` with what columns are worth: shares of the softmax of q . k + bias over the columns of a row,
        of each query, or summed over the queries of a list.

        Row r scores its pool (column j is pool position j) where pooled_R[r] (uint8) is set, else its whole history
        (column j is position j). A pool of one list serves every list.
        """
        ...

    def keep(
        self,
        rows: Rows,
        pool: Table,
        pooled_R: Tensor,
        work: Tensor,
        sinks: int,
        window: int | Tensor,
        out: Table,
        page_size: int = 1,
    ) -> None:
        """Writes the best columns of every row into `out`, as many as its rows hold or the row has.

        Worth is summed over the queries of a list of `out`. The first `sinks` positions and the last `window` (one
        number, or int32 [R]) come before all others; equal worth goes to the lower position. With a `page_size`
        above 1 a column of a history stands for so many positions.
        """
        ...

    def attend(
        self, q: Queries, k_SHD: Tensor, v_SHD: Tensor, rows: Rows, chosen: Chosen, out_RQD: Tensor
    ) -> None:
        """Writes softmax(q k + bias) v over each row's positions; only slots that its own entries name are read."""
        ...

    def attend_shares(self, work: Tensor, v_SHD: Tensor, rows: Rows, out_RQD: Tensor) -> None:
        """Attention over the whole history by the shares that `score` left."""
        ...

    def all_fresh(self, checked: Checked) -> bool:
        """Whether it is known without waiting that every row is fresh; False where only the device knows."""
        ...

    def extend(self, rows: Rows, pool: Table, seen_R: Tensor, out: Table) -> None:
        """Writes each row's pool of an earlier step and the positions [seen_R[r], len) behind it into `out`.

        Slots are translated anew. Rows with seen_R[r] = 0 (int64) are left out.
        """
        ...

    def seal(self, expected: Expected, lent: Lent, pointers: tuple[int, int]) -> None:
        """Stamps the rows: what is expected of them, the layers that positions are of, a digest of the content."""
        ...

    def check(self, expected: Expected, lent: Lent, pointers: tuple[int, int], stale_F1: Tensor) -> Checked:
        """Which rows are as expected.

        Counts the others in `stale_F1` (int64): each by the first field that differs, and all of them at the end.
        """
        ...

    def resume(
        self,
        expected: Expected,
        lent: Lent,
        pointers: tuple[int, int],
        scanned_B: Tensor,
        refresh_every: int,
        stale_F1: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """(keys that each row's pool has seen, int64 [R], 0: it must scan; tokens since that scan, int64 [R])."""
        ...
