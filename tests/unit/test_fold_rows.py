"""Folding the host's own batches: what it makes of rows, and what it gives back per request."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from sglang_blockreuse.blocks.fields import FORWARD_BATCH, SCHEDULE_BATCH, named
from sglang_blockreuse.blocks.rows import GIVEN_BACK, MUST_BE_EMPTY, attach, fold_batch, fold_of, unfold
from sglang_blockreuse.types import Interval

# three requests: [10, 30) folded into three rows, [0, 5) and [7, 8) as they are
PREFIXES, EXTENDS = [10, 0, 7], [20, 5, 1]
RUNS = [[Interval(10, 13), Interval(20, 22), Interval(29, 30)], [Interval(0, 5)], [Interval(7, 8)]]


def batch_of(**more):
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    total = sum(EXTENDS)
    found = ScheduleBatch(
        reqs=[SimpleNamespace(rid=f"r{i}", lora_id=None) for i in range(3)],
        prefix_lens=PREFIXES,
        extend_lens=EXTENDS,
        extend_logprob_start_lens=[20, 2, 0],
        seq_lens=torch.tensor([30, 5, 8]),
        seq_lens_cpu=torch.tensor([30, 5, 8]),
        orig_seq_lens=torch.tensor([30, 5, 8], dtype=torch.int32),
        req_pool_indices=torch.tensor([4, 2, 9]),
        req_pool_indices_cpu=torch.tensor([4, 2, 9]),
        input_ids=torch.arange(100, 100 + total),
        out_cache_loc=torch.arange(500, 500 + total),
        multimodal_inputs=[None, "an image", None],
        return_logprob=True,
    )
    return dataclasses.replace(found, **more)


KEPT = [0, 1, 2, 10, 11, 19, 20, 21, 22, 23, 24, 25]  # indices among the batch's tokens


def test_every_row_is_an_extend_row_of_its_request():
    folded, fold = fold_batch(batch_of(), RUNS)
    assert folded.input_ids.tolist() == [100 + i for i in KEPT]
    assert folded.out_cache_loc.tolist() == [500 + i for i in KEPT]
    assert folded.req_pool_indices.tolist() == folded.req_pool_indices_cpu.tolist() == [4, 4, 4, 2, 9]
    assert folded.prefix_lens == [10, 20, 29, 0, 7]
    assert folded.extend_lens == [3, 2, 1, 5, 1]
    assert folded.seq_lens.tolist() == [13, 22, 30, 5, 8]
    assert folded.multimodal_inputs == [None, None, None, "an image", None]
    assert (fold.num_rows, fold.tokens, fold.last_rows) == (5, (6, 5, 1), (2, 3, 4))


def test_log_probabilities_count_among_the_computed_tokens():
    _, fold = fold_batch(batch_of(), RUNS)
    assert fold.logprob_starts == (6, 2, 0)


def test_embeddings_for_single_tokens_move_with_their_tokens():
    """A neighbour's `positional_embed_overrides`: the host counts them in the whole batch's tokens."""
    embeds = torch.tensor([[1.0], [2.0], [3.0]])
    batch = batch_of(replace_embeds=embeds, replace_positions=torch.tensor([20, 24, 15]))
    folded, _ = fold_batch(batch, RUNS)
    assert folded.replace_positions.tolist() == [KEPT.index(20), KEPT.index(24)]
    assert folded.replace_embeds.tolist() == [[1.0], [2.0]], "position 15 is not computed"
    only_first, _ = fold_batch(batch, [RUNS[0], [], []], unread=True)
    assert only_first.replace_positions is None


def test_the_batch_itself_is_left_as_it_is():
    batch = batch_of()
    before = {f.name: getattr(batch, f.name) for f in dataclasses.fields(batch)}
    fold_batch(batch, RUNS)
    assert all(getattr(batch, name) is value for name, value in before.items())


@pytest.mark.parametrize("name", MUST_BE_EMPTY)
def test_a_batch_that_carries_what_folding_does_not_know_is_not_folded(name):
    batch = batch_of()
    setattr(batch, name, [1])
    with pytest.raises(ValueError, match=name):
        fold_batch(batch, RUNS)


class TestUnfolding:
    @pytest.fixture
    def forward_batch(self):
        """What the host makes of the folded batch: each field that counts rows says which row it is of."""
        from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

        folded, fold = fold_batch(batch_of(), RUNS)
        found = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=5,
            input_ids=folded.input_ids,
            req_pool_indices=folded.req_pool_indices,
            seq_lens=folded.seq_lens,
            out_cache_loc=folded.out_cache_loc,
            seq_lens_sum=folded.seq_lens_sum,
            orig_seq_lens=folded.orig_seq_lens,
            seq_lens_cpu=folded.seq_lens_cpu,
            req_pool_indices_cpu=folded.req_pool_indices_cpu,
            rids=[r.rid for r in folded.reqs],
            lora_ids=[None, None, None, "an adapter", None],
            mm_inputs=folded.multimodal_inputs,
            watermark_prompt_tail_ids=[[1], [1], [1], [2], [3]],
            watermark_context_hash_history=[None, None, None, [7], None],
        )
        attach(found, fold)
        return found

    def test_every_field_that_is_read_again_has_one_entry_per_request(self, forward_batch):
        unfold(forward_batch, fold_of(forward_batch))
        assert forward_batch.batch_size == 3
        assert forward_batch.rids == ["r0", "r1", "r2"]
        assert forward_batch.lora_ids == [None, "an adapter", None]
        assert forward_batch.mm_inputs == [None, "an image", None]
        assert forward_batch.watermark_prompt_tail_ids == [[1], [2], [3]]
        assert forward_batch.watermark_context_hash_history == [None, [7], None]
        assert forward_batch.seq_lens.tolist() == forward_batch.seq_lens_cpu.tolist() == [30, 5, 8]
        assert forward_batch.req_pool_indices.tolist() == [4, 2, 9]
        assert fold_of(forward_batch) is None

    def test_a_row_that_ends_a_request_says_what_the_request_says(self, forward_batch):
        """What is taken from rows and what is kept from the batch agree, so both may be relied on."""
        rows = list(fold_of(forward_batch).last_rows)
        assert forward_batch.seq_lens[rows].tolist() == [30, 5, 8]
        assert forward_batch.req_pool_indices[rows].tolist() == [4, 2, 9]

    def test_the_fixture_fills_every_field_that_is_given_back(self, forward_batch):
        """Negative control: a field of the table that nobody fills would be tested by nobody."""
        assert all(getattr(forward_batch, name) is not None for name in GIVEN_BACK)


def test_the_tables_name_every_field_of_the_host_once():
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

    for host_class, table in ((ScheduleBatch, SCHEDULE_BATCH), (ForwardBatch, FORWARD_BATCH)):
        named_here = [name for kind in table for name in named(table, kind)]
        in_host = {field.name for field in dataclasses.fields(host_class)}
        new, gone = sorted(in_host - set(named_here)), sorted(set(named_here) - in_host)
        assert not new, (
            f"{host_class.__name__} has {new}: say in blocks/fields.py how it fares in a folded batch"
        )
        assert not gone, f"{host_class.__name__} has no {gone} any more"
        assert len(named_here) == len(set(named_here))


def test_fold_batch_changes_what_the_table_says_it_changes():
    """The table is what the code does: rows and tokens are made anew, the rest is the batch's own."""
    batch = batch_of(replace_embeds=torch.ones(1, 1), replace_positions=torch.tensor([20]), has_grammar=True)
    folded, _ = fold_batch(batch, RUNS)
    changed = {
        f.name for f in dataclasses.fields(batch) if getattr(folded, f.name) is not getattr(batch, f.name)
    }
    assert changed == set(named(SCHEDULE_BATCH, "row")) | set(named(SCHEDULE_BATCH, "token"))
