"""Rotary embeddings of the host, in this process: what is moved equals what the host's own code encodes."""

from __future__ import annotations

import pytest
import sglang  # noqa: F401  settles the platform before its layers are imported
import torch
from sglang.srt.layers.rotary_embedding import get_rope
from tolerances import MOVED_KEY

from sglang_blockreuse.blocks.rope import UnsupportedRope, find_ropes
from sglang_blockreuse.kernels.reference import rotate_keys

HEADS, HEAD_DIM, HIDDEN = 2, 32, 48
ORIGINAL, FACTOR = 256, 4.0
BEYOND = {"original_max_position_embeddings": ORIGINAL, "factor": FACTOR}

SCALINGS = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": FACTOR},
    "dynamic": {"rope_type": "dynamic", "factor": FACTOR},
    "dynamic alpha": {"rope_type": "dynamic", "alpha": 1000.0, "factor": FACTOR},
    "llama3": {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **BEYOND},
    "yarn": {"rope_type": "yarn", **BEYOND},
    "yarn mscale": {"rope_type": "yarn", "mscale": 1.0, "mscale_all_dim": 0.3, **BEYOND},
}


def make_rope(scaling: str, *, rotary_dim=HEAD_DIM, is_neox=True, dtype=torch.float32):
    """The host's module, lengthened past its own table as the host does for a long --context-length."""
    rope = get_rope(HEAD_DIM, rotary_dim, ORIGINAL, 10_000, is_neox, SCALINGS[scaling], dtype)
    rope._ensure_cos_sin_cache_length(5 * ORIGINAL)
    return rope


class Attention(torch.nn.Module):
    """A layer as the host's models build them; `encode` is what a family does with its keys."""

    class Operation(torch.nn.Module):
        tp_k_head_num = HEADS

        def __init__(self, layer_id):
            super().__init__()
            self.layer_id = layer_id

    def __init__(self, layer_id, rope, encode=None):
        super().__init__()
        self.attn = Attention.Operation(layer_id)
        self.rotary_emb = rope
        self.qk_proj = torch.nn.Linear(HIDDEN, HEADS * HEAD_DIM)
        self.encode = encode or (lambda positions, k: rope(positions, k.clone(), k)[1])

    def forward(self, positions, hidden_states, forward_batch):
        k = self.encode(positions, self.qk_proj(hidden_states))
        return self.attn(k, k, k, forward_batch)


def model_of(*layers) -> torch.nn.Module:
    return torch.nn.ModuleList(layers)


