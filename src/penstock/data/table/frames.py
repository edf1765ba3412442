"""Tables of pandas, Polars and Arrow: read as rows, and answered as what they are."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from penstock.errors import ConfigError


def arrow(table: Any) -> Any:
    """Raises: ConfigError."""
    if isinstance(table, list):
        return pa.Table.from_pylist(table)
    pandas = sys.modules.get("pandas")
    if pandas and isinstance(table, pandas.DataFrame):
        return pa.Table.from_pandas(table, preserve_index=False).replace_schema_metadata(None)
    try:
        return pa.table(table)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"A {type(table).__name__} is no table: give a DataFrame, a list of dicts, or a path."
        ) from error


def rows(table: Any) -> Sequence[Mapping[str, Any]]:
    return table if isinstance(table, list) else arrow(table).to_pylist()


def _polars() -> Any:
    """The module, where the user's program has imported it."""
    return sys.modules.get("polars")


def series(table: Any, answers: list[Any]) -> Any:
    polars, pandas = _polars(), sys.modules.get("pandas")
    if polars and isinstance(table, polars.DataFrame | polars.Series):
        return polars.Series("answer", answers)
    if pandas and isinstance(table, pandas.DataFrame | pandas.Series):
        return pandas.Series(answers, index=table.index, name="answer", dtype=object)
    return answers


def frame(answers: Any, table: Any) -> Any:
    polars = _polars()
    if polars and isinstance(table, polars.DataFrame):
        return polars.from_arrow(answers)
    found = answers.to_pandas()
    if isinstance(table, type(found)):
        found.index = table.index
    return found
