"""A row as postprocessing gets it: the user's columns and the results, with the request in reach.

The request's fields (`messages`, `sampling_params`, ...) can be read by name, but are no part of the row: in
a table of outputs all of them would be given one shape.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

KEPT = "original_"
"""Before the name of a user's column that has the name of a result."""


class View(dict[str, Any]):
    """A row. `**row` and `dict(row)` have its columns, `row["messages"]` finds the request's field, too.

    request: all its fields, also those that a column of the row hides.
    """

    __slots__ = ("request",)

    def __init__(self, columns: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self.request = request

    def __missing__(self, name: str) -> Any:
        if name in self.request:
            return self.request[name]
        there = ", ".join(map(str, self)) or "none"
        asked = f"; of the request {', '.join(map(str, self.request))}" if self.request else ""
        raise KeyError(f"There is no column {name!r}; there are {there}{asked}.")

    def get(self, name: str, default: Any = None, /) -> Any:
        """As with brackets, but without an error."""
        return super().get(name, self.request.get(name, default))

    def __reduce__(self) -> tuple[Any, ...]:
        return View, (dict(self), dict(self.request))


def view(
    row: Mapping[str, Any], extras: Mapping[str, Any], request: Mapping[str, Any], results: Mapping[str, Any]
) -> View:
    """What postprocessing gets.

    extras: what preprocessing returned beside the request; they win over the row's columns.
    A user's column that has the name of a result is kept as `original_NAME`; one that has this name already
    moves in the same way, so that `original_` is always what this stage found.
    """
    return View({**moved({**row, **extras}, results), **results}, dict(request))


def moved(own: Mapping[str, Any], results: Iterable[str]) -> dict[str, Any]:
    """The user's columns, in their order, under names that leave those of the results free.

    Used wherever results come beside columns of the user's, so that each is found under one name.
    """
    move = set[str]()
    for name in results:
        while name in own and name not in move:
            move.add(name)
            name = KEPT + name
    return {(KEPT + name if name in move else name): value for name, value in own.items()}