@pytest.fixture(autouse=True)
def no_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("is_neox", [True, False], ids=["neox", "gptj"])
@pytest.mark.parametrize("rotary_dim", [HEAD_DIM, HEAD_DIM // 2], ids=["whole", "partial"])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_moved_key_is_the_one_encoded_there(scaling, rotary_dim, is_neox):
    rope = make_rope(scaling, rotary_dim=rotary_dim, is_neox=is_neox)
    (group,) = find_ropes(model_of(Attention(0, rope)), 1)
    # within the original context, across its end, and in the rows that the host added
    old = torch.tensor([0, 3, 200, 900, 1100, 7])
    new = torch.tensor([9, 250, 700, 20, 1270, 7])
    k = torch.randn(len(old), HEAD_DIM)

    def at(positions):
        return rope.forward_native(positions, k.clone(), k.clone())[1].unflatten(-1, (1, HEAD_DIM))

    moved = rotate_keys(at(old), *group.cos_sin(old, new), is_neox=group.is_neox)
    assert torch.allclose(moved, at(new), atol=MOVED_KEY[0], rtol=MOVED_KEY[1])
    wrong = rotate_keys(at(old), *group.cos_sin(old, new + 1), is_neox=group.is_neox)
    assert not torch.allclose(wrong, at(new), atol=100 * MOVED_KEY[0])


@pytest.mark.parametrize("scaling", SCALINGS)
def test_a_table_cast_to_bfloat16_is_rebuilt_in_float32_as_long_as_it_is(scaling):
    rope = make_rope(scaling, dtype=torch.bfloat16)
    assert rope.cos_sin_cache.dtype == torch.bfloat16
    (group,) = find_ropes(model_of(Attention(0, rope)), 1)
    exact = make_rope(scaling).cos_sin_cache
    assert group.table.dtype == torch.float32
    assert torch.equal(group.table, exact[: len(group.table)])
    assert len(group.table) == len(rope.cos_sin_cache) > 5 * ORIGINAL


def test_layers_are_grouped_by_their_rotary_embedding():
    """Local and global layers of one model may turn at different speeds, and some may not turn at all."""
    near, far = make_rope("default"), make_rope("llama3")
    still = Attention(3, None, encode=lambda positions, k: k)
    groups = find_ropes(model_of(Attention(0, near), Attention(1, far), Attention(2, near), still), 4)
    assert [(g.name, g.layers) for g in groups] == [
        ("RotaryEmbedding", (0, 2)),
        ("Llama3RotaryEmbedding", (1,)),
        ("none", (3,)),
    ]


class TestRefused:
    """Planted faults: each is a model that would answer nonsense from moved blocks."""

    def expect(self, message, *layers):
        with pytest.raises(UnsupportedRope, match=message):
            find_ropes(model_of(*layers), len(layers))

    def test_a_table_changed_after_it_was_built(self):
        rope = make_rope("llama3", dtype=torch.bfloat16)
        rope.cos_sin_cache = (
            get_rope(HEAD_DIM, HEAD_DIM, 6 * ORIGINAL, 10_000)
            .cos_sin_cache[: len(rope.cos_sin_cache)]
            .to(torch.bfloat16)
        )
        self.expect("table that the model reads", Attention(0, rope))

    def test_code_that_reads_other_rows_of_the_table(self):
        rope = make_rope("yarn")
        native = type(rope).forward_native
        rope.forward_native = lambda positions, q, k: native(rope, positions // 2, q, k)
        try:
            self.expect("moving a key by rotation differs", Attention(0, rope))
        finally:
            del rope.forward_native  # the host keeps its modules for the next who asks

    def test_the_other_layout_of_pairs(self):
        rope, swapped = make_rope("default"), make_rope("default", is_neox=False)
        odd = Attention(0, rope, encode=lambda positions, k: swapped(positions, k.clone(), k)[1])
        self.expect("layer 0 .* encodes positions in another way", odd)

    def test_a_layer_that_owns_a_rotary_embedding_and_does_not_use_it(self):
        rope = make_rope("default")
        unused = Attention(1, rope, encode=lambda positions, k: k)
        self.expect("layer 1 .* encodes positions in another way", Attention(0, rope), unused)

    def test_a_layer_whose_rotary_embedding_has_another_name(self):
        rope = make_rope("default")
        hidden = Attention(1, None, encode=lambda positions, k: rope(positions, k.clone(), k)[1])
        self.expect("layer 1 .* moved by the rotation of none", Attention(0, rope), hidden)

    def test_a_model_without_any_rotary_embedding(self):
        self.expect("no rotary embedding in any layer", Attention(0, None, encode=lambda positions, k: k))

    def test_a_layer_that_nothing_is_known_of(self):
        with pytest.raises(UnsupportedRope, match=r"layers \[1\] of ModuleList"):
            find_ropes(model_of(Attention(0, make_rope("default"))), 2)

    def test_a_layer_without_rotary_embedding_that_cannot_be_run(self):
        def broken(positions, k):
            raise RuntimeError("needs a server")

        self.expect("could not be run alone", Attention(0, make_rope("default")), Attention(1, None, broken))

    @pytest.mark.parametrize(
        ("name", "scaling"),
        [
            (
                "Phi3LongRoPEScaledRotaryEmbedding",
                {
                    "rope_type": "longrope",
                    "short_factor": [1.0] * (HEAD_DIM // 2),
                    "long_factor": [2.0] * (HEAD_DIM // 2),
                    "original_max_position_embeddings": ORIGINAL,
                },
            ),
            ("MRotaryEmbedding", {"rope_type": "default", "mrope_section": [4, 6, 6]}),
            ("DeepseekScalingRotaryEmbedding", {"rope_type": "deepseek_yarn", **BEYOND}),
        ],
        ids=["longrope", "mrope", "deepseek"],
    )
    def test_what_is_not_a_table_of_one_rotation_by_name(self, name, scaling):
        rope = get_rope(HEAD_DIM, HEAD_DIM, 2 * ORIGINAL, 10_000, True, scaling)
        self.expect(f"rotary embedding {name} .* is not supported", Attention(0, rope))


def test_a_layer_that_cannot_be_run_alone_is_accepted_with_a_warning(caplog):
    def broken(positions, k):
        raise RuntimeError("needs a server")

    assert find_ropes(model_of(Attention(0, make_rope("default"), broken)), 1)
    assert "layer 0 could not be run alone" in caplog.text
