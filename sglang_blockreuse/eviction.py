"""In which order the tree gives KV up: what is speculative first.

Every reusing request leaves a local path, a copy of most of its prompt that only the same prompt or its next turn can
use, as the newest nodes of the tree. In the order of last use homes that the last few requests did not need would
leave before paths that nobody ever asks for. So a path stands behind everything else until somebody asked for it, and
from then on like any other KV.

The host ranks nodes by numbers in one policy, `priority`, and breaks ties by last use. That policy serves for `lru`
too, with one rank for all exact KV: the order among it is that of `lru`.
"""

from __future__ import annotations

# Rank of a local path that nobody asked for; below every priority that a request may have.
SPECULATIVE = -(2**62)


class Order:
    """How ranks are given under the server's `--radix-eviction-policy`.

    policy: what the host's tree is to be built with.
    Under policies that look at neither ranks nor last use alone a path is ranked like other KV that was used once.
    """

    def __init__(self, policy: str) -> None:
        self._asked = policy.lower()
        self.policy = "priority" if self._asked == "lru" else policy

    def rank(self, priority: int | None) -> int:
        """Rank of KV that a request of this priority inserts; a rank that is given already stays."""
        priority = priority or 0
        return priority if priority == SPECULATIVE or self._asked != "lru" else 0
