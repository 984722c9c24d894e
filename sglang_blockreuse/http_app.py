"""The HTTP application of tokenizer worker processes (`--tokenizer-worker-num` above 1).

SGLang starts these workers from an import path and loads no plug-ins in them; this is the path we give it.
"""

from __future__ import annotations

from sglang.srt.plugins import load_plugins

from .host import install_tokenizer_hooks

load_plugins()
install_tokenizer_hooks()

from sglang.srt.entrypoints.http_server import app  # noqa: E402  hooks first, so that nothing binds the originals

__all__ = ["app"]
