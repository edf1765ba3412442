"""A set with access by index: for random choices among a thousand."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T", bound=Hashable)


class IndexedSet(Sequence[T], Generic[T]):
    """In no order. `in`, `add`, `discard` and indexing take constant time."""

    __slots__ = ("_indexes", "_items")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._indexes = {item: index for index, item in enumerate(self._items)}

    def put(self, item: T, inside: bool) -> None:
        """Adds or discards it."""
        (self.add if inside else self.discard)(item)

    def add(self, item: T) -> None:
        if item not in self._indexes:
            self._indexes[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        """Moves the last item to the free index."""
        index = self._indexes.pop(item, None)
        if index is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[index] = last
            self._indexes[last] = index

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[T]:
        return iter(self._items)

    def __contains__(self, item: object) -> bool:
        return item in self._indexes
