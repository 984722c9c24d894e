"""Laws of kernels/reference.py and reference_select.py, each against an independent computation."""

from __future__ import annotations

import pytest
import torch
from tolerances import REFERENCE

from sglang_blockreuse.kernels import reference as ref
from sglang_blockreuse.kernels import reference_select as select

TAG_BIAS = {"alpha": 0.7, "beta": -1.1}


def close(got, expected, name="float64"):
    absolute, relative = REFERENCE[name]
    torch.testing.assert_close(got.double(), expected.double(), atol=absolute, rtol=relative)


def batch(lens, num_heads=2, group=3, head_dim=8, value_dim=6, seed=0):
    torch.manual_seed(seed)
    num_slots = sum(lens) + 5
    k, v = (torch.randn(num_slots, num_heads, d, dtype=torch.float64) for d in (head_dim, value_dim))
    q = torch.randn(len(lens), num_heads * group, head_dim, dtype=torch.float64)
    tags = torch.randint(0, 4, (num_slots,), dtype=torch.uint8)
    indptr = torch.tensor([0, *lens]).cumsum(0)
    return q, k, v, torch.randperm(num_slots)[: sum(lens)], indptr, tags


def rope(x_TD, position_T, inv_freq_F):
    """The textbook: complex multiplication of pairs (i, i + F), after RoFormer eq. 34."""
    half = inv_freq_F.numel()
    z = torch.complex(x_TD[:, :half], x_TD[:, half:]) * torch.polar(
        torch.ones(len(position_T), half, dtype=torch.float64), position_T.double()[:, None] * inv_freq_F
    )
    return torch.cat((z.real, z.imag), -1)


class TestRotation:
    inv_freq = 10000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)

    def test_rotating_by_delta_moves_a_key_to_its_new_position(self):
        raw, old = torch.randn(5, 16, dtype=torch.float64), torch.tensor([0, 3, 90, 4000, 17])
        delta = torch.tensor([7, -3, 100000, -1234, 0])
        cos, sin = ref.delta_cos_sin(self.inv_freq, delta)
        got = ref.rotate_keys(rope(raw, old, self.inv_freq)[:, None], cos, sin)[:, 0]
        close(got, rope(raw, old + delta, self.inv_freq), "float32 angles")
        wrong = ref.rotate_keys(rope(raw, old, self.inv_freq)[:, None], cos, -sin)[:, 0]
        assert not torch.allclose(wrong[0], got[0], atol=1e-2), "the sign of delta does not matter"

    def test_the_scores_of_rotated_pairs_depend_on_the_distance_only(self):
        q, k = torch.randn(1, 16, dtype=torch.float64), torch.randn(1, 16, dtype=torch.float64)
        far = rope(q, torch.tensor([500]), self.inv_freq) @ rope(k, torch.tensor([480]), self.inv_freq).T
        cos, sin = ref.delta_cos_sin(self.inv_freq, torch.tensor([-300]))
        moved = ref.rotate_keys(rope(k, torch.tensor([480]), self.inv_freq)[:, None], cos, sin)[:, 0]
        near = rope(q, torch.tensor([200]), self.inv_freq) @ moved.T
        close(near, far, "float32 angles")

    @pytest.mark.parametrize("magnitude", [1.0, 1.37], ids=["plain", "yarn"])
    def test_a_cached_table_gives_the_same_rotation(self, magnitude):
        angle = torch.arange(200, dtype=torch.float64)[:, None] * self.inv_freq
        cache = (torch.cat((angle.cos(), angle.sin()), -1) * magnitude).float()
        old, new = torch.tensor([3, 150, 7]), torch.tensor([60, 2, 7])
        for got, expected in zip(
            ref.cached_cos_sin(cache, old, new), ref.delta_cos_sin(self.inv_freq, new - old), strict=True
        ):
            close(got, expected, "float32 angles")

    def test_gptj_pairs_are_neighbours(self):
        k = torch.randn(4, 2, 20, dtype=torch.float64)
        cos, sin = ref.delta_cos_sin(self.inv_freq, torch.tensor([5, -9, 2, 0]))
        order = torch.tensor([*range(0, 16, 2), *range(1, 16, 2), 16, 17, 18, 19])
        expected = torch.empty_like(k)
        expected[..., order] = ref.rotate_keys(k[..., order], cos, sin)
        close(ref.rotate_keys(k, cos, sin, is_neox=False), expected)
        assert not torch.allclose(ref.rotate_keys(k, cos, sin), expected, atol=1e-3)

    def test_rotating_by_zero_moves_the_bits_untouched(self):
        k = torch.full((1, 1, 16), -0.0, dtype=torch.bfloat16)
        k.view(torch.int16)[0, 0, 3] = 0x7FC1
        cos, sin = ref.delta_cos_sin(self.inv_freq, torch.tensor([0]))
        assert torch.equal(ref.rotate_keys(k, cos, sin).view(torch.int16), k.view(torch.int16))

    @pytest.mark.parametrize(
        ("src", "dst", "message"),
        [
            ([1, 2], [2, 3], "both source and destination"),
            ([1, 2], [3, 3], "repeats"),
            ([1], [2, 3], "equal"),
        ],
    )
    def test_slots_that_collide_are_refused(self, src, dst, message):
        pool, angle = torch.zeros(8, 1, 16), torch.zeros(1, 8)
        with pytest.raises(ValueError, match=message):
            ref.rotate_copy(pool, pool.clone(), torch.tensor(src), torch.tensor(dst), angle, angle)

    def test_a_pool_of_integers_is_refused(self):
        pool, angle = torch.zeros(8, 1, 16, dtype=torch.uint8), torch.zeros(1, 8)
        with pytest.raises(ValueError, match="view of its float8 type"):
            ref.rotate_copy(pool, pool.clone(), torch.tensor([1]), torch.tensor([2]), angle, angle)

    def test_a_paged_pool_is_the_flat_pool(self):
        flat = torch.randn(24, 2, 16)
        paged = flat.clone().view(6, 4, 2, 16)
        angles = ref.delta_cos_sin(self.inv_freq, torch.tensor([5, 6]))
        slots = torch.tensor([3, 17]), torch.tensor([20, 9])
        ref.rotate_copy(flat, flat.clone(), *slots, *angles)
        ref.rotate_copy(paged, paged.clone(), *slots, *angles)
        assert torch.equal(paged.view(24, 2, 16), flat)


