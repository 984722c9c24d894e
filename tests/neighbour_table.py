"""Where neighbours meet: a tiny model with a tokenizer, and the servers that requests are dealt to.

Adapters are missing: the CPU platform refuses --lora-paths, and elsewhere a request with one reuses no blocks.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tiny_models import NUM_LAYERS, VOCAB, TinyModel

FIRST_BYTE = 3  # ids 0..2 are <unk>, <s>, </s>; then come the 256 bytes; then merged pairs of letters
CONTEXT = 512
IN_TURN = "--disable-overlap-schedule"
CHUNK = 96  # tokens of one prefill step: most hands take several
PLAN = {
    "version": 1,
    "name": "neighbours",
    "model": {"architecture": "LlamaForCausalLM", "num_layers": NUM_LAYERS},
    "selection": {"final_k": 48, "pool_size": 64, "sink": 4, "window": 8, "min_seq_len": 96},
    "layers": [
        {"layers": 0, "role": "full"},
        {"layers": 1, "role": "reindex", "anchor": 0},
        {"layers": 2, "role": "reuse", "anchor": 0},
    ],
}


@dataclass(frozen=True)
class Table:
    """One way to start the server, and what its requests may ask for besides what every server knows."""

    flags: tuple[str, ...] = ()
    blocks: dict[str, Any] = field(default_factory=dict)  # of the configuration file
    layer_plan: bool = False
    extras: frozenset[str] = frozenset()  # hidden, priority, processor, long
    kinds: tuple[str, ...] = (
        "plain",
        "plain",
        "plain",
        "rows",
        "place",
        "place",
        "moved",
        "moved",
    )  # of requests, as often as named
    pool: int = 6000  # slots

    @property
    def in_turn(self) -> bool:
        return IN_TURN in self.flags

    def arguments(self, folder: Path) -> tuple[str, ...]:
        """Flags behind the model path; writes the files they name to `folder`."""
        # companions are whoever came first, so in them alone a neighbour of the same namespace has a say
        blocks = {"min_block_tokens": 16, "budget": 0.2, "company": 0, **self.blocks}
        config: dict[str, Any] = {"blocks": blocks}
        flags = ("--dtype", "float32", "--context-length", str(CONTEXT), "--random-seed", "0")
        flags += ("--chunked-prefill-size", str(CHUNK), "--max-running-requests", "8")
        flags += ("--max-total-tokens", str(self.pool), "--skip-server-warmup")
        if self.layer_plan:
            (folder / "plan.json").write_text(json.dumps(PLAN))
            flags += ("--layer-plan", str(folder / "plan.json"))
        if "hidden" in self.extras:
            flags += ("--enable-return-hidden-states",)
        if "processor" in self.extras:
            flags += ("--enable-custom-logit-processor",)
        if "priority" in self.extras:
            flags += ("--enable-priority-scheduling",)
        (folder / "config.json").write_text(json.dumps(config))
        return (*flags, *self.flags, "--blockreuse-config", str(folder / "config.json"))


TABLES: dict[str, Table] = {
    "plain": Table(extras=frozenset({"processor"})),
    "hidden": Table(extras=frozenset({"hidden", "processor"})),
    "priority": Table(("--max-running-requests", "3"), extras=frozenset({"priority", "processor"})),
    "mixed": Table(("--enable-mixed-chunk",), extras=frozenset({"processor"})),
    "mixed in turn": Table(("--enable-mixed-chunk", IN_TURN, "--enable-streaming-session")),
    "in turn": Table((IN_TURN,), extras=frozenset({"hidden", "processor"})),
    "metrics": Table(("--enable-metrics", "--schedule-policy", "lpm"), {"compile_prefix": "none"}),
    "truncated": Table(("--allow-auto-truncate",), extras=frozenset({"long"})),
    "sparse": Table(layer_plan=True),
    "corrected": Table(blocks={"alpha": -0.5, "beta": -0.5, "compile_prefix": "bos"}),
    "background": Table(blocks={"compile": "background"}, extras=frozenset({"processor"})),
    "auto": Table(blocks={"auto": True}),
    "tight": Table(("--max-running-requests", "6"), kinds=("plain", "rows", "place"), pool=700),
}


def write_model(folder: Path) -> Path:
    """A tiny Llama with a byte-level tokenizer."""
    from transformers import PreTrainedTokenizerFast

    TinyModel("llama").write(folder)
    PreTrainedTokenizerFast(
        tokenizer_object=_tokenizer(), unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = "etaoinshrdlucmfw"
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    pairs = [(a, b) for a in letters for b in letters][: VOCAB - FIRST_BYTE - len(bytes_)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *(a + b for a, b in pairs)]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=pairs, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer
