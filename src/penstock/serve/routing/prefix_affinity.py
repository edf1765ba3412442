"""To the replica that has most of the prompt in its cache, unless the work before it outweighs that.

The engine's cache is not asked: what was sent where is remembered, as hashes of the prompt's beginnings. What
was never sent goes to the less loaded of two which the prompt's own hash draws, so that gateways which do not
talk to each other send a prompt to the same two, and prompts that share nothing spread as by dice.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

from penstock.serve.candidates import Candidates
from penstock.serve.routing.asked import Asked, Pick
from penstock.serve.routing.balance import share, two
from penstock.serve.routing.blocks import BYTES_PER_TOKEN, ENDS
from penstock.serve.routing.memory import ENTRIES, EXPIRY_S, Holders, Memory
from penstock.serve.routing.ring import Ring
from penstock.serve.table import Replica

_WEIGHED = 8  # holders at one pick
_LEVELS = 3  # sets of holders at one pick, from the longest match on

_TOKENS = tuple(end // BYTES_PER_TOKEN for end in ENDS)


class PrefixAffinity:
    """The least of: prompt tokens to compute anew, and the work that already waits there."""

    reads = ("prompt",)

    def __init__(self, entries: int = ENTRIES, expiry_s: float = EXPIRY_S) -> None:
        self.memory = Memory(entries, expiry_s)
        self._ring = Ring()

    def pick(self, asked: Asked, candidates: Candidates, now: float) -> Pick | None:
        if not candidates:
            return None
        self.memory.follow(candidates.members)
        best, least, longest, most = None, 0, 0, share(candidates)
        for replica, tokens in self._known(asked.blocks, candidates):
            longest = max(longest, tokens)
            if replica.busy + 1 <= most:
                cost = replica.load_tokens - tokens
                if best is None or cost < least:
                    best, least = replica, cost
        other = self._other(asked, candidates, longest, most)
        if best is not None and least <= other.load_tokens:
            return Pick(best, "affinity")
        return Pick(other)

    def sent(self, asked: Asked, replica: Replica, now: float) -> None:
        """Remembers."""
        if asked.blocks:
            self.memory.add(asked.blocks, asked.tokens, replica, now)

    def _known(self, blocks: tuple[int, ...], candidates: Candidates) -> Iterator[tuple[Replica, int]]:
        """Replicas with a part of the prompt, and how much; the longest first, each with its longest."""
        seen: Holders = ()
        weighed = levels = 0
        for i in range(self.memory.known(blocks) - 1, -1, -1):
            holders = self.memory.holders(blocks[i])
            if holders == seen:
                continue
            for replica in _some(holders):
                if replica in candidates and replica not in seen:
                    yield replica, _TOKENS[i]
                    weighed += 1
            seen, levels = holders, levels + 1
            if weighed >= _WEIGHED or levels >= _LEVELS:
                return

    def _other(self, asked: Asked, candidates: Candidates, longest: int, most: float) -> Replica:
        """The less loaded of two that chance draws; where little of the prompt is known, its own hash."""
        first, second = two(candidates)
        if asked.home and 2 * longest < asked.tokens:
            self._ring.follow(candidates.members)
            drawn = [r for r in self._ring.after(asked.home, 2) if r in candidates and r.busy + 1 <= most]
            if len(drawn) == 2:
                first, second = drawn
        return second if second.load_tokens < first.load_tokens else first


def _some(holders: Holders) -> Holders:
    """A few neighbours from a random place on, where there are many."""
    if len(holders) <= _WEIGHED:
        return holders
    start = int(random.random() * len(holders))
    return (holders[start:] + holders[:start])[:_WEIGHED]
