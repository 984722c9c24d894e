"""What a layer plan with `kv_from` means for requests: which of them can be served, and who may find their KV."""

from __future__ import annotations

from dataclasses import dataclass

from ..types import Mode
from .paths import PREFIX
from .request import RequestError


@dataclass(frozen=True, slots=True)
class SharedKv:
    """A layer plan with `kv_from`: layers that read another layer's KV, in prefill as in decode.

    Everything that such a server computes, homes among it, is valid under the plan and nowhere else.
    """

    plan: str  # name, for messages
    fingerprint: str
    trained: bool  # the checkpoint was trained with this sharing, so the plan is the model

    def extra_key(self, extra_key: str | None) -> str:
        """The namespace of the plan in place of a request's own, which it contains."""
        return f"{PREFIX}kv:{self.fingerprint[:16]}:{extra_key or ''}"

    def check_mode(self, mode: Mode) -> None:
        """Raises RequestError for a request that asks for what the model without the plan would compute."""
        if mode == "exact" and not self.trained:
            raise RequestError(
                f"blockreuse_mode is exact, but this server runs layer plan {self.plan}, whose layers share KV "
                "(kv_from) without a checkpoint that was trained for it: no KV on it is that of the unchanged model. "
                "Use off or reuse, or ask a server without the plan."
            )