class TestAttention:
    @pytest.mark.parametrize("lens", [[7, 1, 20], [5]], ids=str)
    def test_decode_equals_a_loop_over_heads(self, lens):
        q, k, v, indices, indptr, tags = batch(lens)
        out, lse = ref.decode_attention(q, k, v, indices, indptr, scale=0.3, tags_S=tags, **TAG_BIAS)
        for r in range(len(lens)):
            slots = indices[indptr[r] : indptr[r + 1]]
            bias = 0.7 * (tags[slots] % 2).double() - 1.1 * (tags[slots] // 2).double()
            for h in range(6):
                logits = k[slots, h // 3] @ q[r, h] * 0.3 + bias
                close(out[r, h], logits.softmax(0) @ v[slots, h // 3])
                close(lse[r, h], logits.logsumexp(0))

    def test_extend_equals_decode_of_every_query(self):
        q, k, v, indices, indptr, tags = batch([9, 4])
        q = torch.randn(7, 6, 8, dtype=torch.float64)
        qo_indptr = torch.tensor([0, 3, 7])
        out, lse = ref.extend_attention(
            q, k, v, indices, indptr, qo_indptr, scale=0.3, tags_S=tags, **TAG_BIAS
        )
        ends = [7, 8, 9, 1, 2, 3, 4]
        starts = [0, 0, 0, 9, 9, 9, 9]
        for t, (start, end) in enumerate(zip(starts, ends, strict=True)):
            keys = indices[start : start + end]
            one = ref.decode_attention(
                q[t : t + 1], k, v, keys, torch.tensor([0, end]), scale=0.3, tags_S=tags, **TAG_BIAS
            )
            close(out[t], one[0][0])
            close(lse[t], one[1][0])

    def test_a_row_without_keys_is_zero(self):
        q, k, v, indices, indptr, _ = batch([0, 3])
        out, lse = ref.decode_attention(q, k, v, indices, indptr, scale=0.3)
        assert out[0].abs().max() == 0
        assert lse[0].isneginf().all()

    def test_more_queries_than_keys_are_refused(self):
        q, k, v, indices, indptr, _ = batch([2])
        with pytest.raises(ValueError, match="row 0 has 3 queries for 2 keys"):
            ref.extend_attention(q.expand(3, -1, -1), k, v, indices, indptr, torch.tensor([0, 3]), scale=1.0)

    def test_pages_without_lengths_are_refused(self):
        q, k, v, indices, indptr, _ = batch([2])
        with pytest.raises(ValueError, match="page_size 4 needs kv_lens_R"):
            ref.decode_attention(q, k, v, indices, indptr, scale=1.0, page_size=4)

    @pytest.mark.parametrize("num_parts", [1, 2, 5])
    def test_merged_parts_equal_the_whole(self, num_parts):
        q, k, v, indices, indptr, _ = batch([23])
        whole = ref.decode_attention(q, k, v, indices, indptr, scale=0.3)
        parts = [
            ref.decode_attention(q, k, v, part, torch.tensor([0, part.numel()]), scale=0.3)
            for part in (*indices.tensor_split(num_parts), indices[:0])
        ]
        out, lse = ref.merge_states([p[0] for p in parts], [p[1] for p in parts])
        close(out, whole[0])
        close(lse, whole[1])

    @pytest.mark.parametrize("page_size", [1, 4])
    def test_classes_with_shifted_log_sum_exps_equal_the_bias(self, page_size):
        q, k, v, _, _, tags = batch([30, 17, 0, 8])
        lens = torch.tensor([30, 17, 0, 8])
        pages = torch.tensor([0, 8, 13, 13, 15]) if page_size == 4 else torch.tensor([0, 30, 47, 47, 55])
        indices = torch.randperm(15 if page_size == 4 else 60)[: pages[-1]]
        rows = {"page_size": page_size, "kv_lens_R": lens}
        whole = ref.decode_attention(q, k, v, indices, pages, scale=0.3, tags_S=tags, **TAG_BIAS, **rows)
        outs, lses = [], []
        for part in ref.split_by_class(indices, pages, tags, **rows):
            out, lse = ref.decode_attention(q, k, v, part.slots_I, part.indptr_R1, scale=0.3)
            outs.append(out)
            lses.append(lse + ref.class_bias(part.tag, **TAG_BIAS))
        out, lse = ref.merge_states(outs, lses)
        close(out, whole[0])
        close(lse, whole[1])


class TestSelection:
    def test_int4_keys_err_by_half_a_step(self):
        k = torch.randn(50, 3, 128)
        keys = select.quantise_int4(k)
        step = keys.ranges.float().unflatten(-1, (2, 2))[..., 0].repeat_interleave(64, -1)
        # the float16 rounding of the range adds at most 2^-10 of it
        excess = (select.dequantise_int4(keys) - k).abs() - step * (0.5 + 15 * 2**-10)
        assert excess.max() <= 2**-10 * k.abs().max()
        assert keys.bytes_per_key == 72

    def test_scores_of_a_list_sum_the_softmax_of_its_heads(self):
        q, k, _, indices, indptr, _ = batch([9, 4])
        scores = select.pooled_scores(q, k, indices, indptr, scale=0.3, heads="kv_head")
        close(scores[0].sum(-1), torch.full((2,), 3.0))
        layer = select.pooled_scores(q, k, indices, indptr, scale=0.3, heads="layer")
        close(layer[:, 0], scores.sum(1))

    def test_ties_go_to_the_lower_position(self):
        scores = torch.tensor([[[1.0, 2.0, 2.0, 2.0, 0.0, 2.0]]])
        chosen, counts = select.top_k(scores, torch.tensor([6]), 3)
        assert chosen.tolist() == [[[1, 2, 3]]]
        assert counts.tolist() == [3]

    def test_forced_positions_are_counted_once_and_the_budget_is_used_up(self):
        scores = torch.arange(10.0).view(1, 1, 10)
        chosen, _ = select.top_k(scores, torch.tensor([10]), 6, num_sinks=2, window=3)
        assert chosen.tolist() == [[[0, 1, 6, 7, 8, 9]]]

    def test_a_short_row_takes_all_and_pads(self):
        chosen, counts = select.top_k(torch.zeros(2, 1, 4), torch.tensor([3, 0]), 4)
        assert chosen.tolist() == [[[0, 1, 2, -1]], [[-1] * 4]]
        assert counts.tolist() == [3, 0]

    def test_a_pool_of_everything_reranks_as_a_scan(self):
        q, k, _, indices, indptr, _ = batch([30, 12])
        pool, lens = select.scan(q, k, indices, indptr, size=30, scale=0.3)
        options = {"scale": 0.3, "num_sinks": 1, "window": 2}
        scanned = select.scan(q.flip(0), k, indices, indptr, size=7, **options)
        reranked = select.rerank(q.flip(0), k, pool, lens, indices, indptr, k=7, **options)
        assert torch.equal(scanned[0], reranked[0])

    def test_positions_become_slots_once(self):
        indices, indptr = torch.tensor([5, 3, 8, 0]), torch.tensor([0, 3, 4])
        slots = select.to_slots(torch.tensor([[[0, 2]], [[0, -1]]]).int(), indices, indptr)
        assert slots.tolist() == [[[5, 8]], [[0, 0]]]
        paged = select.to_slots(torch.tensor([[[1, 9]], [[2, -1]]]).int(), indices, indptr, page_size=4)
        assert paged.tolist() == [[[21, 33]], [[2, 0]]]

    def test_all_channels_as_labels_score_exactly(self):
        q, k, _, indices, indptr, _ = batch([9, 4])
        channels = select.label_channels(q, k, 8)
        scores = select.pooled_scores(
            select.label_queries(q, channels), select.label_keys(k, channels), indices, indptr, scale=0.3
        )
        close(scores[0, 0, :9], select.pooled_scores(q, k, indices, indptr, scale=0.3)[0, 0, :9])
        few = select.label_channels(q, k * torch.tensor([0, 9, 0, 0, 9, 0, 0, 1.0]), 3)
        assert few.tolist() == [[1, 4, 7]] * 2

    def test_pages_of_one_key_score_exactly(self):
        q, k, _, indices, indptr, _ = batch([9, 4])
        for heads in ("layer", "kv_head"):
            scores = select.page_scores(
                q, select.page_bounds(k[:, None]), indices, indptr, scale=0.3, heads=heads
            )
            close(scores, select.pooled_scores(q, k, indices, indptr, scale=0.3, heads=heads))

    def test_a_page_bound_is_never_below_its_keys(self):
        torch.manual_seed(0)
        k = torch.randn(6, 4, 2, 8, dtype=torch.float64)
        q = torch.randn(2, 8, dtype=torch.float64)
        bounds = select.page_bounds(k)
        upper = torch.maximum(q * bounds.low, q * bounds.high).sum(-1)
        assert ((k * q).sum(-1).amax(1) <= upper).all()
