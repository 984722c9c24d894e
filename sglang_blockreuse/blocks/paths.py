"""Local paths: what a finished request computed on top of reused blocks, kept for its next turn.

The tree's plain namespaces hold exact KV only. A local path is the part of a row from its first local
position on. It is published in a namespace that names the policy, with what stands before it:

    row      |<--- exact: plain namespace --->|<--- local path: blockreuse:<policy>:<digest of exact> --->|
             0                           first_local                                                     end

so a later request that begins with the same row finds it, and no request of another policy, and no exact
one, ever can. Token ids of the path are compared by the tree; those before it by their digest.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from ..config import BlocksConfig
from ..types import BlockOptions
from .match import Namespace

PREFIX = "blockreuse:"  # of every extra_key that is ours; refused in requests
_DOMAIN = b"sglang-blockreuse/1 path\0"


def fingerprint(options: BlockOptions, config: BlocksConfig, *, layer_plan: str | None) -> str:
    """Names everything but the tokens that decides what local KV looks like; 16 hexadecimal digits."""
    parts = (
        options.policy,
        options.tau,
        options.budget,
        config.alpha,
        config.beta,
        config.num_true_sinks,
        config.compile,
        config.compile_prefix,
        config.compile_prefix_text,
        config.company,
        config.guard,
        layer_plan,
    )
    return hashlib.sha256(_DOMAIN + msgspec.json.encode(parts)).hexdigest()[:16]


def path_namespace(before: array[int], namespace: Namespace, policy: str) -> Namespace:
    """Where the path behind the exact tokens `before` lives. policy: a fingerprint."""
    digest = hashlib.sha256(_DOMAIN + before.tobytes()).hexdigest()
    return Namespace(f"{PREFIX}{policy}:{digest}:{namespace.extra_key or ''}", namespace.cache_salt)
