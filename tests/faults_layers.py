"""Faults of layer plans: shared state, sparse decode, index keys, pages, and the rules of plans."""

from __future__ import annotations

from faults import Fault

LAYERS = "sglang_blockreuse/layers"
STATE, DECODE, REFRESH, SCORERS, PAGES, MODES, PLAN, MEASURES, PRESETS = (
    f"tests/unit/test_{name}.py"
    for name in (
        "share_state",
        "sparse_decode",
        "refresh",
        "scorers",
        "pages",
        "row_modes",
        "layer_plan",
        "measures",
        "plan_preset_command",
    )
)


def _fault(name: str, file: str, old: str, new: str, tests: str) -> Fault:
    return Fault(name, f"{LAYERS}/{file}.py", old, new, tests)


LAYER_FAULTS = [
    _fault(
        "every step has one version",
        "share_state",
        "self.version_1 += 1",
        "self.version_1.fill_(1)",
        f"{STATE} -k five_thousand",
    ),
    _fault(
        "a row rolled back keeps what saw one key more",
        "share_state",
        "if lent.stamps_B6[request, 2] > num_tokens:",
        "if lent.stamps_B6[request, 2] > num_tokens + 1:",
        f"{STATE} -k rolled_back",
    ),
    Fault(
        "the content of a table is not checked",
        "kernels/ops_cpu.py",
        "wanted_R6[:, 5] = digest()(requests_R, *lent.table.arrays)",
        "wanted_R6[:, 5] = lent.stamps[requests_R, 5]",
        f"{STATE} -k in_a_table",
    ),
    Fault(
        "whose keys were scored is not checked",
        "kernels/ops_cpu.py",
        "wanted_R6[:, 3:5] = pointers",
        "wanted_R6[:, 3:5] = lent.stamps[requests_R, 3:5]",
        f"{STATE} -k in_a_stamp",
    ),
    _fault(
        "stale rows are used",
        "share_state",
        "return lent.table, checked",
        "return lent.table, checked._replace(fresh_R=torch.ones_like(checked.fresh_R))",
        f"{STATE} -k in_a_count",
    ),
    Fault(
        "a pool lives one step too long",
        "kernels/ops_cpu.py",
        "(seen_R < lens_R) & (age_R < refresh_every)",
        "(seen_R < lens_R) & (age_R <= refresh_every)",
        f"{REFRESH} -k law_chooses",
    ),
    Fault(
        "a pool of another row is extended",
        "kernels/ops_cpu.py",
        "good_R = (stamp_R6[:, 0] == values_R3[:, 0]) & (stamp_R6[:, 1] < values_R3[:, 1])",
        "good_R = stamp_R6[:, 1] < values_R3[:, 1]",
        f"{REFRESH} -k changed_hands",
    ),
    _fault(
        "exact requests decode sparse",
        "row_modes",
        "self._admitted_B[slot] = -1 if exact else self._generation_B[slot]",
        "self._admitted_B[slot] = self._generation_B[slot]",
        MODES,
    ),
    _fault(
        "a slot that changed hands keeps its mode",
        "row_modes",
        "return (self._admitted_B[requests] != self._generation_B[requests]).astype(np.uint8)",
        "return (self._admitted_B[requests] < 0).astype(np.uint8)",
        MODES,
    ),
    _fault(
        "rows that read everything are selected from",
        "sparse_decode",
        "short_T = (lens_T < self.selection.min_seq_len) | (lens_T <= self.selection.final_k)",
        "short_T = lens_T < self.selection.min_seq_len",
        f"{DECODE} -k left_to_dense",
    ),
    _fault(
        "rows below the shortest length are sparse",
        "sparse_decode",
        "short_T = (lens_T < self.selection.min_seq_len) | (lens_T <= self.selection.final_k)",
        "short_T = lens_T <= self.selection.final_k",
        f"{DECODE} -k left_to_dense",
    ),
    _fault(
        "queries lose their scale",
        "sparse_decode",
        "q = self.ops.queries(step.queries(q_TQD), scale)",
        "q = self.ops.queries(step.queries(q_TQD), 1.0)",
        f"{DECODE} -k every_role",
    ),
    _fault(
        "a follower with stale state takes it all the same",
        "roles",
        "q, k_SHD, step.rows, table, checked.fresh_R, rerank=True)",
        "q, k_SHD, step.rows, table, torch.ones_like(checked.fresh_R), rerank=True)",
        f"{DECODE} -k stale_state",
    ),
    _fault(
        "lists that are lent are those of the heads",
        "roles",
        "if scorer.lends == scorer.heads:",
        "if scorer.lends:",
        f"{DECODE} -k every_kind_of_scorer",
    ),
    _fault(
        "scores that are no attention are its weights",
        "roles",
        'exact = scorer.kind == "exact_qk" and scorer.scan_heads == "all" and layer.key_from is None',
        'exact = scorer.kind == "exact_qk" and layer.key_from is None',
        f"{DECODE} -k no_attention",
    ),
    _fault(
        "a pool is not stamped",
        "roles",
        'state.seal(layer, "pool")',
        "state.written()",
        f"{DECODE} -k every_role",
    ),
    _fault(
        "an announced write is not heard",
        "index_keys",
        "self._current_S[slots_T] = 0",
        "self._current_S[slots_T[:0]] = 0",
        f"{SCORERS} -k announced_write_is_copied",
    ),
    _fault(
        "the first copy marks the slots of all",
        "index_keys",
        "if layer == self._last:",
        "if layer != -1:",
        f"{SCORERS} -k run_to_its_end",
    ),
    _fault(
        "the same positions are audited in every step",
        "index_keys",
        "self._current_S.numpy(), self._step % period, period",
        "self._current_S.numpy(), period, period",
        f"{SCORERS} -k mended_within",
    ),
    _fault(
        "equal codes of another range are equal",
        "index_keys",
        "return ~(same_codes & same_ranges)",
        "return ~(same_codes | same_ranges)",
        f"{SCORERS} -k unannounced",
    ),
    _fault(
        "a page that was written is known",
        "page_index",
        "self._written_S[slots_T.numpy()] = self._clock",
        "self._written_S[slots_T.numpy()] = 0",
        f"{PAGES} -k announced_write_is_read",
    ),
    _fault(
        "a step cut short marks its pages",
        "page_index",
        "if layer == self._last:",
        "if layer != -1:",
        f"{PAGES} -k cut_short",
    ),
    _fault(
        "pages of rows that left are kept",
        "page_index",
        "self._free += self._table_BN[request, : self._held.pop(request)].tolist()",
        "self._held.pop(request)",
        f"{PAGES} -k rows_that_left",
    ),
    _fault(
        "the first query of a KV head stands for all",
        "scorers",
        "unflatten(1, (self._num_heads, -1)).mean(2)",
        "unflatten(1, (self._num_heads, -1))[:, :, 0]",
        f"{SCORERS} -k fused_heads",
    ),
    _fault(
        "a pool may be smaller than the list",
        "plan_rules",
        "if pool is not None and pool < k:",
        "if pool is not None and pool < 1:",
        PLAN,
    ),
    _fault(
        "the first sparse layer may follow nobody",
        "plan_rules",
        'if first is not None and first.role != "full":',
        'if first is not None and first.role == "dense":',
        PLAN,
    ),
    _fault(
        "a layer may be named twice",
        "plan_rules",
        "if layer in owner:",
        "if layer in owner and count is None:",
        PLAN,
    ),
    _fault("an anchor may lie behind", "plan_rules", "if source >= at:", "if source == at:", PLAN),
    _fault(
        "KV may be read of a layer that keeps none",
        "plan_rules",
        "if source.kv_from is not None:",
        "if source.kv_from == -1:",
        PLAN,
    ),
    _fault(
        "Jaccard over one of the two sets",
        "calibration/measures",
        "/ (one_RJ | other_RJ).sum(-1)",
        "/ one_RJ.sum(-1)",
        f"{MEASURES} -k jaccard",
    ),
    _fault(
        "mass is not compared with the head's own best",
        "calibration/measures",
        "return found_QR / shares_QRJ.topk(read_QRK.shape[-1], -1).values.sum(-1)",
        "return found_QR",
        f"{MEASURES} -k own_best",
    ),
    _fault(
        "the band of a pool is the margin of its best",
        "calibration/measures",
        "- best[:, kept]",
        "- best[:, wanted]",
        f"{MEASURES} -k first_that_is_not_kept",
    ),
    _fault(
        "a guarantee at the whole margin",
        "calibration/measures",
        "2 * moved_R / margin_R",
        "moved_R / margin_R",
        f"{MEASURES} -k below_one",
    ),
    _fault(
        "a list that aged is compared with its own step",
        "calibration/measures",
        "wanted_RJ[steps:])",
        "wanted_RJ[: len(held_RJ) - steps])",
        f"{MEASURES} -k an_aged_list",
    ),
    _fault(
        "a scheme that shares KV is written for any checkpoint",
        "preset_names",
        "if preset.trained_for is not None and not shape.trained:",
        "if False:",
        f"{PRESETS} -k learned",
    ),
]
