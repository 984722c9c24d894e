"""Requests with marked blocks and a tree to look them up in, for unit tests of homes."""

from __future__ import annotations

from array import array
from types import SimpleNamespace

from sglang_blockreuse.blocks.manager import BlockManager
from sglang_blockreuse.blocks.match import Namespace
from sglang_blockreuse.blocks.split import Front, homes
from sglang_blockreuse.config import BlocksConfig, Config
from sglang_blockreuse.metrics import Metrics
from sglang_blockreuse.types import Interval

PLAIN = Namespace(None, None)


class CountingTree:
    """A tree that holds `cached` and counts what it is asked."""

    def __init__(self, cached: array[int] | None = None) -> None:
        self.cached = cached or array("q")
        self.num_lookups = self.num_tokens = 0

    def lookup(self, tokens, namespace):
        self.num_lookups += 1
        self.num_tokens += len(tokens)
        common = min(len(tokens), len(self.cached))
        while common and tokens[:common] != self.cached[:common]:
            common -= 1
        return common, None


def blocks_behind(leading: int, num_blocks: int, block_len: int) -> tuple[array[int], list[Interval]]:
    tokens = array("q", range(leading + num_blocks * block_len + 10))
    return tokens, [
        Interval(start, start + block_len) for start in range(leading, len(tokens) - 10, block_len)
    ]


def homes_of(leading=20, num_blocks=4, block_len=50, **options):
    tokens, spans = blocks_behind(leading, num_blocks, block_len)
    return homes(tokens, spans, front=Front(tokens[:leading]), min_block_tokens=32, **options)


def request(tokens, spans, *, mode="reuse", **values):
    custom = {"blockreuse_mode": mode, "blockreuse_spans": [x for s in spans for x in (s.start, s.end)]}
    fields = {
        "rid": "main",
        "sampling_params": SimpleNamespace(custom_params={**custom, **values.pop("params", {})}),
        "origin_input_ids": tokens,
        "extra_key": None,
        "cache_salt": None,
        "return_logprob": False,
        "logprob_start_len": -1,
        "input_embeds": None,
        "positional_embed_overrides": None,
        "multimodal_inputs": None,
        "session": None,
        "lora_id": None,
        "return_hidden_states": False,
        "beam_group": None,
    }
    return SimpleNamespace(**{**fields, **values})


def manager_of(tree, *, pool_size=10**7, **blocks) -> BlockManager:
    """With homes right behind the leading text, unless `company` is asked for."""
    return BlockManager(
        config=Config(blocks=BlocksConfig(**{"company": 0, **blocks})),
        tree=tree,
        bos=None,
        pool_size=pool_size,
        metrics=Metrics(),
    )
