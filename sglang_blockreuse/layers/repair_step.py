"""The rows of one prefill step whose repair tokens are sparse: a row of shared state for each such token.

Dims as in sparse_decode.py; a repair row is one token, its keys end with itself.

    run of a request   |== exact or fresh ==|== repair ==|== fresh ==|
    here               |    dense row       | r  r  r  r | dense row |

Tables of shared state belong to request slots, and here a request has many rows. So a piece of rows has a slot table
and a state of its own, for the length of one forward. Cutting into pieces bounds the scores, which take a float per
row, query head and key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.cpu_attention import AttentionPlan, KeyBias, Workspace, plan_attention, run_attention
from ..kernels.ops import Rows
from .decode_step import attend_tokens
from .plan import Selection
from .share_state import ShareState

SCORE_BYTES = 64 << 20  # of one piece


class ExtendBatch(NamedTuple):
    """A prefill batch as the host gives it, in batch order; N rows, several of one request where it is folded."""

    slot_table: Tensor  # int32 [B, positions]
    requests: list[int]  # [N] request slots
    prefix_lens: list[int]  # [N]
    extend_lens: list[int]  # [N]
    repair_T: Any  # bool [T], tokens that may be sparse
    row_ids: Any  # int64 [N], what tells the holder of a slot from its predecessors
    bias: KeyBias | None


class Piece(NamedTuple):
    """Some repair rows, in token order; row r has the request slot r in the piece's tables."""

    tokens_R: Tensor  # int64, of the forward
    rows: Rows
    history_R: Tensor  # uint8 of zeros
    window_R: Tensor  # int32
    state: ShareState


class RepairStep:
    """One prefill step, planned for all layers. tokens: those of the batch; make_state: the shared state of so many
    rows."""

    def __init__(
        self,
        batch: ExtendBatch,
        tokens: Tokens,
        sparse_T: Any,
        selection: Selection,
        *,
        num_q_heads: int,
        make_state: Callable[[int], ShareState],
        workspace: Workspace,
    ) -> None:
        self.batch, self._workspace = batch, workspace
        self._tokens = tokens
        self._sparse_T = sparse_T
        self._dense_N = torch.from_numpy(np.flatnonzero(~sparse_T))
        self.width = int(self._tokens.lens_T[sparse_T].max())
        self.piece_size = max(1, SCORE_BYTES // (4 * num_q_heads * self.width))
        self.pieces = tuple(self._pieces(selection, make_state))
        self._plans: dict[bool, AttentionPlan] = {}

    @property
    def num_tokens(self) -> int:
        return len(self._sparse_T)

    def histories(self) -> Rows:
        """One row per request, with all keys that its repair rows see."""
        requests = np.array(self.batch.requests, np.int32)[self._tokens.row_T[self._sparse_T]]
        lens = np.zeros(self.batch.slot_table.shape[0], np.int32)
        np.maximum.at(lens, requests, self._tokens.lens_T[self._sparse_T].astype(np.int32))
        unique = np.unique(requests)
        requests_R, lens_R = torch.from_numpy(unique), torch.from_numpy(lens[unique])
        return Rows(requests_R, lens_R, self.batch.slot_table, self.batch.bias)

    def _pieces(self, selection: Selection, make_state: Callable[[int], ShareState]) -> Iterator[Piece]:
        tokens, slot_table = self._tokens, self.batch.slot_table.numpy()
        requests, row_ids = np.array(self.batch.requests), np.asarray(self.batch.row_ids)
        sparse = np.flatnonzero(self._sparse_T)
        for at in range(0, len(sparse), self.piece_size):
            chosen = sparse[at : at + self.piece_size]
            row_R, lens_R = tokens.row_T[chosen], tokens.lens_T[chosen].astype(np.int32)
            mine_R = torch.arange(len(chosen), dtype=torch.int32)
            state = make_state(len(chosen))
            # a request slot's holder and the token's position, which is below 2 ** 32
            identities = torch.from_numpy((row_ids[row_R].astype(np.int64) << 32) | (lens_R - 1))
            rows = Rows(
                mine_R,
                torch.from_numpy(lens_R),
                torch.from_numpy(slot_table[requests[row_R], : lens_R.max()]),
                self.batch.bias,
            )
            state.begin(mine_R, identities, rows.lens_R)
            yield Piece(
                tokens_R=torch.from_numpy(chosen),
                rows=rows,
                history_R=torch.zeros(len(chosen), dtype=torch.uint8),
                window_R=torch.from_numpy(windows(selection, tokens.own_T[chosen])),
                state=state,
            )

    def attend_all(self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float) -> None:
        """Attention of every token to everything before it, into `out_TQD`."""
        plan = self._dense_plan(every_row=True)
        run_attention(plan, q_TQD, k_SHD, v_SHD, out_TQD, scale=scale, workspace=self._workspace)

    def attend_dense(
        self, q_TQD: Tensor, k_SHD: Tensor, v_SHD: Tensor, out_TQD: Tensor, scale: float
    ) -> None:
        """The same for the tokens that are not sparse."""
        plan = self._dense_plan(every_row=False)
        attend_tokens(
            plan, self._dense_N, self.num_tokens, q_TQD, k_SHD, v_SHD, out_TQD, scale, self._workspace
        )

    def _dense_plan(self, *, every_row: bool) -> AttentionPlan:
        """Attention of all rows (a dense layer) or of what is left of them without the repair tokens."""
        if every_row not in self._plans:
            batch = self.batch
            rows = (batch.requests, batch.prefix_lens, batch.extend_lens) if every_row else self._dense_rows()
            self._plans[every_row] = plan_attention(batch.slot_table, *rows, bias=batch.bias)
        return self._plans[every_row]

    def _dense_rows(self) -> tuple[list[int], list[int], list[int]]:
        """Requests, prefix and extend lengths of the stretches of dense tokens."""
        dense, row_T, lens_T = self._dense_N.numpy(), self._tokens.row_T, self._tokens.lens_T
        is_first = np.ones(len(dense), bool)
        is_first[1:] = (np.diff(dense) != 1) | (np.diff(row_T[dense]) != 0)
        first = np.flatnonzero(is_first)
        extend = np.diff(first, append=len(dense))
        requests = np.array(self.batch.requests)[row_T[dense[first]]]
        return requests.tolist(), (lens_T[dense[first]] - 1).tolist(), extend.tolist()


class Tokens(NamedTuple):
    """The tokens of a prefill batch."""

    row_T: Any  # int64, row of the batch
    lens_T: Any  # int64, keys that the token sees, itself among them
    own_T: Any  # int64, how many of them are of its own run, itself among them

    @classmethod
    def of(cls, batch: ExtendBatch) -> Tokens:
        extend = np.array(batch.extend_lens, np.int64)
        row_T = np.repeat(np.arange(len(extend)), extend)
        own_T = np.arange(len(row_T)) - np.repeat(np.cumsum(extend) - extend, extend) + 1
        return cls(row_T, np.array(batch.prefix_lens, np.int64)[row_T] + own_T, own_T)


def windows(selection: Selection, own_T: Any) -> Any:
    """int32 newest positions that are always read: the window, and the row's own run back to its first token.

    A run takes at most half of what sinks and window leave, so that there is something to choose.
    """
    most = selection.window + (selection.final_k - selection.sink - selection.window) // 2
    return own_T.clip(selection.window, most).astype(np.int32)
