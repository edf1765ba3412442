"""One simulated replica's adapters: loaded on demand, the least recently used one evicted."""

from __future__ import annotations

from collections import OrderedDict
from typing import Generic, TypeVar

R = TypeVar("R")


class Slots(Generic[R]):
    """Room for so many adapters. Requests wait while theirs is loaded; one that is in use is not evicted."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._users: OrderedDict[str, int] = OrderedDict()
        self._waiting: dict[str, list[R]] = {}

    @property
    def loaded(self) -> tuple[str, ...]:
        return tuple(self._users)

    def use(self, adapter: str) -> bool:
        """Whether it is there; then it stays until `leave`."""
        if adapter not in self._users:
            return False
        self._users[adapter] += 1
        self._users.move_to_end(adapter)
        return True

    def leave(self, adapter: str) -> None:
        self._users[adapter] -= 1

    def wait(self, adapter: str, request: R) -> bool:
        """Puts the request aside. Whether a load must be begun for it."""
        waiting = self._waiting.setdefault(adapter, [])
        waiting.append(request)
        return len(waiting) == 1

    def put(self, adapter: str) -> list[R]:
        """The adapter is loaded: who waited for it; nobody, and no change, while every slot is in use."""
        if len(self._users) >= self._count:
            unused = next((name for name, users in self._users.items() if not users), None)
            if unused is None:
                return []
            del self._users[unused]
        self._users[adapter] = 0
        return self._waiting.pop(adapter)
