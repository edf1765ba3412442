"""Which replicas have seen which block: bounded in entries, forgetting what was not used for a while.

Two generations, the young and the old. What is sent goes into the young one; when that is full or has its
age, it becomes the old one, and what was old is forgotten. No list to keep in order, no clock per entry.
"""

from __future__ import annotations

from bisect import bisect_left

from penstock.serve.table import Replica

ENTRIES = 2**17
"""Blocks of one model, in one gateway: 25 MB when full. A prompt of 4 KB has 16, of 100 KB 53."""

EXPIRY_S = 1800.0
"""A block unused for so long is forgotten, some after half of it: engines evict by need, not by age, but what
nobody asked for in half an hour has mostly been evicted."""

_HOLDERS = 32
"""Replicas known for one block, the latest first: to spread a hot prefix over more, chance does as well."""

Holders = tuple[Replica, ...]


class Memory:
    """Blocks are known by their hash."""

    def __init__(self, entries: int = ENTRIES, expiry_s: float = EXPIRY_S) -> None:
        self._most, self._age_s = entries // 2, expiry_s / 2
        self._young: dict[int, Holders] = {}
        self._old: dict[int, Holders] = {}
        self._dying: dict[int, Holders] = {}
        self._born: float | None = None

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    def known(self, blocks: tuple[int, ...]) -> int:
        """How many of a prompt's blocks: who has seen one has seen all before it."""
        return bisect_left(blocks, True, key=self._missing)

    def _missing(self, block: int) -> bool:
        return block not in self._young and block not in self._old

    def holders(self, block: int) -> Holders:
        """Replicas that were sent the block, the latest first."""
        young, old = self._young.get(block, ()), self._old.get(block, ())
        if not old or old is young:
            return young
        return young + tuple(replica for replica in old if replica not in young) if young else old

    def add(self, blocks: tuple[int, ...], replica: Replica, now: float) -> None:
        """`replica` has these now."""
        self.age(now)
        young = self._young
        before: Holders | None = None
        after: Holders = ()
        for block in blocks:
            known = young.get(block, ())
            if known is not before:  # neighbours mostly have the same holders, and share one tuple
                before = known
                after = known if replica in known else (replica, *known[: _HOLDERS - 1])
            if after is not known:
                young[block] = after
        for _ in range(min(len(self._dying), 2 * len(blocks))):
            self._dying.popitem()  # little by little: half a generation at once would stop the loop for ms

    def age(self, now: float) -> None:
        """Turns the generations when it is time."""
        if self._born is None:
            self._born = now
        if len(self._young) >= self._most or now - self._born >= self._age_s:
            self._dying, self._old, self._young = self._old, self._young, {}
            self._born = now
