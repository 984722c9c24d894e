"""Every floating-point tolerance of the test suite, with the reason for it. No test carries a number of its own.

An entry is (absolute, relative): |got - expected| <= absolute + relative * |expected|. EXACT entries are compared
bit by bit: copies, gathers, ids, codes.
"""

from __future__ import annotations

import torch

EXACT = (0.0, 0.0)

# Kernels against the float64 reference on the same (rounded) operands of unit variance. Half a unit in the last
# place is 2^-24 of a float32, 2^-11 of a float16, 2^-8 of a bfloat16, 2^-4 of an e4m3, 2^-3 of an e5m2.
KERNEL_OUT = {
    # one rounding of the rotated key; float32 also rounds the products; the interpreter truncates subnormal float8
    ("rotate_copy", torch.float32): (1e-6, 0.0),
    ("rotate_copy", torch.float16): (1e-6, 2**-11),
    ("rotate_copy", torch.bfloat16): (1e-6, 2**-8),
    ("rotate_copy", torch.float8_e4m3fn): (2**-9, 2**-4),
    ("rotate_copy", torch.float8_e5m2): (2**-16, 2**-3),
    # the weights and the result are rounded to the dtype; sums run in float32
    ("decode_attention", torch.float32): (3e-6, 0.0),
    ("decode_attention", torch.float16): (5e-4, 2**-11),
    ("decode_attention", torch.bfloat16): (4e-3, 2**-8),
    ("extend_attention", torch.float32): (3e-6, 0.0),
    ("extend_attention", torch.float16): (5e-4, 2**-11),
    ("extend_attention", torch.bfloat16): (4e-3, 2**-8),
    # bfloat16 pieces are rounded before they merge and again as the result
    ("cpu_attention", torch.float32): (3e-6, 0.0),
    ("cpu_attention", torch.bfloat16): (4e-3, 2**-7),
    # means of bfloat16 are kept in float16, and what a list holds of a block is taken out again
    ("cpu_tail", torch.float32): (1e-5, 0.0),
    ("cpu_tail", torch.bfloat16): (8e-3, 2**-7),
    # each tag class rounds its output to the dtype and the merge rounds once more
    ("flashinfer", torch.float16): (1e-3, 2**-10),
    ("flashinfer", torch.bfloat16): (8e-3, 2**-7),
    ("flashinfer lse", torch.float16): (1e-5, 1e-6),
    ("flashinfer lse", torch.bfloat16): (1e-5, 1e-6),
    # float32 sums of exact products and one exponential, relative to a share of the softmax mass
    ("scores", torch.float32): (1e-7, 1e-5),
    ("scores", torch.float16): (1e-7, 1e-5),
    ("scores", torch.bfloat16): (1e-7, 1e-5),
    # log-sum-exp, float32 for every dtype
    ("lse", torch.float32): (3e-6, 0.0),
    ("lse", torch.float16): (3e-6, 0.0),
    ("lse", torch.bfloat16): (3e-6, 0.0),
}

# Share of exact_qk's selection that a scorer must find on synthetic keys of which a quarter of the channels carry
# 90 % of the energy: 4 bits lose the last ranks only, 16 of 64 channels see that quarter.
SCORER_RECALL = {"int4_keys": 0.9, "label_channels": 0.7}

# Log-probabilities of the float32 model for one sequence computed in other batches (rows, chunks, reuse that
# covers everything): one rounding per reduction. The bar for logits is 1e-4 relative; this one is absolute on
# log-probabilities, which is stricter.
FULL_PREFILL_LOGPROB = 1e-4

# The reference against an independent computation. Angle tables are float32: an angle's cosine errs by 2^-24.
REFERENCE = {
    "float64": (1e-12, 1e-12),
    "float32 angles": (1e-6, 1e-6),
}

# A key of magnitude ~4 moved by one float32 rotation against the same key encoded at the new position by another.
MOVED_KEY = (2e-5, 0.0)

# The identity chapter's own bar for a two-layer decoder in float64; it measured 2.2e-16.
CHAPTER = (1e-10, 1e-10)

# KL of the first answer token from dense repair to sparse repair of the same request: k = 224 of 1,200 tokens, a tenth
# repaired. Measured 6e-5 to 3.4e-4 over seven questions; no repair at all is 1.4e-3 to 5.9e-3 away on three of them.
SPARSE_REPAIR_KL = 1e-3
