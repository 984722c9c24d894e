"""A second SGLang plug-in, for tests: knobs that no user needs, read from `custom_params`.

    testing_max_prefix: int         limit the exact prefix, so that blocks behind it are looked up
    testing_rows: [a1, b1, ...]     compute the prompt in these virtual rows, copy nothing
    testing_break: "plan" | "load" | "probe"  make that stage fail; "load on rank 1": on that rank only
    testing_all_homes: true         give a home also to the block that continues the compile prefix
    testing_swap_homes: true        read every block at the home of another one of its length
    testing_rank_drift: true        let tensor-parallel ranks other than 0 report another plan
    testing_wrong_rope_base: float  move keys by an unscaled rotary table of this base, until another request is planned
    testing_rotations: int          move keys by this many times their distance, until another request is planned
    testing_stale: FIELD            spoil this field of what layer groups share about the request, in every step;
                                    "unseen" spoils the positions and stamps them as good
    testing_stale_repair: [P, ..., FIELD]  the same for the repair tokens at these positions under `prefill: sparse`
    testing_dense_repair: true      repair is dense although the plan has `prefill: sparse`
    testing_short_repair: true      repair tokens whose keys are fewer than final_k go the way of the others
    testing_mute: true              announce no write of KV to the index keys, until another request is admitted
    testing_own_heads: true         tensor-parallel ranks choose by their own heads, until another request is admitted

The variable BLOCKREUSE_TESTING_ROPE_BASE moves keys wrongly from the server's start on; BLOCKREUSE_TESTING_AUDIT is the
number of steps in which every index key is checked. BLOCKREUSE_TESTING_CLOCK: see blockreuse_clock.py.
BLOCKREUSE_TESTING_FORWARDS logs the size of every prefill forward.
Plans of tensor-parallel ranks are also put before SGLang's rank consensus checker where that is enabled.
Put this folder on PYTHONPATH of the server under test.
"""

from __future__ import annotations

import os


def knob(req, name):
    params = req.sampling_params.custom_params
    return params.get(name) if isinstance(params, dict) else None  # a request may hold nonsense


def register():
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang_blockreuse.blocks.manager.BlockManager"
    HookRegistry.register(
        "sglang.srt.managers.schedule_batch.Req._compute_max_prefix_len", limit_prefix, HookType.AFTER
    )
    for hook in (force_rows, swap_homes, same_on_all_ranks, note_rope_base):
        HookRegistry.register(f"{manager}.plan", hook, HookType.AFTER)
    HookRegistry.register(f"{manager}.replan", same_on_all_ranks, HookType.AFTER)
    HookRegistry.register("sglang_blockreuse.blocks.arrive.Arrivals.homes", all_homes, HookType.AROUND)
    HookRegistry.register("sglang_blockreuse.blocks.rope.RopeGroup.cos_sin", wrong_rope, HookType.AROUND)
    HookRegistry.register("sglang_blockreuse.layers.row_modes.RowModes.admit", note_stale, HookType.AFTER)
    HookRegistry.register("sglang_blockreuse.layers.share_state.ShareState.seal", spoil, HookType.AROUND)
    HookRegistry.register(
        "sglang_blockreuse.layers.share_state.ShareState.take", spoil_taken, HookType.AROUND
    )
    HookRegistry.register(
        "sglang_blockreuse.layers.sparse_repair.SparseRepair.short", nobody, HookType.AROUND
    )
    HookRegistry.register("sglang_blockreuse.blocks.step.repair_mask", dense_repair, HookType.AROUND)
    HookRegistry.register("sglang_blockreuse.blocks.measure._asked", break_probe, HookType.BEFORE)
    if os.environ.get("BLOCKREUSE_TESTING_FORWARDS"):
        HookRegistry.register(
            "sglang_blockreuse.layers.cpu_backend.CpuAttnBackend.init_forward_metadata",
            note_forward,
            HookType.BEFORE,
        )
    for store in ("index_keys.IndexKeys", "page_index.PageIndex"):
        HookRegistry.register(f"sglang_blockreuse.layers.{store}.written", mute, HookType.AROUND)
        HookRegistry.register(f"sglang_blockreuse.layers.{store}.begin", audit, HookType.BEFORE)
    HookRegistry.register("sglang_blockreuse.layers.ranks.Ranks.shares", of_own_heads, HookType.AROUND)

    if "BLOCKREUSE_TESTING_CLOCK" in os.environ:
        import blockreuse_clock

        blockreuse_clock.register(HookRegistry.register, HookType.AROUND)


def limit_prefix(result, req, *args, **kwargs):
    limit = knob(req, "testing_max_prefix")
    return result if limit is None else min(result, limit)


def force_rows(result, manager, req, **start):
    broken = knob(req, "testing_break")
    if broken == "plan" and req.blockreuse.plan is not None:
        raise RuntimeError("testing_break")
    if broken in ("load", f"load on rank {tp_rank()}") and req.blockreuse.plan is not None:
        req.blockreuse.home_slots = None
    flat = knob(req, "testing_rows")
    if not flat:
        return
    from sglang_blockreuse.types import BlockPlan, Interval

    start, end = req.prefix_len, len(req.full_untruncated_fill_ids)
    rows = [Interval(a, b).clip(start, end) for a, b in zip(flat[::2], flat[1::2], strict=True)]
    runs = tuple(r for r in rows if len(r))
    req.blockreuse.plan = BlockPlan(start, end, (), (), runs, 0, end)


def tp_rank():
    from sglang.srt.runtime_context import get_parallel

    return get_parallel().tp_rank


