"""Rows to one file: JSON lines, CSV, TSV or Parquet. The reverse is `readers`."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import IO, Any, NamedTuple

import msgspec

from penstock.data.storage.readers import FileFormat, TimeText, batched, common_type

_BATCH_ROWS, _BATCH_BYTES = 2000, 16 << 20
_GROUP_BYTES = 64 << 20
_MISFITS = (TypeError, ValueError, OverflowError, NotImplementedError)
"""What Arrow raises about values that have no common type, or not that of their column."""

_LINE_ENDS = {one.encode(): f"\\u{ord(one):04x}".encode() for one in "\x85\u2028\u2029"}
"""Characters that JSON leaves as they are, although `str.splitlines` and some clients end a line there."""


class OutputRow(NamedTuple):
    """number: of its row in the input. size_bytes: of its columns, roughly."""

    number: int
    size_bytes: int
    columns: Mapping[str, Any]


class TypeMismatch(Exception):
    """Values do not fit the types of their columns: all `names` that are at fault."""

    def __init__(self, names: set[str]) -> None:
        super().__init__(names)
        self.names = names


class JsonLines:
    """Each line has the columns of its row, so there is no schema."""

    def infer_schema(
        self, rows: Iterable[OutputRow], known_types: Mapping[str, Any], last: Collection[str] = ()
    ) -> None:
        return None

    def write(self, file: IO[bytes], rows: Iterable[OutputRow], schema: None) -> None:
        for row in rows:
            line = _encode(row.columns)
            for character, escaped in _LINE_ENDS.items():
                line = line.replace(character, escaped)
            file.write(line + b"\n")


@dataclass(frozen=True, slots=True)
class Csv:
    """The columns of all rows; without rows, the known ones. Lists, dicts and booleans become JSON."""

    delimiter: str = ","

    def infer_schema(
        self, rows: Iterable[OutputRow], known_types: Mapping[str, Any], last: Collection[str] = ()
    ) -> list[str]:
        return _ordered(dict.fromkeys(name for row in rows for name in row.columns) or known_types, last)

    def write(self, file: IO[bytes], rows: Iterable[OutputRow], schema: list[str]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text, delimiter=self.delimiter)
        writer.writerow(schema)
        for row in rows:
            writer.writerow([_cell(row.columns.get(name)) for name in schema])
        text.detach()


class Parquet:
    """Typed columns. A column whose rows have no common type holds JSON text."""

    def infer_schema(
        self, rows: Iterable[OutputRow], known_types: Mapping[str, Any], last: Collection[str] = ()
    ) -> Any:
        """An Arrow schema and the names of the columns that hold JSON text. It has all known columns."""
        import pyarrow as pa

        types: dict[str, Any] = dict(known_types)
        mixed: set[str] = set()
        for some in _batched(rows):
            for name in dict.fromkeys(name for row in some for name in row):
                if name in mixed or name in known_types:
                    continue
                try:
                    found: Any = pa.array([_arrow(row.get(name)) for row in some])
                    types[name] = common_type(types.get(name, pa.null()), found.type)
                except _MISFITS:
                    mixed.add(name)
                    types[name] = pa.string()
        for name, kind in types.items():
            if _is_empty(kind):  # Parquet has no type for a struct without fields
                mixed.add(name)
                types[name] = pa.string()
        return pa.schema([(name, types[name]) for name in _ordered(types, last)]), mixed

    def write(self, file: IO[bytes], rows: Iterable[OutputRow], schema: Any) -> None:
        """Raises: TypeMismatch, when all rows must be written again with another schema."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns, mixed = schema
        misfits: set[str] = set()
        with pq.ParquetWriter(file, columns) as writer:
            group: list[Any] = []  # tables of one row group
            for some in _batched(rows):
                arrays = {field.name: _array(field, some, mixed) for field in columns}
                misfits.update(name for name, array in arrays.items() if array is None)
                if misfits:
                    continue
                group.append(pa.Table.from_arrays(list(arrays.values()), schema=columns))
                if sum(table.nbytes for table in group) >= _GROUP_BYTES:
                    writer.write_table(pa.concat_tables(group))
                    group = []
            if group:
                writer.write_table(pa.concat_tables(group))
        if misfits:
            raise TypeMismatch(misfits)


def with_json_columns(schema: Any, names: set[str]) -> Any:
    """A schema of Parquet in which these columns, too, hold JSON text."""
    import pyarrow as pa

    columns, mixed = schema
    fields = [pa.field(field.name, pa.string()) if field.name in names else field for field in columns]
    return pa.schema(fields), mixed | names


Writer = JsonLines | Csv | Parquet
"""Of one format. Its schema is shared by all files of an output; to infer it, all rows are read once. Columns
in `last` come after those that are not."""

WRITERS: Mapping[FileFormat, Writer] = {
    "jsonl": JsonLines(),
    "csv": Csv(),
    "tsv": Csv("\t"),
    "parquet": Parquet(),
}


def _ordered(names: Iterable[str], last: Collection[str]) -> list[str]:
    there = list(names)
    return [name for name in there if name not in last] + [name for name in last if name in there]


def _batched(rows: Iterable[OutputRow]) -> Iterator[list[Mapping[str, Any]]]:
    for some in batched(rows, _BATCH_ROWS, _BATCH_BYTES):
        yield [row.columns for row in some]


def _array(field: Any, rows: list[Mapping[str, Any]], mixed: set[str]) -> Any:
    """An Arrow array; None where values do not fit the type."""
    import pyarrow as pa

    as_json = field.name in mixed
    values = [_json(row.get(field.name)) if as_json else _arrow(row.get(field.name)) for row in rows]
    try:
        return pa.array(values, field.type)
    except _MISFITS:
        if as_json:
            raise
        return None


def _cell(value: Any) -> Any:
    """JSON, but strings without quotes."""
    if value is None or (isinstance(value, str | int | float) and not isinstance(value, bool)):
        return value
    text = _encode(value).decode()
    return msgspec.json.decode(text) if text.startswith('"') else text


def _json(value: Any) -> str | None:
    return None if value is None else _encode(value).decode()


def _arrow(value: Any) -> Any:
    """What Arrow makes a value of a column from."""
    if isinstance(value, msgspec.Raw):
        return msgspec.json.decode(value)
    return value.scalar if isinstance(value, TimeText) else value


def _iso(value: Any) -> str:
    return value.isoformat() if hasattr(value, "isoformat") else str(value)


_encode = msgspec.json.Encoder(enc_hook=_iso).encode


def _is_empty(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_is_empty(field.type) for field in kind)
    return pa.types.is_list(kind) and _is_empty(kind.value_type)
