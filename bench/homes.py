"""What homes are compiled behind: the configurations that `bench quality` compares, and what their server saw before.

alone       nothing: the block only
leading     the text in front of the first block
library-N   that and N other documents of the same kind, which no measured prompt holds
prompt-N    that and N documents that came before in one prompt with the measured ones, in another order
text        that and a text about nothing, of the length of two documents
harvest     whatever stood in front of the block in an exact prompt of the same documents, in another order
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from contexts import Context

from sglang_blockreuse.config import BlocksConfig
from sglang_blockreuse.demo.prompts import Prompt

TEXT = (
    (
        "General notes\n\nThis collection was put together over many years. Its parts are of different age and length. "
        "Some were written down at once, others from memory. Names, places and figures are given where they are known. "
    )
    + "Readers who look for something will find it by its title, and what is not found here was never written. "
    * 20
)


@dataclass(frozen=True)
class Homes:
    """One way to compile homes.

    seen: what the server is asked before a context, so that it knows documents already.
    """

    name: str
    blocks: Mapping[str, Any] = field(default_factory=dict)  # keys of the `blocks` section
    seen: Literal["nothing", "library", "prompt"] = "nothing"

    @property
    def has_first(self) -> bool:
        """Whether the block that follows the leading text is read at a home, too; it is an exact prefix otherwise."""
        return self.name != "leading"

    def earlier(self, context: Context) -> Prompt | None:
        """The prompt that is sent before the context's own."""
        if self.seen == "library":
            return context.library
        return reordered(context.prompt) if self.seen == "prompt" else None


def _made() -> list[Homes]:
    counts = (1, 2, 4)
    return [
        Homes("alone", {"compile_prefix": "none", "company": 0}),
        Homes("leading", {"company": 0}),
        *(Homes(f"library-{n}", {"company": n}, "library") for n in counts),
        *(Homes(f"prompt-{n}", {"company": n}, "prompt") for n in counts),
        Homes("text", {"company": TEXT}),
        Homes("harvest", {"compile": "harvest"}, "prompt"),
    ]


HOMES = {homes.name: homes for homes in _made()}
ALONE = HOMES["alone"]


def configured(blocks: Mapping[str, Any]) -> Homes:
    """What a server with these keys of the `blocks` section does with documents that return in other orders."""
    company = blocks.get("company", BlocksConfig().company)
    if isinstance(company, str):
        return Homes("text", blocks)
    return Homes(f"prompt-{company}", blocks, "prompt") if company else Homes("leading", blocks)


def reordered(prompt: Prompt) -> Prompt:
    """The same prompt, its blocks from the last to the first."""
    edges = list(zip(prompt.spans[::2], prompt.spans[1::2], strict=True))
    tokens, spans = list(prompt.input_ids[: edges[0][0]]), []
    for start, end in reversed(edges):
        spans += [len(tokens), len(tokens) + end - start]
        tokens += prompt.input_ids[start:end]
    tokens += prompt.input_ids[edges[-1][1] :]
    return Prompt(
        tuple(tokens), tuple(spans), tuple(reversed(prompt.documents)), prompt.question, prompt.answer
    )
