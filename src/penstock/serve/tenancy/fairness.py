"""Whose turn it is where requests wait: the tenant's that was served least, by tokens and its weight.

The virtual token counter of arXiv 2401.00588. A request is charged an estimate when it goes, and the rest, or
the difference back, at its end. A tenant that begins to wait is lifted to the one whose turn it is: nobody
saves turns up. While two tenants wait, what they were served differs by one request, and by what those that
are open were estimated wrongly. Units: priced tokens, over the tenant's weight.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

W = TypeVar("W")
_FEW = 64  # entries

CACHED, OUTPUT = 0.1, 2.0
"""Price of a token that was cached, and of an answer's; others of the prompt are 1."""


def price(prompt: int, cached: int, output: float) -> float:
    """cached: of the prompt's."""
    return prompt - (1 - CACHED) * cached + OUTPUT * output


class Charge:
    """What one request of a tenant costs. price: estimated, until `settle`."""

    __slots__ = ("account", "price", "tenant", "weight")

    def __init__(self, tenant: str, weight: float, price: float) -> None:
        self.tenant = tenant
        self.weight = weight
        self.price = price
        self.account: _Account[Any] | None = None

    def settle(self, price: float) -> None:
        """The request has ended, and has cost so much. It may have waited nowhere."""
        if self.account is not None:
            self.account.add((price - self.price) / self.weight)
        self.price = price


class StartTags:
    """Turns of one class in an engine that takes lower numbers first, by start-time fair queueing.

    A request's number is where its tenant's earlier ones are paid for, or the lowest of those that wait: a
    newcomer goes next. Prices stay estimates.
    """

    def __init__(self) -> None:
        self._paid: dict[str, float] = {}
        self._waiting: list[int] = []  # sorted
        self.now = 0  # number of a request without a tenant

    def tag(self, tenant: str, price: float) -> StartTag:
        """For a new request of a tenant. price: over its weight."""
        start = max(self.now, self._paid.get(tenant, 0.0))
        self._paid[tenant] = start + price
        insort(self._waiting, int(start))
        self.now = self._waiting[0]
        return StartTag(self, tenant, price, int(start))

    def remove(self, tag: StartTag, price: float) -> None:
        """It waits no longer. price: to give back."""
        self._paid[tag.tenant] -= price
        del self._waiting[bisect_left(self._waiting, tag.number)]
        self.now = self._waiting[0] if self._waiting else tag.number


class StartTag:
    """The turn of one request. number: for the engine."""

    __slots__ = ("_price", "_tags", "_waits", "number", "tenant")

    def __init__(self, tags: StartTags, tenant: str, price: float, number: int) -> None:
        self._tags, self._price, self._waits = tags, price, True
        self.tenant, self.number = tenant, number

    def began(self) -> None:
        """The engine has begun with the request. Later calls do nothing."""
        if self._waits:
            self._waits = False
            self._tags.remove(self, 0.0)

    def ended(self, has_begun: Callable[[], bool]) -> None:
        """The request has ended. has_begun: whether the engine had begun with it, if nobody has said so."""
        if self._waits:
            self._waits = False
            self._tags.remove(self, 0.0 if has_begun() else self._price)


class _Account(Generic[W]):
    """One tenant in one line. turn: number of its last one. entry: of its place."""

    __slots__ = ("_line", "entry", "served", "turn", "waiting", "weight")

    def __init__(self, line: FairLine[W]) -> None:
        self._line = line
        self.served = 0.0
        self.turn = self.entry = 0
        self.weight = 1.0
        self.waiting: OrderedDict[W, None] = OrderedDict()  # finding a dict's first key is slow

    def add(self, price: float) -> None:
        self.served += price
        if self.waiting:
            self._line.place(self)


class FairLine(Generic[W]):
    """Those that wait, in the order of their turns. Those without a charge are one tenant's: first come,
    first served.
    """

    def __init__(self) -> None:
        self._accounts: dict[str, _Account[W]] = {}
        self._busy: dict[_Account[W], None] = {}  # with requests that wait
        self._heap: list[tuple[float, int, int, _Account[W]]] = []  # old entries stay until they are first
        self._waiting = self._turns = self._entries = 0
        self._last: _Account[W] | None = None  # to have had a turn

    def __len__(self) -> int:
        return self._waiting

    def __iter__(self) -> Iterator[W]:
        return (waiter for account in self._busy for waiter in account.waiting)

    def put(self, waiter: W, charge: Charge | None) -> None:
        """At the end of its tenant's."""
        account = self._account(charge)
        begins = not account.waiting
        if begins:
            self._lift(account)
        account.waiting[waiter] = None
        self._waiting += 1
        if begins:
            self._busy[account] = None
            self.place(account)

    def first(self) -> W:
        """Whose turn it is. Raises: IndexError when nobody waits."""
        return next(iter(self._first().waiting))

    def discard(self, waiter: W, charge: Charge | None) -> None:
        """It waits no longer."""
        account = self._accounts.get("" if charge is None else charge.tenant)
        if account is not None and waiter in account.waiting:
            del account.waiting[waiter]
            self._waiting -= 1
            if not account.waiting:
                del self._busy[account]
            if not self._busy:
                self._heap.clear()

    def take(self, charge: Charge) -> None:
        """The request goes, whether it has waited or not. A later one of the same request costs nothing, if
        this one is not given back by another line.
        """
        account = self._accounts.get(charge.tenant) or self._account(charge)
        if (before := charge.account) is account:
            return
        if before is not None:  # of another model, which has not answered it
            before.add(-charge.price / charge.weight)
        account.weight = charge.weight
        if not account.waiting:
            self._lift(account)
        charge.account = self._last = account
        account.turn = self._turns = self._turns + 1
        account.add(charge.price / charge.weight)

    def add(self, tenant: str, price: float) -> None:
        """Another gateway has served a tenant. That counts while it waits here, too."""
        account = self._accounts.get(tenant)
        if account is not None and account.waiting:
            account.add(price / account.weight)

    def youngest(self) -> W:
        """The last to come of the tenant with most that wait, by weight. Only while somebody waits."""
        return next(reversed(max(self._busy, key=_length).waiting))

    def gives_way(self, charge: Charge | None) -> W | None:
        """The same, if it may give its place to a request of a tenant with fewer."""
        own = self._account(charge)
        if _length(own) + 1 / own.weight < max(map(_length, self._busy), default=0.0):
            return self.youngest()
        return None

    def place(self, account: _Account[W]) -> None:
        """Its count has changed, or it begins to wait."""
        if len(self._heap) > 2 * len(self._busy) + _FEW:
            self._heap = [entry for entry in self._heap if _is_new(entry)]
            heapq.heapify(self._heap)
        self._entries += 1
        account.entry = self._entries
        heapq.heappush(self._heap, (account.served, account.turn, self._entries, account))

    def _account(self, charge: Charge | None) -> _Account[W]:
        tenant = "" if charge is None else charge.tenant
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self)
        if charge is not None:
            account.weight = charge.weight
        return account

    def _lift(self, account: _Account[W]) -> None:
        other = self._first() if self._busy else self._last
        if other is not None and other.served > account.served:
            account.served = other.served

    def _first(self) -> _Account[W]:
        while True:
            if _is_new(self._heap[0]):
                return self._heap[0][3]
            heapq.heappop(self._heap)


def _is_new(entry: tuple[float, int, int, _Account[Any]]) -> bool:
    _, _, number, account = entry
    return number == account.entry and bool(account.waiting)


def _length(account: _Account[Any]) -> float:
    return len(account.waiting) / account.weight
