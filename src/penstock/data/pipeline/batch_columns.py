"""The columns that a pipeline's stages add to a batch, and the user's rows in it.

Ours are pickled bytes, which no table can merge or cast. The user's columns pass through untouched.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import cloudpickle
import pyarrow as pa

from penstock.errors import ConfigError

_RESERVED = "__penstock_"

REQUEST = "__penstock_request"
"""What the engine stage runs; empty if the row already has an outcome."""

FIELDS = "__penstock_fields"
"""What preprocessing returned."""

OUTCOME = "__penstock_outcome"
"""The row's outcome; empty until it has one."""

ROW = "__penstock_row"
"""A row of a plain list."""

Row = dict[str, Any]
Table = Any
"""A `pyarrow.Table`; pyarrow has no types."""


def pack(values: list[Any]) -> Any:
    """A column of bytes: each value pickled, empty for None."""
    return pa.array(
        [b"" if value is None else cloudpickle.dumps(value) for value in values], pa.large_binary()
    )


def unpack(batch: Table, name: str) -> list[Any]:
    """The values of a column that `pack` made."""
    return [pickle.loads(value) if value else None for value in batch.column(name).to_pylist()]


def user_rows(batch: Table, is_packed: bool) -> list[Row]:
    """is_packed: rows are in the column ROW, which this driver wrote."""
    if is_packed:
        return [pickle.loads(row) for row in batch.column(ROW).to_pylist()]
    ours = [name for name in batch.column_names if name.startswith(_RESERVED)]
    return batch.drop_columns(ours).to_pylist()


def user_columns(batch: Table) -> Table:
    """The batch without the columns that stages added."""
    return batch.drop_columns([name for name in (REQUEST, FIELDS, OUTCOME) if name in batch.column_names])


def check_names(names: Sequence[str]) -> None:
    """Reserved columns are unpickled later, so a dataset must not bring any. Raises: ConfigError."""
    if wrong := [name for name in names if name.startswith(_RESERVED)]:
        raise ConfigError(
            f"The dataset has the column '{wrong[0]}'. Names that begin with '{_RESERVED}' are reserved for "
            "the processor; rename or drop the column."
        )
