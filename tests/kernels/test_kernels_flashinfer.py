"""The plans that FlashInfer would get, run by a PyTorch executor of the same contract, equal the reference."""

from __future__ import annotations

import inspect
from dataclasses import replace

import flashinfer
import pytest
import torch
from drawn import examples
from flashinfer_contract import TorchExecutor
from hypothesis import given
from hypothesis import strategies as st
from tolerances import REFERENCE

from sglang_blockreuse.kernels import reference
from sglang_blockreuse.kernels.flashinfer_attention import (
    ClassAttention,
    Geometry,
    as_slots,
    plan_arguments,
    plan_classes,
)

BIAS = {"alpha": 0.7, "beta": -1.3}
GEOMETRY = Geometry(6, 2, 8, 6, 0.3, torch.float64, torch.float64)
MODES = {"own global": 0, "own mixed": 1, "none local": 2}


def close(got, expected):
    absolute, relative = REFERENCE["float64"]
    torch.testing.assert_close(got, expected, atol=absolute, rtol=relative)


def batch(key_lens, query_lens, tags, page_size=1, seed=0):
    """Rows over shuffled pages; `tags` as in MODES."""
    torch.manual_seed(seed)
    entries = [-(-n // page_size) for n in key_lens]
    num_slots = (sum(entries) + 2) * page_size
    k, v = (
        torch.randn(num_slots, 2, 8, dtype=torch.float64),
        torch.randn(num_slots, 2, 6, dtype=torch.float64),
    )
    q = torch.randn(sum(query_lens), 6, 8, dtype=torch.float64)
    tags_S = (
        torch.randint(0, 4, (num_slots,), dtype=torch.uint8) if tags != 2 else torch.zeros(num_slots).byte()
    )
    indices = torch.randperm(sum(entries) + 2)[: sum(entries)]
    rows = {"page_size": page_size, "kv_lens_R": torch.tensor(key_lens)}
    kv_indptr, qo_indptr = (torch.tensor([0, *lens]).cumsum(0) for lens in (entries, query_lens))
    if tags == 0:
        for slots, num_queries in zip(
            reference.row_slots(indices, kv_indptr, **rows), query_lens, strict=True
        ):
            tags_S[slots[slots.numel() - num_queries :]] = 0
    return q, k, v, indices, kv_indptr, qo_indptr, tags_S, rows


def run(key_lens, query_lens, tags, page_size=1, seed=0, bias=BIAS):
    q, k, v, indices, kv_indptr, qo_indptr, tags_S, rows = batch(key_lens, query_lens, tags, page_size, seed)
    parts = plan_classes(indices, kv_indptr, qo_indptr, tags_S, **bias, **rows)
    attention = ClassAttention(TorchExecutor)
    attention.plan(parts, GEOMETRY)
    out, lse = attention.run(q, k, v)
    expected = reference.extend_attention(
        q, k, v, indices, kv_indptr, qo_indptr, scale=0.3, tags_S=tags_S, **bias, **rows
    )
    close(out, expected[0])
    close(lse, expected[1])
    return parts


@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("tags", MODES.values(), ids=MODES)
def test_virtual_rows_equal_the_reference(tags, page_size):
    run([20, 9, 0, 33], [5, 1, 0, 33], tags, page_size)


@pytest.mark.parametrize("tags", MODES.values(), ids=MODES)
def test_decode_rows_equal_the_reference(tags):
    run([20, 1, 7], [1, 1, 1], tags)


def test_no_mask_is_sent_where_plain_masks_serve():
    parts = run([20, 9, 33], [5, 1, 10], MODES["own global"])
    assert [part.tag for part in parts] == [0, 1, 2, 3]
    assert [part.custom_mask for part in parts] == [None] * 4
    assert [part.causal for part in parts] == [True, False, False, False]
    masked = run([20, 9, 33], [5, 1, 10], MODES["own mixed"])
    assert any(part.custom_mask is not None for part in masked)


def test_every_key_is_in_exactly_one_list():
    _, _, _, indices, kv_indptr, qo_indptr, tags_S, rows = batch([20, 0, 33], [5, 0, 10], 1)
    parts = plan_classes(indices, kv_indptr, qo_indptr, tags_S, **BIAS, **rows)
    listed = torch.cat([part.kv_indices for part in parts]).sort().values
    assert torch.equal(listed.long(), indices.sort().values)


def test_without_biases_there_is_one_class():
    parts = run([20, 9], [5, 1], MODES["own mixed"], bias={"alpha": 0.0, "beta": 0.0})
    assert len(parts) == 1
    assert parts[0].causal


def test_a_bias_of_minus_infinity_hides_the_class():
    run([20, 9], [5, 1], MODES["own global"], bias={"alpha": -torch.inf, "beta": 0.5})


def test_one_plan_serves_every_layer():
    q, k, v, indices, kv_indptr, qo_indptr, tags_S, rows = batch([20, 9], [5, 1], 0)
    executors = []
    attention = ClassAttention(lambda: executors.append(TorchExecutor()) or executors[-1])
    attention.plan(plan_classes(indices, kv_indptr, qo_indptr, tags_S, **BIAS, **rows), GEOMETRY)
    for layer in range(3):
        out, _ = attention.run(q + layer, k * (layer + 1), v - layer)
        close(
            out,
            reference.extend_attention(
                q + layer,
                k * (layer + 1),
                v - layer,
                indices,
                kv_indptr,
                qo_indptr,
                scale=0.3,
                tags_S=tags_S,
                **BIAS,
            )[0],
        )
    assert [executor.num_plans for executor in executors] == [1] * 4
    # a batch with fewer classes reuses the executors it needs
    attention.plan(plan_classes(indices, kv_indptr, qo_indptr, tags_S * 0, **BIAS, **rows), GEOMETRY)
    attention.run(q, k, v)
    assert [executor.num_plans for executor in executors] == [2, 1, 1, 1]


def test_a_run_before_the_plan_is_refused():
    with pytest.raises(RuntimeError, match="run before plan"):
        ClassAttention(TorchExecutor).run(torch.zeros(1, 6, 8), torch.zeros(4, 2, 8), torch.zeros(4, 2, 6))


def test_heads_stored_before_slots_have_no_slot_view():
    with pytest.raises(RuntimeError, match="view"):
        as_slots(torch.zeros(3, 2, 4, 8).permute(0, 2, 1, 3))


def test_flashinfer_takes_every_keyword_of_the_plan():
    _, _, _, indices, kv_indptr, qo_indptr, tags_S, rows = batch([20, 9], [5, 1], 0)
    part = plan_classes(indices, kv_indptr, qo_indptr, tags_S, **BIAS, **rows)[0]
    wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper
    assert set(plan_arguments(part, GEOMETRY)) <= set(inspect.signature(wrapper.plan).parameters)
    assert "return_lse" in inspect.signature(wrapper.run).parameters
    assert {"tie_break"} <= set(inspect.signature(flashinfer.top_k).parameters)
    assert list(inspect.signature(flashinfer.merge_states).parameters)[:2] == ["v", "s"]
    for tensor in (part.qo_indptr_R1, part.kv_indptr_R1, part.kv_indices, part.last_page_len_R):
        assert tensor.dtype == torch.int32


@pytest.mark.parametrize("fault", ["natural log", "no shift", "no mask"])
def test_a_broken_contract_is_noticed(fault):
    q, k, v, indices, kv_indptr, qo_indptr, tags_S, _ = batch([20, 9], [5, 9], 1)

    class Broken(TorchExecutor):
        def plan(self, part, geometry):
            super().plan(replace(part, custom_mask=None) if fault == "no mask" else part, geometry)

        def run(self, q_TQD, k_SHD, v_SHE):
            out, lse = super().run(q_TQD, k_SHD, v_SHE)
            return out, lse * torch.log(torch.tensor(2.0)) if fault == "natural log" else lse

    parts = plan_classes(indices, kv_indptr, qo_indptr, tags_S, **BIAS)
    if fault == "no shift":
        parts = [replace(part, bias=0.0) for part in parts]
    if fault == "no mask":
        parts = [replace(part, last_page_len_R=part.kv_indptr_R1.diff().clamp(max=1)) for part in parts]
    attention = ClassAttention(Broken)
    attention.plan(parts, GEOMETRY)
    out, _ = attention.run(q, k, v)
    expected, _ = reference.extend_attention(
        q, k, v, indices, kv_indptr, qo_indptr, scale=0.3, tags_S=tags_S, **BIAS
    )
    assert not torch.allclose(out, expected, atol=1e-3)


@examples(40)
@given(
    rows_of=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), min_size=1, max_size=4),
    tags=st.sampled_from(sorted(MODES.values())),
    page_size=st.sampled_from([1, 3]),
    seed=st.integers(0, 999),
)
def test_any_batch_equals_the_reference(rows_of, tags, page_size, seed):
    run([prefix + own for prefix, own in rows_of], [own for _, own in rows_of], tags, page_size, seed)
