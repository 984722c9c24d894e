"""What sparse decode selects for one row of a calibration case, beside what the case selects."""

from __future__ import annotations

import numpy as np
import torch

from sglang_blockreuse.kernels.cpu_select import Table
from sglang_blockreuse.layers.decode_step import Batch
from sglang_blockreuse.layers.sparse_decode import SparseDecoder


def listed(lists, row, head=None):
    """The ascending positions of a row, of a query head where heads differ."""
    at, kept = (None if x is None else x[row] if head is None else x[head, row] for x in lists)
    return sorted((at if kept is None else at[kept]).tolist())


def decoded(case, plan, layer, row):
    """Positions of each list that sparse decode chooses for one row of a case, in a pool of another order."""
    table: Table = _run(case, plan, layer, row)[0].state.own
    return [at[:count].tolist() for at, count in zip(table.positions[0], table.counts[0], strict=True)]


def attended(case, plan, layer, row):
    """[Q, D] that sparse decode attends to for one row of a case."""
    return _run(case, plan, layer, row)[1][0]


def _run(case, plan, layer, row):
    """(decoder, its output) in one layer, for the queries that the case computed last."""
    length = case.num_tokens + row + 1
    slots = torch.randperm(length + 5)[:length].int()
    pools = []
    for kv_HJD in (case._keys[layer], case._values[layer]):
        pool = torch.full((length + 5, *kv_HJD.transpose(0, 1).shape[1:]), torch.nan)
        pool[slots.long()] = kv_HJD.transpose(0, 1)[:length]
        pools.append(pool)
    q = case._queries.last_QRD[:, row : row + 1].transpose(0, 1).contiguous()
    keys, out = [pools[0]] * plan.num_layers, torch.empty_like(q)
    decoder = SparseDecoder(plan, num_requests=1, num_q_heads=q.shape[1], k_pools=keys)
    batch = Batch(slots[None], [0], [length], np.array([7]), np.zeros(1, np.uint8), None)
    step = decoder.begin(batch)
    assert step is not None
    decoder.run(step, layer, q, *pools, out, scale=case.model.head_dim**-0.5)
    return decoder, out


def lists_of(case, layer, hidden, plan):
    """The lists by which a layer attends."""
    found = []
    choose = case._indices

    def caught(*arguments):
        found.append(choose(*arguments))
        return found[-1]

    case._indices = caught
    try:
        case._layer(layer, hidden, plan, {}, None)
    finally:
        del case._indices
    return found[0]
