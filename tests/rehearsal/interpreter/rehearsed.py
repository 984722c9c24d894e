"""What the rehearsals of the bases share: a fold, and one layer of a forward."""

from __future__ import annotations

from world import NUM_KV_HEADS, NUM_Q_HEADS, Drawn

from sglang_blockreuse.types import Interval

ONE_FOLD = Drawn(
    (
        (90, (Interval(10, 14), Interval(40, 43), Interval(80, 90))),
        (33, (Interval(32, 33),)),
    ),
    7,
)


def run_layer(world, backend, batch, index, *, fused=False, after_fused_write=None, seen=None):
    """Queries, new keys, and what the backend makes of them; all are drawn.

    fused: the model has written K and V when it calls the backend.
    seen: called with queries and new keys before the backend is.
    """
    num_tokens = len(batch.out_cache_loc)
    q = world.normal(num_tokens, NUM_Q_HEADS)
    k, v = world.normal(num_tokens, NUM_KV_HEADS), world.normal(num_tokens, NUM_KV_HEADS)
    if seen is not None:
        seen(q, k)
    if fused:
        world.pool.k_buffer[index][batch.out_cache_loc] = k
        world.pool.v_buffer[index][batch.out_cache_loc] = v
        if after_fused_write is not None:
            after_fused_write()
    out = backend.forward(q.flatten(1), k, v, world.layers[index], batch, save_kv_cache=not fused)
    return q, k, out.view(q.shape)
