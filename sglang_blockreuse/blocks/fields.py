"""How each field of the host's batches fares when requests are folded into rows.

Frozen here and compared with the installed host by a test: a field that is not classified may be read per request,
and folding would hand one request the value of another.
"""

from __future__ import annotations

# What fold_batch does with each field of the host's ScheduleBatch.
#   row      one entry per request; a folded batch has one per row
#   token    one entry per token to compute, or positions among them; a folded batch keeps those that are computed
#   request  one entry per request, read where the batch is shown unfolded
#   step     about the step or the server, whatever its rows
#   refused  belongs to a feature that such a server does not start with (features.py), or that the host has only
#            with --disable-radix-cache; must be empty
SCHEDULE_BATCH = {
    "row": "reqs req_pool_indices_cpu req_pool_indices seq_lens orig_seq_lens seq_lens_sum extend_num_tokens "
    "seq_lens_cpu multimodal_inputs prefix_lens extend_lens extend_logprob_start_lens has_grammar",
    "token": "input_ids replace_embeds replace_positions out_cache_loc",
    "request": "extend_input_logprob_token_ids top_logprobs_nums token_ids_logprobs sampling_info",
    "step": "req_to_token_pool token_to_kv_pool_allocator tree_cache model_config enable_overlap device "
    "batch_is_full chunked_req chunked_req_next_prompt_token contains_last_prefill_chunk prefill_chunk_processed "
    "decoding_reqs split_index split_prefill_finished split_forward_count split_forward_batch split_prefill_start "
    "hicache_consumer_index dp_cooperation_info dp_balance_stats prefill_stats forward_iter launch_ts "
    "after_idle_gap prefill_input_ids_cpu mix_running_indices mix_running_indices_cpu forward_mode "
    "global_forward_mode dp_spec_prefill_coordination_applied is_extend_in_batch can_run_decode_cuda_graph "
    "can_run_dp_draft_cuda_graph can_run_dp_prefill_cuda_graph dp_prefill_cuda_graph_max_prefix_len "
    "recv_skipper_forward_mode spec_verify_tier_num_tokens return_logprob is_prefill_only spec_algorithm "
    "return_hidden_states return_hidden_states_mode",
    "refused": "hisparse_coordinator inner_idle_batch input_embeds ne_token_table ne_skip_token_table_update "
    "engram_history engram_staged_rows encoder_swa_reset out_cache_loc_dsv4 mamba_track_indices "
    "mamba_track_buffer_indices mamba_track_mask mamba_track_seqlens mamba_track_seqlens_cpu "
    "mamba_prefill_track_mask_cpu mamba_track_mask_cpu mamba_track_mask_next_cpu mamba_decode_batch_idx_cpu "
    "mamba_lazy_spec_track_positions_cpu mamba_cow_src_indices mamba_cow_dst_indices mamba_clear_indices "
    "encoder_lens encoder_out_cache_loc dp_spec_prefill_coordination_metadata tbo_split_seq_index dllm_config "
    "encoder_cached encoder_lens_cpu global_num_tokens global_num_tokens_for_logprob draft_global_num_tokens "
    "draft_global_num_tokens_for_logprob global_spec_verify_tier_num_tokens beam_tail spec_info",
}

# The same for the host's ForwardBatch, which is made of a folded ScheduleBatch.
#   row      one entry per row, read while the model runs
#   token    one entry per computed token
#   given    one entry per row while the model runs, given back one per request before anything is sampled
#   logits   one entry per row while the model runs, shown one per request to the logits processor
#   request  one entry per request at any time
#   step, refused: as above
FORWARD_BATCH = {
    "given": "batch_size seq_lens seq_lens_cpu req_pool_indices req_pool_indices_cpu orig_seq_lens rids lora_ids "
    "mm_inputs watermark_prompt_tail_ids watermark_context_hash_history",
    "logits": "extend_seq_lens extend_seq_lens_cpu extend_logprob_start_lens_cpu",
    "row": "seq_lens_sum extend_prefix_lens extend_prefix_lens_cpu extend_start_loc max_seq_len_host "
    "attn_cp_metadata rids_int bootstrap_room_ids_int req_all_ids_flat req_all_ids_lens",
    "token": "input_ids out_cache_loc origin_out_cache_loc kv_loc_plan kv_loc_cols out_cache_loc_virtual "
    "replace_embeds replace_positions positions mrope_positions extend_num_tokens mm_token_modalities mm_input_embeds "
    "hidden_states residual residual_stream _attn_output _original_num_tokens global_num_token_non_padded "
    "global_num_token_non_padded_cpu num_token_non_padded multi_gate_indices aux_hidden_states_buffer",
    "request": "sampling_info top_logprobs_nums token_ids_logprobs extend_input_logprob_token_ids_gpu "
    "next_token_logits_buffer temperature top_p",
    "step": "forward_mode out_cache_loc_is_physical return_logprob is_prefill_only spec_algorithm "
    "return_pooled_hidden_states is_extend_in_batch dp_spec_prefill_coordination_applied can_run_decode_cuda_graph "
    "can_run_dp_draft_cuda_graph can_run_dp_prefill_cuda_graph dp_prefill_cuda_graph_max_prefix_len "
    "global_forward_mode contains_last_prefill_chunk capture_hidden_mode defer_logits_to_eager "
    "full_prefill_cuda_graph_capture return_hidden_states_before_norm reuse_dsa_topk_indices "
    "minimax_m3_precached_sparse_layers _original_batch_size _original_forward_mode attn_tp_sequence_sharded "
    "max_seq_len_override model_specific_states split_index dp_padding_mode encoder_swa_replay "
    "forward_metadata_ready forward_metadata_planned_bs forward_metadata_planned_num_tokens "
    "forward_metadata_replan_equivalent",
    # the first four are of requests that are not folded, and that the host never puts beside others
    "refused": "multi_item_delimiter_indices token_indices_to_pool decision_layouts dimensions token_type_ids "
    "out_cache_loc_dsv4 mamba_track_indices mamba_track_mask mamba_track_seqlens mamba_prefill_track_mask_cpu "
    "mamba_track_seqlens_cpu mamba_cow_src_indices mamba_cow_dst_indices mamba_clear_indices input_embeds "
    "dllm_input_preparation_state encoder_lens encoder_out_cache_loc tbo_split_seq_index encoder_cached "
    "encoder_lens_cpu spec_info dllm_prompt_mask original_global_num_tokens_cpu global_num_tokens_cpu "
    "global_num_tokens_gpu global_num_tokens_for_logprob_cpu global_num_tokens_for_logprob_gpu "
    "cross_attention_custom_mask llada_image_conditioning_text_lens_cpu dp_local_start_pos dp_local_num_tokens "
    "global_dp_buffer_len global_num_tokens_padded_cpu global_late_layer_num_tokens_cpu tbo_parent_token_range "
    "tbo_padded_len tbo_children attn_dcp_metadata dcp_kv_mask ngram_embedding_info encoder_swa_row_floor "
    "encoder_swa_compress_rows engram_history engram_staged_rows",
}


def named(table: dict[str, str], kind: str) -> tuple[str, ...]:
    return tuple(table[kind].split())
