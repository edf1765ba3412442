"""Which replicas have which adapter: updated by the table, read by policies.

A replica counts as having an adapter if it has reported it, and while a request for that adapter is open
there: it is loading it, and the next request for it should go there, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.serve.fleet.indexed_set import IndexedSet
from penstock.serve.fleet.replica import Replica

_NONE: IndexedSet[Replica] = IndexedSet()


class AdapterIndex:
    """Of one model. Changes and look-ups take constant time."""

    __slots__ = ("_by_adapter", "_counts", "_loaded", "_requests", "loads")

    def __init__(self) -> None:
        self._by_adapter: dict[str, IndexedSet[Replica]] = {}
        self._loaded: dict[Replica, frozenset[str]] = {}
        self._requests: dict[Replica, Counter[str]] = {}
        self._counts: Counter[Replica] = Counter()
        self.loads = 0
        """How many loads were reported while this gateway was connected."""

    def of(self, adapter: str) -> Sequence[Replica]:
        """Replicas that have it, in no order; `in` takes constant time."""
        return self._by_adapter.get(adapter, _NONE)

    def count(self, replica: Replica) -> int:
        """How many adapters it has."""
        return self._counts[replica]

    @property
    def loaded_count(self) -> int:
        """Adapters loaded in all replicas together."""
        return sum(map(len, self._loaded.values()))

    def hello(self, replica: Replica) -> None:
        """Forgets its loaded adapters; its next report lists them."""
        for adapter in self._loaded.pop(replica, ()):
            self._settle(replica, adapter)

    def report(self, replica: Replica, loaded: Iterable[str]) -> None:
        """All adapters that it has loaded."""
        now, before = frozenset(loaded), self._loaded.get(replica)
        self._loaded[replica] = now
        if before is None:
            before = frozenset[str]()
        else:
            self.loads += len(now - before)
        for adapter in before ^ now:
            self._settle(replica, adapter)

    def request_sent(self, replica: Replica, adapter: str) -> None:
        """A request for the adapter was sent there."""
        self._requests.setdefault(replica, Counter())[adapter] += 1
        self._settle(replica, adapter)

    def request_ended(self, replica: Replica, adapter: str) -> None:
        """The request has ended."""
        requests = self._requests.get(replica)
        if requests is None:
            return
        requests[adapter] -= 1
        if not requests[adapter]:
            del requests[adapter]
            self._settle(replica, adapter)

    def forget(self, replica: Replica) -> None:
        """It has left."""
        for adapter in {*self._loaded.pop(replica, ()), *self._requests.pop(replica, ())}:
            self._settle(replica, adapter)
        del self._counts[replica]

    def _settle(self, replica: Replica, adapter: str) -> None:
        has = adapter in self._loaded.get(replica, ()) or adapter in self._requests.get(replica, ())
        holders = self._by_adapter.get(adapter, _NONE)
        if has and replica not in holders:
            self._by_adapter.setdefault(adapter, IndexedSet()).add(replica)
            self._counts[replica] += 1
        elif not has and replica in holders:
            holders.discard(replica)
            self._counts[replica] -= 1
            if not holders:
                del self._by_adapter[adapter]
