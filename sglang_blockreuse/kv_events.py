"""What of the tree is advertised in `--kv-events-config`: KV that anybody may use who has the tokens before it.

A router takes an announced chain for a prefix. A local path is none: it is a stretch from the middle of a prompt, and
what stood before it, the policy and the plan are in its namespace, which no event carries. So the namespaces of ours
are kept to ourselves, when they are stored as when they are removed. Homes and whatever else is exact stand in the
namespaces of the host and are announced.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.events import KVCacheEventRecorder

from .blocks.paths import PREFIX

# The core whose recorder sees nodes. The other one makes its events beyond Python, where no plug-in reaches.
TREE_CORE = "python"


class ExactEvents(KVCacheEventRecorder):
    """The host's recorder, blind for our namespaces."""

    def record_store(self, node: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(node):
            super().record_store(node, *args, **kwargs)

    def record_remove(self, node: Any, *args: Any, **kwargs: Any) -> None:
        if not _is_ours(node):
            super().record_remove(node, *args, **kwargs)


def exact_events(recorder: KVCacheEventRecorder) -> ExactEvents:
    """In place of the recorder of an empty tree."""
    return ExactEvents(
        enabled=recorder.enabled,
        page_size=recorder.page_size,
        dynamo_format=recorder.dynamo_format,
        lora_names=recorder.lora_names,
    )


def _is_ours(node: Any) -> bool:
    return (node.key.extra_key or "").startswith(PREFIX)
