"""Which replicas have which adapter, kept by the table and read by policies.

A replica has an adapter when it has said so, and from the moment on in which we send it a request for the
adapter until that is answered: it is being loaded, and the next request had better go there, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from penstock.serve.fleet.indexed_set import IndexedSet
from penstock.serve.fleet.replica import Replica

_NOBODY: IndexedSet[Replica] = IndexedSet()


class AdapterIndex:
    """Of one model. Every change and every question takes the same time, however many there are."""

    __slots__ = ("_asked", "_by_adapter", "_counts", "_loaded", "loads")

    def __init__(self) -> None:
        self._by_adapter: dict[str, IndexedSet[Replica]] = {}
        self._loaded: dict[Replica, frozenset[str]] = {}
        self._asked: dict[Replica, Counter[str]] = {}
        self._counts: Counter[Replica] = Counter()
        self.loads = 0
        """How often one was loaded, as far as we were there to hear of it."""

    def of(self, adapter: str) -> Sequence[Replica]:
        """Replicas that have it, in no order; `in` takes no search."""
        return self._by_adapter.get(adapter, _NOBODY)

    def count(self, replica: Replica) -> int:
        """How many adapters it has."""
        return self._counts[replica]

    @property
    def loaded_count(self) -> int:
        """Adapters loaded in all replicas together."""
        return sum(map(len, self._loaded.values()))

    def hello(self, replica: Replica) -> None:
        """What it has loaded is not known, and will be said."""
        for adapter in self._loaded.pop(replica, ()):
            self._settle(replica, adapter)

    def report(self, replica: Replica, loaded: Iterable[str]) -> None:
        """All that it has loaded."""
        now, before = frozenset(loaded), self._loaded.get(replica)
        self._loaded[replica] = now
        if before is None:
            before = frozenset[str]()
        else:
            self.loads += len(now - before)
        for adapter in before ^ now:
            self._settle(replica, adapter)

    def ask(self, replica: Replica, adapter: str) -> None:
        """A request for the adapter is sent there."""
        self._asked.setdefault(replica, Counter())[adapter] += 1
        self._settle(replica, adapter)

    def answered(self, replica: Replica, adapter: str) -> None:
        """It has ended."""
        asked = self._asked.get(replica)
        if asked is None:
            return
        asked[adapter] -= 1
        if not asked[adapter]:
            del asked[adapter]
            self._settle(replica, adapter)

    def forget(self, replica: Replica) -> None:
        """It is gone."""
        for adapter in {*self._loaded.pop(replica, ()), *self._asked.pop(replica, ())}:
            self._settle(replica, adapter)
        del self._counts[replica]

    def _settle(self, replica: Replica, adapter: str) -> None:
        has = adapter in self._loaded.get(replica, ()) or adapter in self._asked.get(replica, ())
        bag = self._by_adapter.get(adapter, _NOBODY)
        if has and replica not in bag:
            self._by_adapter.setdefault(adapter, IndexedSet()).add(replica)
            self._counts[replica] += 1
        elif not has and replica in bag:
            bag.discard(replica)
            self._counts[replica] -= 1
            if not bag:
                del self._by_adapter[adapter]
