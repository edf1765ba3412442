"""The user's columns beside the result columns: one rule for outputs, dead letters and postprocessing.

A row given to postprocessing also finds the fields of its request (`messages`, `sampling_params`, ...), but
not as columns: a table of outputs would give all of them one type.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

_ORIGINAL = "original_"
"""Prefix of a user's column that has the name of a result."""


def rename_own(own: Mapping[str, Any], results: Iterable[str]) -> dict[str, Any]:
    """The user's columns, in their order, renamed where a result has their name.

    A column that already has the new name is renamed in the same way, so that `original_NAME` is always the
    column that this stage found under NAME.
    """
    renamed = set[str]()
    for name in results:
        while name in own and name not in renamed:
            renamed.add(name)
            name = _ORIGINAL + name
    return {(_ORIGINAL + name if name in renamed else name): value for name, value in own.items()}


def merge(own: Mapping[str, Any], results: Mapping[str, Any]) -> dict[str, Any]:
    """The user's columns, renamed where they must be, then the results."""
    return {**rename_own(own, results), **results}


class RowView(dict[str, Any]):
    """A row. `**row` and `dict(row)` have its columns; `row["messages"]` finds the request's field, too.

    request: all its fields, also those that a column of the row hides.
    """

    __slots__ = ("request",)

    def __init__(self, columns: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        super().__init__(columns)
        self.request = request

    def __missing__(self, name: str) -> Any:
        if name in self.request:
            return self.request[name]
        columns = ", ".join(map(str, self)) or "none"
        fields = f"; the request has {', '.join(map(str, self.request))}" if self.request else ""
        raise KeyError(f"There is no column {name!r}; there are {columns}{fields}.")

    def get(self, name: str, default: Any = None, /) -> Any:
        """As with brackets, without an error."""
        return super().get(name, self.request.get(name, default))

    def __reduce__(self) -> tuple[Any, ...]:
        return RowView, (dict(self), dict(self.request))


def row_view(
    row: Mapping[str, Any], extras: Mapping[str, Any], request: Mapping[str, Any], results: Mapping[str, Any]
) -> RowView:
    """The row that postprocessing gets.

    extras: what preprocessing returned beside the request; they win over the row's columns.
    """
    return RowView(merge({**row, **extras}, results), dict(request))
