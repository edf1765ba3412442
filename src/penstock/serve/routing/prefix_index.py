"""What each replica probably still caches: bounded in entries, evicting as engines do.

One LRU list of blocks for each replica. An engine evicts the least recently used blocks when its KV cache is
full; so does the list when it holds as many tokens as that cache. Of one prompt the end is evicted before the
start: a replica that has a block has all blocks before it.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise

from penstock.serve.fleet.replica import Replica
from penstock.serve.routing.prefix_hashes import ENDS
from penstock.transport.link import BYTES_PER_TOKEN

ENTRIES = 2**18
"""Blocks of all replicas of a model, in one gateway: 80 MB when full. 4 KB of prompt are 16, 100 KB 53."""

EXPIRY_S = 1800.0
"""Blocks unused for so long expire: a cache may also be reset on request."""

KV_TOKENS = 200_000
"""For a replica that has not reported the size of its cache."""

_ANSWER_TOKENS = 100  # about; answers take their place, too
_FEWEST = 64
_HALF_LIFE_S = 60.0  # of new tokens: as long as a busy replica takes to fill its cache

UP_TO = (0, *(end // BYTES_PER_TOKEN for end in ENDS))
"""Tokens in so many blocks together."""

_TOKENS = tuple(after - before for before, after in pairwise(UP_TO))

Holders = tuple[Replica, ...]


class _Cache:
    """One replica's blocks with their tokens and when they were used, the least recently used first."""

    __slots__ = ("blocks", "cut_at", "new", "new_at", "tokens")

    def __init__(self) -> None:
        self.blocks: OrderedDict[int, tuple[int, float]] = OrderedDict()
        self.tokens = 0
        self.cut_at = -math.inf
        self.new = self.new_at = 0.0

    def put(self, tokens: int, now: float) -> None:
        """Adds new tokens."""
        self.tokens += tokens
        self.new = tokens + self.new_lately(now)
        self.new_at = now

    def new_lately(self, now: float) -> float:
        """New tokens; one added `_HALF_LIFE_S` ago counts half."""
        return self.new * 0.5 ** ((now - self.new_at) / _HALF_LIFE_S)


class PrefixIndex:
    """Blocks are known by their hash."""

    def __init__(
        self, most_tokens: float = math.inf, cut_to_tokens: float = 0.0, cut_every_s: float = 0.0
    ) -> None:
        """most_tokens, cut_to_tokens: of each replica, below the size of its cache."""
        self._most_tokens, self._cut_to_tokens = most_tokens, cut_to_tokens
        self._cut_every_s = cut_every_s
        self._members: Sequence[Replica] = ()
        self._caches: dict[Replica, _Cache] = {}
        self._holders: dict[int, Holders] = {}
        self._starts: dict[int, int] = {}
        self._number = 0

    def __len__(self) -> int:
        return sum(len(cache.blocks) for cache in self._caches.values())

    def follow(self, members: Sequence[Replica]) -> None:
        """Removes replicas that are gone. Does nothing when given the same sequence as last time."""
        if members is not self._members:
            self._members = members
            for replica in set(self._caches).difference(members):
                self._shrink(replica, self._caches.pop(replica), 0, 0)

    def known(self, blocks: tuple[int, ...]) -> int:
        """How many of a prompt's blocks it has."""
        return bisect_left(blocks, True, key=lambda block: block not in self._holders)

    def holders(self, block: int) -> Holders:
        """Replicas that have the block, the latest first."""
        return self._holders.get(block, ())

    def new_tokens(self, replica: Replica, now: float) -> float:
        """Tokens that its cache did not have, with a half-life of a minute: how fast it fills."""
        cache = self._caches.get(replica)
        return cache.new_lately(now) if cache else 0.0

    def starts(self, block: int) -> int:
        """Prompts that had nothing more in common with earlier ones, since a replica last computed it."""
        return self._starts.get(block, 0)

    def add(self, blocks: tuple[int, ...], tokens: int, replica: Replica, now: float) -> None:
        """`replica` was sent a prompt of so many tokens that begins with these."""
        cache = self._caches.get(replica)
        if cache is None:
            cache = self._caches[replica] = _Cache()
        if depth := self.known(blocks):
            block = blocks[depth - 1]
            self._starts[block] = self._starts.get(block, 0) + 1 if replica in self._holders[block] else 0
        self._put(cache, blocks, tokens, replica, now)
        while next(iter(cache.blocks.values()))[1] < now - EXPIRY_S:
            self._forget(replica, cache)
        entries = max(_FEWEST, ENTRIES // len(self._caches))
        self._shrink(replica, cache, replica.kv_tokens or KV_TOKENS, entries)
        if cache.tokens > self._most_tokens and now >= cache.cut_at + self._cut_every_s:
            cache.cut_at = now
            self._shrink(replica, cache, self._cut_to_tokens, entries)

    def _put(self, cache: _Cache, blocks: tuple[int, ...], tokens: int, replica: Replica, now: float) -> None:
        used, holders = cache.blocks, self._holders
        self._number += 1  # unique id for a block that no other prompt can share
        rest = max(0, tokens - UP_TO[len(blocks)]) + _ANSWER_TOKENS
        used[self._number] = rest, now
        new = rest
        before: Holders | None = None
        after: Holders = ()
        for index in range(len(blocks) - 1, -1, -1):
            block = blocks[index]
            if block in used:
                used.move_to_end(block)
            else:
                new += _TOKENS[index]
                known = holders.get(block, ())
                if known is not before:  # neighbours mostly have the same holders, and share one tuple
                    before, after = known, (replica, *known)
                holders[block] = after
            used[block] = _TOKENS[index], now
        cache.put(new, now)

    def _shrink(self, replica: Replica, cache: _Cache, tokens: float, entries: int) -> None:
        while cache.tokens > tokens or len(cache.blocks) > entries:
            self._forget(replica, cache)

    def _forget(self, replica: Replica, cache: _Cache) -> None:
        """The least recently used block."""
        block, (tokens, _) = cache.blocks.popitem(last=False)
        cache.tokens -= tokens
        known = self._holders.get(block, ())
        if known == (replica,):
            del self._holders[block]
            self._starts.pop(block, None)
        elif replica in known:
            self._holders[block] = tuple([other for other in known if other is not replica])
