"""Tables of pandas, Polars and Arrow: read as rows, and answered as what they are."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pyarrow as pa

from penstock.data.rows.template import PromptTemplate, column_of
from penstock.errors import ConfigError

NOT_IN_ARROW = (ArithmeticError, NotImplementedError, TypeError, ValueError)
"""What Arrow raises for values that no column of it can hold: mostly those of several types."""


def arrow(table: Any) -> Any:
    """All of it, as a file can hold it. Raises: ConfigError."""
    names, column = _columns(table)
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"The table has several columns {', '.join(map(repr, twice))}. Rename them.")
    arrays: dict[str, Any] = {}
    for number, name in enumerate(names):
        values = column(number)
        try:
            arrays[name] = pa.table(values.to_frame()).column(0) if _is_polars(values) else pa.array(values)
        except NOT_IN_ARROW as error:
            why = str(error).splitlines()[0]
            raise ConfigError(f"The column {name!r} has values of several types: {why}") from error
    return pa.table(arrays)


def rows(table: Any, template: PromptTemplate) -> Sequence[Mapping[str, Any]]:
    """Its rows, with the columns that the template names. Raises: ConfigError."""
    if isinstance(table, list) and not table:
        return []
    names, column = _columns(table)
    if fault := template.missing(names):
        raise ConfigError(fault)
    if isinstance(table, list):
        return cast("list[Mapping[str, Any]]", table)
    asked = {column_of(given, names) for given in template.columns}
    if twice := [name for name in asked if names.count(name) > 1]:
        raise ConfigError(f"The prompt names the column {twice[0]!r}, of which there are several.")
    values = [_values(column(names.index(name))) for name in asked]
    return [dict(zip(asked, row, strict=True)) for row in zip(*values, strict=True)]


def questions(table: Any) -> list[Any]:
    """The rows of what is asked without a prompt; None for one that is missing. Raises: ConfigError."""
    if isinstance(table, str):
        raise ConfigError("`map` takes a list of questions; `ask` takes one.")
    if isinstance(table, Mapping) or _is_lazy(table) or hasattr(table, "columns"):
        raise _without_prompt(_columns(table)[0])
    try:
        found = _python_values(table)
    except TypeError as error:
        raise _no_table(table) from error
    if dicts := [row for row in found if isinstance(row, Mapping)]:
        raise _without_prompt(list(cast("Mapping[str, Any]", dicts[0])))
    return found


def _without_prompt(names: Sequence[str]) -> ConfigError:
    there = ", ".join(map(repr, names))
    return ConfigError(
        f"A table needs a prompt that names its columns in braces, such as '{{text}}'; it has {there}."
    )


def _columns(table: Any) -> tuple[list[str], Callable[[int], Any]]:
    """The names of its columns, and what gives the values of one. Raises: ConfigError."""
    pandas = sys.modules.get("pandas")
    if _is_lazy(table):
        raise ConfigError("A LazyFrame has no rows yet: call .collect() on it.")
    if isinstance(table, list):
        records = cast("list[Mapping[str, Any]]", table)
        if other := [row for row in records if not isinstance(cast("Any", row), Mapping)]:
            raise ConfigError(f"A row is {other[0]!r:.80}: with a prompt, each is a dict with columns.")
        keys = list(dict.fromkeys(key for row in records for key in row))
        return list(map(str, keys)), lambda number: [row.get(keys[number]) for row in records]
    if pandas and isinstance(table, pandas.DataFrame):
        if table.columns.nlevels > 1:
            raise ConfigError(
                "The columns have names of several levels (a MultiIndex): give each one name first, as in "
                "`table.columns = table.columns.map('_'.join)`."
            )
        return list(map(str, table.columns)), lambda number: table.iloc[:, number]
    if _is_polars(table) and hasattr(table, "columns"):
        return list(table.columns), table.to_series
    try:
        found = pa.table(table)
    except NOT_IN_ARROW as error:
        raise _no_table(table) from error
    return list(found.column_names), lambda number: cast("Any", found.column(number).combine_chunks())


def _no_table(table: Any) -> ConfigError:
    return ConfigError(f"A {type(table).__name__} is no table: give a DataFrame, a list of dicts, or a path.")


def _values(column: Any) -> list[Any]:
    """As Python's own; those of several types as they are."""
    try:
        return pa.array(column).to_pylist()
    except NOT_IN_ARROW:
        return _python_values(column)


def _python_values(column: Any) -> list[Any]:
    """Of a Series, an array or a list; None for missing ones. Raises: TypeError for what is none of these."""
    if hasattr(column, "isna"):
        return [None if gone else value for value, gone in zip(column.tolist(), column.isna(), strict=True)]
    return column.to_pylist() if hasattr(column, "to_pylist") else list(column)


def _is_lazy(table: Any) -> bool:
    polars = _polars()
    return bool(polars) and isinstance(table, polars.LazyFrame)


def _is_polars(table: Any) -> bool:
    polars = _polars()
    return bool(polars) and isinstance(table, polars.DataFrame | polars.Series)


def _polars() -> Any:
    """The module, where the user's program has imported it."""
    return sys.modules.get("polars")


def series(table: Any, answers: list[Any]) -> Any:
    pandas = sys.modules.get("pandas")
    if _is_polars(table):
        return _polars().Series("answer", answers)
    if pandas and isinstance(table, pandas.DataFrame | pandas.Series):
        return pandas.Series(answers, index=table.index, name="answer", dtype=object)
    return answers


def frame(answers: Any, table: Any) -> Any:
    if _is_polars(table):
        return _polars().from_arrow(answers)
    found = answers.to_pandas()
    if isinstance(table, type(found)):
        found.index = table.index
    return found
