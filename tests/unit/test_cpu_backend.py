"""What the CPU backend refuses, on the host's own layers."""

from __future__ import annotations

import pytest
from sglang.srt.layers.radix_attention import AttentionType, RadixAttention

from sglang_blockreuse.layers.cpu_backend import unsupported_layer


def make_layer(**kwargs) -> RadixAttention:
    return RadixAttention(9, 64, 0.125, 3, layer_id=0, **kwargs)


def test_a_plain_decoder_layer_is_taken():
    assert list(unsupported_layer(make_layer())) == []


@pytest.mark.parametrize(
    ("kwargs", "reason"),
    [
        ({"is_cross_attention": True}, "cross attention"),
        ({"attn_type": AttentionType.ENCODER_ONLY}, "encoder_only"),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, "decoder_bidirectional"),
        ({"sliding_window_size": 4095}, "sliding window of 4095"),
        ({"logit_cap": 50.0}, "caps its logits at 50.0"),
        ({"v_head_dim": 128}, "64 for keys, 128 for values"),
        ({"pos_encoding_mode": "ALIBI"}, "ALIBI"),
    ],
    ids=str,
)
def test_a_layer_it_would_compute_wrongly_is_refused_by_name(kwargs, reason):
    (message,) = unsupported_layer(make_layer(**kwargs))
    assert reason in message
