"""Rows into one file, as JSON lines, Parquet or CSV. Used by the sink; the other direction is `reader`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import IO, Any, Protocol, TypeVar

import msgspec

from penstock.data.reader import Form, common_type

Record = Mapping[str, Any]
_T = TypeVar("_T")

_encode = msgspec.json.Encoder(enc_hook=str).encode
_BATCH_ROWS = 2000


class Writer(Protocol):
    """One form. shape: what all files of an output have in common, which takes a look at all rows."""

    def shape(self, rows: Iterable[Record], known: Mapping[str, Any]) -> Any:
        """known: Arrow's types of columns."""
        ...

    def write(self, file: IO[bytes], rows: Iterable[Record], shape: Any) -> None: ...


class JsonLines:
    """Each line has the columns that its row has; nothing needs to be known before."""

    def shape(self, rows: Iterable[Record], known: Mapping[str, Any]) -> None:
        return None

    def write(self, file: IO[bytes], rows: Iterable[Record], shape: None) -> None:
        for some in batched(rows):
            file.write(b"".join(_encode(row) + b"\n" for row in some))


class Csv:
    """The columns of all rows; what is no text or number is written as JSON."""

    def shape(self, rows: Iterable[Record], known: Mapping[str, Any]) -> list[str]:
        return list(dict.fromkeys(name for row in rows for name in row))

    def write(self, file: IO[bytes], rows: Iterable[Record], shape: list[str]) -> None:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="", write_through=True)
        writer = csv.writer(text)
        writer.writerow(shape)
        for row in rows:
            writer.writerow([_cell(row.get(name)) for name in shape])
        text.detach()


class Parquet:
    """Columns of one type each. Where rows disagree about a type, the column holds JSON as text."""

    def shape(self, rows: Iterable[Record], known: Mapping[str, Any]) -> Any:
        """Arrow's schema, and the names of the columns that hold JSON. Known columns are always there."""
        import pyarrow as pa

        types: dict[str, Any] = dict(known)
        mixed: set[str] = set()
        for some in batched(rows):
            for name in dict.fromkeys(name for row in some for name in row):
                if name in mixed or name in known:
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

    def write(self, file: IO[bytes], rows: Iterable[Record], shape: Any) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        schema, mixed = shape
        with pq.ParquetWriter(file, schema) as writer:
            for some in batched(rows):
                columns = {
                    name: [_json(row.get(name)) if name in mixed else _arrow(row.get(name)) for row in some]
                    for name in schema.names
                }
                writer.write_table(pa.Table.from_pydict(columns, schema=schema))


WRITERS: Mapping[Form, Writer] = {"jsonl": JsonLines(), "csv": Csv(), "parquet": Parquet()}


def batched(rows: Iterable[_T], size: int = _BATCH_ROWS) -> Iterator[list[_T]]:
    """Lists of at most `size`."""
    source = iter(rows)
    while some := list(islice(source, size)):
        yield some


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return _encode(value).decode()


def _json(value: Any) -> str | None:
    return None if value is None else _encode(value).decode()


def _arrow(value: Any) -> Any:
    """Raw JSON as what it says."""
    return msgspec.json.decode(value) if isinstance(value, msgspec.Raw) else value


def _is_empty(kind: Any) -> bool:
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return not kind.num_fields or any(_is_empty(field.type) for field in kind)
    return pa.types.is_list(kind) and _is_empty(kind.value_type)
