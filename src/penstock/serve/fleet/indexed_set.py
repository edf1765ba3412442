"""A set whose members can be picked by number: for choices at random among a thousand."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar, overload

T = TypeVar("T", bound=Hashable)


class IndexedSet(Sequence[T], Generic[T]):
    """In no order. `in`, `add`, `discard` and indexing take no search."""

    __slots__ = ("_items", "_places")

    def __init__(self, items: Iterable[T] = ()) -> None:
        self._items = list(items)
        self._places = {item: place for place, item in enumerate(self._items)}

    def add(self, item: T) -> None:
        if item not in self._places:
            self._places[item] = len(self._items)
            self._items.append(item)

    def discard(self, item: T) -> None:
        """The last one takes the place that is left."""
        place = self._places.pop(item, None)
        if place is None:
            return
        last = self._items.pop()
        if last is not item:
            self._items[place] = last
            self._places[last] = place

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
        return item in self._places
