"""The replicas of one model that may take a request now, and who has which adapter: updated by the table,
read by policies.

Membership, room and sums are updated at each change, so that a pick among a thousand replicas, full or not,
costs as much as a pick among two.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import overload

from penstock.serve.fleet.replica import Replica, Tried


class IndexedSet(Sequence[Replica]):
    """Replicas in no order. `in`, `add`, `discard` and indexing take constant time."""

    __slots__ = ("_indexes", "_items")

    def __init__(self, items: Iterable[Replica] = ()) -> None:
        self._items = list(items)
        self._indexes = {item: index for index, item in enumerate(self._items)}

    def put(self, item: Replica, inside: bool) -> None:
        """Adds or discards it."""
        (self.add if inside else self.discard)(item)

    def add(self, item: Replica) -> None:
        if item not in self._indexes:
            self._indexes[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: Replica) -> None:
        """Moves the last item to the free index."""
        index = self._indexes.pop(item, None)
        if index is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[index] = last
            self._indexes[last] = index

    @overload
    def __getitem__(self, index: int) -> Replica: ...
    @overload
    def __getitem__(self, index: slice) -> list[Replica]: ...
    def __getitem__(self, index: int | slice) -> Replica | list[Replica]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._indexes


_NONE = IndexedSet()


class AdapterIndex:
    """Which replicas of one model have which adapter. Changes and look-ups take constant time.

    A replica counts as having an adapter if it has reported it, and while a request for that adapter is open
    there: it is loading it, and the next request for it should go there, too.
    """

    __slots__ = ("_by_adapter", "_loaded", "_uses", "loads")

    def __init__(self) -> None:
        self._by_adapter: dict[str, IndexedSet] = {}
        self._loaded: dict[Replica, frozenset[str]] = {}
        self._uses: defaultdict[Replica, Counter[str]] = defaultdict(Counter)
        """How often each has an adapter: once for its report, and for each open request."""
        self.loads = 0
        """How many loads were reported while this gateway was connected."""

    def of(self, adapter: str) -> Sequence[Replica]:
        """Replicas that have it, in no order; `in` takes constant time."""
        return self._by_adapter.get(adapter, _NONE)

    def count(self, replica: Replica) -> int:
        """How many adapters it has."""
        return len(self._uses.get(replica, ()))

    @property
    def loaded_count(self) -> int:
        """Adapters loaded in all replicas together."""
        return sum(map(len, self._loaded.values()))

    def hello(self, replica: Replica) -> None:
        """Forgets its loaded adapters; its next report lists them."""
        for adapter in self._loaded.pop(replica, ()):
            self.end_use(replica, adapter)

    def report(self, replica: Replica, loaded: Iterable[str]) -> None:
        """All adapters that it has loaded."""
        now, before = frozenset(loaded), self._loaded.get(replica)
        if before is not None:
            self.loads += len(now - before)
        self._loaded[replica] = now
        for adapter in now.difference(before or ()):
            self.add_use(replica, adapter)
        for adapter in (before or now) - now:
            self.end_use(replica, adapter)

    def add_use(self, replica: Replica, adapter: str) -> None:
        """It has loaded the adapter, or a request for it was sent there."""
        self._uses[replica][adapter] += 1
        self._by_adapter.setdefault(adapter, IndexedSet()).add(replica)

    def end_use(self, replica: Replica, adapter: str) -> None:
        """It has the adapter no longer, or the request has ended."""
        uses = self._uses.get(replica)
        if uses is None:
            return  # it has left
        uses[adapter] -= 1
        if not uses[adapter]:
            del uses[adapter]
            self._discard(replica, adapter)

    def forget(self, replica: Replica) -> None:
        """It has left."""
        self._loaded.pop(replica, None)
        for adapter in self._uses.pop(replica, ()):
            self._discard(replica, adapter)

    def _discard(self, replica: Replica, adapter: str) -> None:
        holders = self._by_adapter[adapter]
        holders.discard(replica)
        if not holders:
            del self._by_adapter[adapter]


class Candidates(IndexedSet):
    """Ready replicas with room, in no order; `in` takes constant time.

    members: every replica of the model in Serve's order, ready or not; a new tuple after each change.
    ready: the number of ready ones, including full ones; busy: the requests in all of these; elsewhere: those
    of them from other gateways. holders: which members have which adapter; adapter_slots: how many adapters
    one of them can load.
    """

    __slots__ = ("adapter_slots", "busy", "elsewhere", "holders", "members", "ready")

    def __init__(self, replicas: Iterable[Replica] = ()) -> None:
        super().__init__(replicas)
        self.members: tuple[Replica, ...] = ()
        self.ready = self.busy = self.elsewhere = self.adapter_slots = 0
        self.holders = AdapterIndex()

    def without(self, tried: Tried) -> Candidates:
        """A copy without these."""
        return Candidates(replica for replica in self if replica not in tried).like(self)

    def like(self, other: Candidates) -> Candidates:
        """Itself, with what `other` knows of the model beside its replicas."""
        self.members, self.ready, self.busy = other.members, other.ready, other.busy
        self.elsewhere, self.holders, self.adapter_slots = other.elsewhere, other.holders, other.adapter_slots
        return self
