"""The client behind `sglang-blockreuse compile`: reads documents, has the server tokenise and compile them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

TIMEOUT_S = 600.0


class WarmError(RuntimeError):
    """Documents could not be compiled; the message says what, why and what to do."""


@dataclass(frozen=True, slots=True)
class Options:
    url: str  # without a slash at its end
    files: tuple[Path, ...]
    prefix: str | None = None
    prefix_file: Path | None = None
    separator: str | None = None
    cache_salt: str | None = None
    extra_key: str | None = None
    api_key: str | None = None


@dataclass(frozen=True, slots=True)
class Compiled:
    """One line of the table."""

    document: str
    num_tokens: int
    num_compiled: int  # 0 where the server knew it, or refused it
    note: str


def warm(options: Options) -> list[Compiled]:
    """Compile every document of `options.files`, one request each; prints a table. Raises WarmError."""
    from tqdm import tqdm

    documents = read_documents(options.files, options.separator)
    prefix = options.prefix or ""
    if options.prefix_file is not None:
        prefix = read_text(options.prefix_file)
    client = _Client(options)
    client.check_server()
    # special tokens of the tokeniser stand in front of a prompt, hence in front of the prefix
    prefix_ids = client.tokenize(prefix, add_special_tokens=True) if prefix else []
    lines = [
        _compile(client, name, prefix_ids, text)
        for name, text in tqdm(documents, unit="document", disable=None)
    ]
    print_table(lines)
    return lines


def read_documents(files: Sequence[Path], separator: str | None) -> list[tuple[str, str]]:
    """(name, text) of every document that is not empty. Raises WarmError."""
    documents: list[tuple[str, str]] = []
    for path in files:
        text = read_text(path)
        pieces = [p for p in (text.split(separator) if separator else [text]) if p]
        if not pieces:
            raise WarmError(f"{path} holds no text. Leave it out.")
        documents += [
            (f"{path.name}[{i}]" if len(pieces) > 1 else path.name, piece) for i, piece in enumerate(pieces)
        ]
    return documents


def read_text(path: Path) -> str:
    try:
        # newline="": a document keeps the line ends that requests send
        with path.open(encoding="utf-8", newline="") as file:
            return file.read()
    except OSError as error:
        raise WarmError(f"{path} cannot be read ({error.strerror}). Give the path of a text file.") from None
    except UnicodeDecodeError as error:
        raise WarmError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}).") from None


def _compile(client: _Client, name: str, prefix_ids: list[int], text: str) -> Compiled:
    ids = client.tokenize(text, add_special_tokens=False)
    usage = client.compile(prefix_ids, ids)
    compiled, reason = usage["compiled_tokens"], usage["skipped_reason"]
    note = "compiled" if compiled else "known already"
    if reason != "mode_compile":
        note = f"not compiled: {reason}"
    return Compiled(name, len(ids), compiled, note)


def print_table(lines: Sequence[Compiled]) -> None:
    width = max(len("document"), *(len(line.document) for line in lines))
    print(f"{'document':<{width}}  {'tokens':>7}  {'compiled':>8}  note")
    for line in lines:
        print(f"{line.document:<{width}}  {line.num_tokens:>7}  {line.num_compiled:>8}  {line.note}")
    total, compiled = (sum(getattr(line, key) for line in lines) for key in ("num_tokens", "num_compiled"))
    print(f"{'':<{width}}  {total:>7}  {compiled:>8}")


class _Client:
    """The server at `options.url`, with errors in words."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self._session = requests.Session()
        if options.api_key:
            self._session.headers["Authorization"] = f"Bearer {options.api_key}"

    def check_server(self) -> None:
        """Raises WarmError where there is no server, or one without block reuse."""
        info = self._ask("GET", "/server_info")
        states = info.get("internal_states") if isinstance(info, dict) else None
        if not states or "blockreuse" not in states[0]:
            raise WarmError(
                f"{self._options.url} is no SGLang server with block reuse. Start one with `sglang-blockreuse serve`."
            )

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        answer = self._ask("POST", "/v1/tokenize", {"prompt": text, "add_special_tokens": add_special_tokens})
        tokens: list[int] = answer["tokens"]
        return tokens

    def compile(self, prefix_ids: list[int], ids: list[int]) -> dict[str, Any]:
        """The usage that the server reports."""
        options = self._options
        custom = {
            "blockreuse_mode": "compile",
            "blockreuse_spans": [len(prefix_ids), len(prefix_ids) + len(ids)],
        }
        body: dict[str, Any] = {
            "input_ids": prefix_ids + ids,
            "sampling_params": {"max_new_tokens": 1, "temperature": 0, "custom_params": custom},
        }
        names = {"cache_salt": options.cache_salt, "extra_key": options.extra_key}
        answer = self._ask("POST", "/generate", body | {k: v for k, v in names.items() if v is not None})
        usage: dict[str, Any] = answer["meta_info"]["blockreuse"][0]
        return usage

    def _ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            response = self._session.request(method, self._options.url + path, json=body, timeout=TIMEOUT_S)
        except requests.exceptions.InvalidURL as error:
            raise WarmError(f"--url {self._options.url} is no address ({error}).") from None
        except requests.RequestException as error:
            raise WarmError(
                f"{self._options.url} does not answer ({type(error).__name__}). Start the server, or mend --url."
            ) from None
        if response.status_code in (401, 403):
            raise WarmError(f"{self._options.url} wants another --api-key (HTTP {response.status_code}).")
        if response.status_code == 404:
            raise WarmError(f"{self._options.url} has no {path}; it is no SGLang server with block reuse.")
        if not response.ok:
            raise WarmError(f"{self._options.url}{path}: HTTP {response.status_code}: {response.text[:500]}")
        try:
            return response.json()
        except requests.JSONDecodeError:
            raise WarmError(
                f"{self._options.url}{path} did not answer in JSON; it is no SGLang server with block reuse."
            ) from None
