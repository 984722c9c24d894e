"""The client behind `sglang-blockreuse explain-request`: sends one request and shows where each token came from."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from .errors import short

TIMEOUT_S = 600.0
# What stands in front of the pieces, by the policy that chose those that were repaired.
WHY = {
    "seam": "repaired: both edges of every document, where it met other neighbours at home",
    "head": "repaired: the first tokens of every document, which lack what stands before them here",
    "query": "repaired: the tokens of which the question takes up most",
    "head+query": "repaired: the first tokens of every document, and those of which the question takes up most",
    "deviation": "repaired: the tokens whose keys changed most when they were computed here",
    "random": "repaired: tokens drawn at random",
}
# kind -> (style of the terminal, style of the page)
STYLES = {
    "prefix": ("dim", "color:#888"),
    "reused": ("", ""),
    "repaired": ("bold white on red", "background:#f6b8b8;font-weight:bold"),
    "fresh": ("green", "color:#187a18"),
}
LEGEND = {
    "prefix": "exact, from the cache",
    "reused": "taken over from the document's home",
    "repaired": "computed again inside a known document",
    "fresh": "computed, because no cache had it",
}


class ExplainError(RuntimeError):
    """The request cannot be explained; the message says what, why and what to do."""


@dataclass(frozen=True)
class Piece:
    """Some tokens of the prompt that came to be in the same way."""

    start: int
    end: int
    kind: str  # a key of STYLES
    block: int  # index of the marked document; -1 outside of all
    text: str

    def __len__(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class Explained:
    usage: dict[str, Any]
    pieces: tuple[Piece, ...]

    def summary(self) -> str:
        """One line: how much of each kind, and why what was repaired was chosen, or why nothing was reused."""
        counts = ", ".join(f"{self.usage[f'{kind}_tokens']} {kind}" for kind in STYLES)
        reason = self.usage["skipped_reason"]
        why = WHY[self.usage["policy"]] if reason is None else f"nothing reused: {reason}"
        return f"{counts} tokens; {why}"

    def documents(self) -> Iterator[tuple[str, list[Piece]]]:
        """(heading, pieces) of every stretch inside one document or outside of all, in the order of the prompt."""
        at = 0
        while at < len(self.pieces):
            end = at
            while end < len(self.pieces) and self.pieces[end].block == self.pieces[at].block:
                end += 1
            pieces = list(self.pieces[at:end])
            yield heading(pieces), pieces
            at = end


def heading(pieces: Sequence[Piece]) -> str:
    """`document 3: 212 tokens, 11 repaired`."""
    name = "outside of documents" if pieces[0].block < 0 else f"document {pieces[0].block + 1}"
    counts = {kind: sum(len(p) for p in pieces if p.kind == kind) for kind in STYLES}
    parts = [f"{num} {kind}" for kind, num in counts.items() if num]
    return f"{name}: {sum(counts.values())} tokens, {', '.join(parts)}"


def read_body(path: Path) -> dict[str, Any]:
    """The request in a file. Raises ExplainError."""
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ExplainError(
            f"{path} cannot be read ({error.strerror}). Give the path of a JSON file."
        ) from None
    except ValueError as error:
        raise ExplainError(
            f"{path} is no JSON ({error}). Put the body of one request into it, as your client sends it."
        ) from None
    if not isinstance(body, dict) or not {"messages", "text", "input_ids"} & body.keys():
        raise ExplainError(
            f"{path} holds {short(body)}, but it must be the body of a request: messages, or text or input_ids."
        )
    return body


def explain(url: str, body: dict[str, Any], *, api_key: str | None = None) -> Explained:
    """Send the request to the server at `url` and have it say what became of its tokens. Raises ExplainError."""
    ask = {"blockreuse_explain": True}
    if "messages" in body:
        path = "/v1/chat/completions"
        params = {**(body.get("custom_params") or {}), **ask}
        sent = {**body, "custom_params": params, "return_meta_info": True}
    else:
        path = "/generate"
        sampling = body.get("sampling_params") or {}
        params = {**(sampling.get("custom_params") or {}), **ask}
        sent = {**body, "sampling_params": {**sampling, "custom_params": params}}
    sent |= {"stream": False, "return_prompt_token_ids": True}
    answer = _post(url, path, sent, api_key)
    if "messages" in body:
        answer = answer["choices"][0]
    found = answer["meta_info"].get("blockreuse")
    if not found:
        raise ExplainError(
            f"{url} says nothing of blocks. Start it with `sglang-blockreuse serve`, and send one request, not a batch."
        )
    usage = found[0]
    ids = answer.get("prompt_token_ids") or answer["meta_info"]["prompt_token_ids"]
    cut = usage.pop("pieces")
    tokens = [ids[start:end] for start, end, *_ in cut]
    texts = _post(url, "/v1/detokenize", {"tokens": tokens, "skip_special_tokens": False}, api_key)["text"]
    pieces = tuple(
        Piece(start, end, kind, block, text)
        for (start, end, kind, block), text in zip(cut, texts, strict=True)
    )
    return Explained(usage, pieces)


def _post(url: str, path: str, body: dict[str, Any], api_key: str | None) -> Any:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        response = requests.post(url + path, json=body, headers=headers, timeout=TIMEOUT_S)
    except requests.RequestException as error:
        raise ExplainError(
            f"{url} does not answer ({type(error).__name__}). Start the server, or mend --url."
        ) from None
    if not response.ok:
        raise ExplainError(f"{url}{path}: HTTP {response.status_code}: {response.text[:500]}")
    return response.json()


def page(found: Explained) -> str:
    """The same as an HTML page without scripts or other files."""
    parts = [
        "<!doctype html><meta charset='utf-8'><title>Where the tokens of a prompt came from</title>",
        "<body style='font-family:sans-serif;max-width:60em;margin:2em auto'>",
        f"<p>{html.escape(found.summary())}</p><p>",
        *(
            f"<span style='{STYLES[kind][1]}'>{kind}</span>: {html.escape(text)}<br>"
            for kind, text in LEGEND.items()
        ),
        "</p>",
    ]
    for title, pieces in found.documents():
        parts.append(f"<h4>{html.escape(title)}</h4><div style='white-space:pre-wrap'>")
        parts += [
            f"<span style='{STYLES[piece.kind][1]}' title='{piece.kind} {piece.start}–{piece.end - 1}'>"
            f"{html.escape(piece.text)}</span>"
            for piece in pieces
        ]
        parts.append("</div>")
    return "\n".join(parts) + "\n"