def break_probe(state, rows, block_end):
    if probe_breaks:
        raise RuntimeError("testing_break")


def note_forward(backend, forward_batch):
    if forward_batch.forward_mode.is_extend():
        lens = forward_batch.extend_seq_lens_cpu
        print(f"testing: a prefill forward of {sum(lens)} tokens in {len(lens)} rows", flush=True)


def all_homes(original, arrivals, req, state, *args):
    if not knob(req, "testing_all_homes"):
        return original(arrivals, req, state, *args)
    from array import array

    from sglang_blockreuse.blocks.split import Home

    head = array("q", state.compile_prefix)
    return [
        Home(i, s, head, req.origin_input_ids[s.start : s.end]) for i, s in enumerate(state.options.spans)
    ]


def swap_homes(result, manager, req, **start):
    if knob(req, "testing_swap_homes") and req.blockreuse.plan is not None:
        req.blockreuse.home_slots = req.blockreuse.home_slots[::-1]
        req.blockreuse.host_slots = req.blockreuse.host_slots[::-1]


def same_on_all_ranks(result, manager, req, *args, **kwargs):
    from dataclasses import replace

    from sglang.srt.utils.rank_consensus_checker import assert_same

    state = getattr(req, "blockreuse", None)
    if state is None:
        return  # the request was refused
    if knob(req, "testing_rank_drift") and tp_rank() and state.plan is not None:
        state.plan = replace(state.plan, num_repaired=state.plan.num_repaired + 1)
    assert_same("blockreuse plan of %s: %s", req.rid, state.plan)


# of the request planned last; tests that set them send one request at a time
probe_breaks = False
wrong_base = None
rotations = None


def note_rope_base(result, manager, req, **start):
    global wrong_base, rotations, probe_breaks
    probe_breaks = knob(req, "testing_break") == "probe"
    wrong_base, rotations = knob(req, "testing_wrong_rope_base"), knob(req, "testing_rotations")


def wrong_rope(original, group, old, new, *angles):
    if rotations is not None:
        new = old + rotations * (new - old)
    base = wrong_base or float(os.environ.get("BLOCKREUSE_TESTING_ROPE_BASE", 0))
    if not base:
        return original(group, old, new, *angles)
    import torch

    dim = group.table.shape[1]
    angle = (new - old)[:, None] * base ** (-torch.arange(0, dim, 2) / dim)
    return angle.cos(), angle.sin()


STALE = {}  # request slot -> field
STALE_REPAIR = {}  # keys of a repair token -> field; tests that set it send one request at a time

muted = False
own_heads = False
repair_is_dense = False
short_repair_is_sparse = False


def mute(original, keys, slots):
    if not muted:
        original(keys, slots)


def audit(keys, rows):
    from sglang_blockreuse.layers import index_keys

    index_keys.AUDIT_PERIOD = int(os.environ.get("BLOCKREUSE_TESTING_AUDIT", index_keys.AUDIT_PERIOD))


def of_own_heads(original, ranks, shares):
    return shares.sum(1, keepdim=True) if own_heads else original(ranks, shares)


def note_stale(result, modes, reqs):
    global muted, own_heads, repair_is_dense, short_repair_is_sparse
    own_heads = any(knob(req, "testing_own_heads") for req in reqs)
    muted = any(knob(req, "testing_mute") for req in reqs)
    repair_is_dense = any(knob(req, "testing_dense_repair") for req in reqs)
    short_repair_is_sparse = any(knob(req, "testing_short_repair") for req in reqs)
    STALE_REPAIR.clear()
    marked = [knob(req, "testing_stale_repair") for req in reqs]
    STALE_REPAIR.update({position + 1: found[-1] for found in marked if found for position in found[:-1]})
    for req in reqs:
        STALE.pop(req.kv.req_pool_idx, None)
        if knob(req, "testing_stale"):
            STALE[req.kv.req_pool_idx] = knob(req, "testing_stale")


def dense_repair(original, runs, repairs):
    return None if repair_is_dense else original(runs, repairs)


def nobody(original, repair, lens):
    return lens < 0 if short_repair_is_sparse else original(repair, lens)


def spoil(original, state, layer, kind):
    """What no check can see: other content, stamped as good."""
    table, _ = state.written()[layer.layer, kind]
    for slot, field in stale_rows(state).items():
        if field == "unseen":
            table.positions[slot] = table.positions[slot, 0, 0]
            table.slots[slot] = table.slots[slot, 0, 0]
    original(state, layer, kind)


def spoil_taken(original, state, layer):
    """After whoever wrote it has read it, and before the layer that takes it."""
    from sglang_blockreuse.layers.share_state import FIELDS

    table, stamps = state.written()[layer.anchor, "pool" if layer.role == "reindex" else "indices"]
    for slot, field in stale_rows(state).items():
        if field in FIELDS:
            stamps[slot, FIELDS.index(field)] += 1
        elif field != "unseen":
            getattr(table, field)[slot] += 1
    return original(state, layer)


def stale_rows(state):
    """Row of the state's tables -> field. The state of repair tokens has row ids of slot holder and position."""
    values = state.expected.values_R3
    row_ids, lens = values[:, 0].tolist(), values[:, 2].tolist()
    if row_ids and row_ids[0] >> 32:
        return {row: STALE_REPAIR[n] for row, n in enumerate(lens) if n in STALE_REPAIR}
    return {slot: STALE[slot] for slot in state.expected.requests_R.tolist() if slot in STALE}
