"""Rows to one file: JSON lines, Parquet or CSV. The reverse is `readers`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from typing import IO, Any, cast

import msgspec

from penstock.data.storage.readers import FileFormat, common_type

Record = Mapping[str, Any]

_encode = msgspec.json.Encoder(enc_hook=str).encode
_BATCH_ROWS, _BATCH_BYTES = 2000, 64 << 20


class TypeMismatch(Exception):
    """A value does not fit the type of its column. schema: one that fits."""

    def __init__(self, schema: Any) -> None:
        super().__init__(schema)
        self.schema = schema


class JsonLines:
    """Each line has the columns of its row, so there is no schema."""

    def infer_schema(self, rows: Iterable[Record], known_types: Mapping[str, Any]) -> None:
        return None

    def write(self, file: IO[bytes], rows: Iterable[Record], schema: None) -> None:
        for some in batched(rows):
            file.write(b"".join(_encode(row) + b"\n" for row in some))


class Csv:
    """The columns of all rows; without rows, the known ones. Lists, dicts and booleans become JSON."""

    def infer_schema(self, rows: Iterable[Record], known_types: Mapping[str, Any]) -> list[str]:
        return list(dict.fromkeys(name for row in rows for name in row)) or list(known_types)

    def write(self, file: IO[bytes], rows: Iterable[Record], schema: list[str]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text)
        writer.writerow(schema)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in schema])
        text.detach()


class Parquet:
    """Typed columns. A column whose rows have no common type holds JSON text."""

    def infer_schema(self, rows: Iterable[Record], known_types: Mapping[str, Any]) -> Any:
        """An Arrow schema and the names of the columns that hold JSON text. It has all known columns."""
        import pyarrow as pa

        types: dict[str, Any] = dict(known_types)
        mixed: set[str] = set()
        for some in batched(rows):
            for name in dict.fromkeys(name for row in some for name in row):
                if name in mixed or name in known_types:
                    continue
                try:
                    found = pa.infer_type([_arrow(row.get(name)) for row in some])
                    types[name] = common_type(types.get(name, pa.null()), found)
                except (pa.ArrowInvalid, pa.ArrowTypeError, pa.ArrowNotImplementedError, OverflowError):
                    mixed.add(name)
                    types[name] = pa.string()
        for name, kind in types.items():
            if _is_empty(kind):  # Parquet has no type for a struct without fields
                mixed.add(name)
                types[name] = pa.string()
        return pa.schema(list(types.items())), mixed

    def write(self, file: IO[bytes], rows: Iterable[Record], schema: Any) -> None:
        """Raises: TypeMismatch, when all rows must be written again with another schema."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns, _ = schema
        with pq.ParquetWriter(file, columns) as writer:
            group: list[Any] = []  # tables of one row group
            for some in batched(rows):
                arrays = [_column(field, some, schema) for field in columns]
                group.append(pa.Table.from_arrays(arrays, schema=columns))
                if sum(table.nbytes for table in group) >= _BATCH_BYTES:
                    writer.write_table(pa.concat_tables(group))
                    group = []
            if group:
                writer.write_table(pa.concat_tables(group))


Writer = JsonLines | Csv | Parquet
"""Of one format. Its schema is shared by all files of an output; to infer it, all rows are read once."""

WRITERS: Mapping[FileFormat, Writer] = {"jsonl": JsonLines(), "csv": Csv(), "parquet": Parquet()}


def batched(rows: Iterable[Record]) -> Iterator[list[Record]]:
    """Lists of rows that fit into memory together."""
    some: list[Record] = []
    size = 0
    for row in rows:
        some.append(row)
        size += _size(row)
        if len(some) >= _BATCH_ROWS or size >= _BATCH_BYTES:
            yield some
            some, size = [], 0
    if some:
        yield some


def _size(value: Any) -> int:
    """In bytes, roughly."""
    if isinstance(value, str | bytes | msgspec.Raw):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, cast("Mapping[Any, Any]", value).values()))
    if isinstance(value, list):
        items = cast("list[Any]", value)
        return (
            sum(map(_size, items))
            if items and isinstance(items[0], str | bytes | dict | list)
            else 8 * len(items)
        )
    return 8


def _column(field: Any, rows: list[Record], schema: Any) -> Any:
    """An Arrow array. Raises: TypeMismatch, with a schema in which the column holds JSON text."""
    import pyarrow as pa

    columns, mixed = schema
    as_json = field.name in mixed
    values = [_json(row.get(field.name)) if as_json else _arrow(row.get(field.name)) for row in rows]
    try:
        return pa.array(values, field.type)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        if as_json:
            raise
        text = columns.set(columns.get_field_index(field.name), pa.field(field.name, pa.string()))
        raise TypeMismatch((text, {*mixed, field.name})) from error


def _cell(value: Any) -> Any:
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    return _encode(value).decode()


def _json(value: Any) -> str | None:
    return None if value is None else _encode(value).decode()


def _arrow(value: Any) -> Any:
    """Raw JSON decoded."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _is_empty(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_is_empty(field.type) for field in kind)
    return pa.types.is_list(kind) and _is_empty(kind.value_type)
