"""The replicas of one model that may take a request now: a view that the table keeps and policies read.

Membership, room and the sum of what is open are kept up to date at each change, so that a pick among a
thousand replicas, full or not, costs what a pick among two does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, overload

if TYPE_CHECKING:
    from penstock.serve.table import Replica


class Candidates(Sequence["Replica"]):
    """Ready replicas with room, in no order; `in` takes no search.

    members: every replica of the model in Serve's order, ready or not; another tuple after each change.
    ready: how many are ready, full ones included; busy: the requests in all of these; elsewhere: those of
    them that came from other gateways.
    """

    __slots__ = ("_places", "_replicas", "busy", "elsewhere", "members", "ready")

    def __init__(
        self,
        replicas: Iterable[Replica] = (),
        *,
        members: Sequence[Replica] = (),
        ready: int = 0,
        busy: int = 0,
        elsewhere: int = 0,
    ) -> None:
        self._replicas = list(replicas)
        self._places = {replica: place for place, replica in enumerate(self._replicas)}
        self.members = tuple(members)
        self.ready = ready
        self.busy = busy
        self.elsewhere = elsewhere

    def without(self, tried: Iterable[Replica]) -> Candidates:
        """A copy without these."""
        out = set(tried)
        left = (replica for replica in self._replicas if replica not in out)
        return Candidates(
            left, members=self.members, ready=self.ready, busy=self.busy, elsewhere=self.elsewhere
        )

    def add(self, replica: Replica) -> None:
        """For the table."""
        if replica not in self._places:
            self._places[replica] = len(self._replicas)
            self._replicas.append(replica)

    def discard(self, replica: Replica) -> None:
        """For the table. The last one takes the place that is left."""
        place = self._places.pop(replica, None)
        if place is None:
            return
        last = self._replicas.pop()
        if last is not replica:
            self._replicas[place] = last
            self._places[last] = place

    @overload
    def __getitem__(self, index: int) -> Replica: ...
    @overload
    def __getitem__(self, index: slice) -> list[Replica]: ...
    def __getitem__(self, index: int | slice) -> Replica | list[Replica]:
        return self._replicas[index]

    def __len__(self) -> int:
        return len(self._replicas)

    def __iter__(self) -> Iterator[Replica]:
        return iter(self._replicas)

    def __contains__(self, replica: object) -> bool:
        return replica in self._places
