"""The one configuration file: strict YAML or JSON, read at start-up, logged once resolved."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

import msgspec

from .errors import clipped, short

CONFIG_ENV = "SGLANG_BLOCKREUSE_CONFIG"

POLICIES = ("seam", "head", "deviation", "query", "head+query", "random")


class ConfigError(ValueError):
    """The configuration cannot be used; the message names file, key, value, rule and fix."""


class BlocksConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Document blocks."""

    policy: str = "seam"  # which positions of a reused block are recomputed
    tau: int | None = None  # tokens repaired on each side of a seam; null: spend `budget` evenly
    # what may be repaired: a share of the tokens up to the end of the last block, exact prefix included, or from 32
    # on a number of tokens; used when tau is null
    budget: float = 0.05
    # how unseen blocks become reusable, see blocks/compile.py
    compile: Literal["before", "background", "manual", "off", "harvest"] = "before"
    # auto: the text before the first block, or the model's BOS where a block stands at position 0
    compile_prefix: Literal["auto", "leading", "bos", "none"] = "auto"
    compile_prefix_text: str | None = None  # one neutral text for all requests, in place of compile_prefix
    # how many other documents stand between compile prefix and block in a home, or a text of your own in their place
    company: int | str = 2
    separator: str | None = None  # text that stands between documents; cut out of the prompt
    parts: bool = False  # text parts of a chat message with at least two of them are blocks
    auto: bool = False  # find blocks in unmarked prompts: what was served exactly before
    alpha: float = 0.0  # logit term on local keys
    beta: float = 0.0  # logit term on false sinks
    num_true_sinks: int = 4  # leading tokens of a block that count as sinks
    # bound on what `blocks/guard.py` measures for `policy`, above which more is repaired; null: no guard
    guard: float | None = None
    min_block_tokens: int = 32  # shorter blocks are computed, which costs less than looking them up


class LayersConfig(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Layer plans."""

    plan: str | None = None  # name of a shipped plan or path of a plan file
    timing: bool = False  # count seconds of decode steps by part and role of the layer


class Config(msgspec.Struct, forbid_unknown_fields=True, frozen=True, kw_only=True):
    """Root of the file; every key has a default, so an empty file is valid."""

    blocks: BlocksConfig = msgspec.field(default_factory=BlocksConfig)
    layers: LayersConfig = msgspec.field(default_factory=LayersConfig)
    kernels: Literal["auto", "reference", "triton", "flashinfer"] = "auto"
    strict: bool = True  # stop at start-up where block reuse cannot work; false: serve without it

    def describe(self) -> str:
        """One line of JSON, for the log."""
        return msgspec.json.encode(self).decode()


KEYS = BlocksConfig.__struct_fields__
MAX_TOKENS = 2**31 - 1  # of what counts tokens; a position is an int32
# Between 1 and this a budget is refused: whoever writes 5 means percent.
MIN_BUDGET_TOKENS = 32
MAX_COMPANIONS = 8
BUDGET_RULE = f"a share from 0 to 1, or a whole number of tokens from {MIN_BUDGET_TOKENS} on"


def is_budget(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return 0 <= value <= 1 or (MIN_BUDGET_TOKENS <= value <= MAX_TOKENS and value == int(value))


def load_config(path: str | os.PathLike[str] | None, *, layer_plan: str | None = None) -> Config:
    """Read `path`, else the file named by SGLANG_BLOCKREUSE_CONFIG, else the defaults.

    `layer_plan` (the command line) wins over the file's `layers.plan`.
    Raises ConfigError.
    """
    source = str(path) if path else os.environ.get(CONFIG_ENV)
    config = _read(Path(source)) if source else Config()
    if layer_plan is not None:
        layers = msgspec.structs.replace(config.layers, plan=layer_plan)
        config = msgspec.structs.replace(config, layers=layers)
    _check(config, source or "defaults")
    return config


def _read(path: Path) -> Config:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{path}: the blockreuse configuration cannot be read ({error.strerror}). "
            f"Give --blockreuse-config or {CONFIG_ENV} the path of a YAML or JSON file."
        ) from None
    if not raw.strip():
        return Config()
    try:
        # JSON is a subset of YAML, so one decoder reads both
        return msgspec.yaml.decode(raw, type=Config)
    except msgspec.ValidationError as error:
        # keys are named where a key is wrong; a value of the wrong type is told by msgspec, with its place
        keys = f"Allowed keys: blocks {{{', '.join(KEYS)}}}, layers {{plan, timing}}, kernels, strict."
        budget = f"A budget must be {BUDGET_RULE}." if "blocks.budget" in str(error) else ""
        fix = keys if "unknown field" in str(error) else budget or "Write a value of that type."
        raise ConfigError(f"{path}: {clipped(error)}. {fix}") from None
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path}: neither YAML nor JSON: {clipped(error)}. Mend the file at that place."
        ) from None


def _check(config: Config, source: str) -> None:
    blocks = config.blocks

    def fail(key: str, value: object, rule: str, fix: str) -> None:
        raise ConfigError(f"{source}: blocks.{key} is {short(value)}, but {rule}. {fix}")

    if blocks.policy not in POLICIES:
        fail("policy", blocks.policy, f"it must be one of {', '.join(POLICIES)}", "Use seam.")
    if blocks.tau is not None and blocks.tau < 0:
        fail("tau", blocks.tau, "it counts tokens and cannot be negative", "Use 0 or more, or null.")
    if not is_budget(blocks.budget):
        fail("budget", blocks.budget, f"it must be {BUDGET_RULE}", "Use 0.05 for five percent.")
    if blocks.guard is not None and not (math.isfinite(blocks.guard) and blocks.guard > 0):
        fail("guard", blocks.guard, "it is a bound above 0", "Use null for no guard.")
    if blocks.min_block_tokens < 1:
        fail("min_block_tokens", blocks.min_block_tokens, "a block has at least one token", "Use 1 or more.")
    if blocks.num_true_sinks < 0:
        fail("num_true_sinks", blocks.num_true_sinks, "it counts tokens", "Use 0 or more.")
    if blocks.separator is not None and (
        not blocks.separator or blocks.separator != blocks.separator.strip()
    ):
        fail(
            "separator",
            blocks.separator,
            "it must hold text and neither begin nor end with white space, which chat templates trim away",
            "Use a text that no document holds, for example '<<<document>>>'.",
        )
    if blocks.compile_prefix_text is not None and not blocks.compile_prefix_text:
        fail("compile_prefix_text", "", "an empty text is no prefix", "Use compile_prefix: none.")
    if blocks.compile_prefix_text is not None and blocks.compile_prefix != "auto":
        fail(
            "compile_prefix",
            blocks.compile_prefix,
            "compile_prefix_text decides what stands in front of homes",
            "Leave one of the two keys out.",
        )
    if isinstance(blocks.company, int) and not 0 <= blocks.company <= MAX_COMPANIONS:
        fail(
            "company",
            blocks.company,
            f"it counts documents, from 0 to {MAX_COMPANIONS}",
            "Use 2, 0 for none, or a text of your own.",
        )
    if blocks.company == "":
        fail("company", "", "an empty text is no company", "Use 0.")
    for key in ("alpha", "beta"):
        value = getattr(blocks, key)
        if not math.isfinite(value) or value > 0:
            fail(
                key,
                value,
                "it takes weight away from unrepaired keys: finite and not above 0",
                "Use 0 for off.",
            )
