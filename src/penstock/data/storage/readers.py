"""Rows of one file: JSON (lines or an array), CSV, TSV or Parquet, on this machine or in a bucket."""

from __future__ import annotations

import codecs
import csv
import io
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain, islice
from typing import Any, Literal, Protocol, TypeVar, cast

import msgspec

from penstock.data.storage.paths import StoragePath, open_lines
from penstock.errors import ConfigError, Error, Unavailable
from penstock.sources import failures

FileFormat = Literal["jsonl", "parquet", "csv", "tsv"]

EXTENSIONS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
    ".tsv": "tsv",
}
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
"""Last extensions of compressed text files, and Arrow's names of their codecs."""

_BINARY = (b"BZh", b"\x28\xb5\x2f\xfd", b"\xfd7zXZ", b"PAR1")
"""First bytes of files that are no text, unless they hold a control character (gzip, zip, UTF-16)."""

_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
_BUFFER_BYTES = 1 << 20
_LONGEST_FIELD = 1 << 30  # characters of a CSV cell; Python's own limit is 131,072


@dataclass(slots=True)
class InputRow:
    """One row. fields: its columns; None when it cannot be read: then `line` holds it and `fault` says why.

    size_bytes: in its file, roughly.
    """

    number: int
    fields: dict[str, Any] | None
    size_bytes: int = 0
    line: bytes = b""
    fault: str | None = None


class TimeText(str):
    """A date or time that Python's types cannot hold. scalar: Arrow's, for outputs that have its type."""

    scalar: Any

    def __new__(cls, scalar: Any) -> TimeText:
        shown = scalar.cast("string").as_py()  # of years beyond 32767 only "<value out of range: ...>"
        text = super().__new__(cls, str(scalar.value) if shown[0] == "<" else shown.replace(" ", "T", 1))
        text.scalar = scalar
        return text


class _Sized(Protocol):
    @property
    def size_bytes(self) -> int: ...


_S = TypeVar("_S", bound=_Sized)


def batched(rows: Iterable[_S], most: int, most_bytes: int) -> Iterator[list[_S]]:
    """Lists of at most `most` rows; the row that exceeds `most_bytes` is the last of its list."""
    some: list[_S] = []
    size = 0
    for row in rows:
        some.append(row)
        size += row.size_bytes
        if len(some) == most or size >= most_bytes:
            yield some
            some, size = [], 0
    if some:
        yield some


def format_of(url: str) -> FileFormat | None:
    """By the file name's extension."""
    name, ending = os.path.splitext(url.lower())
    return EXTENSIONS.get(os.path.splitext(name)[1] if ending in COMPRESSIONS else ending)


ReadRow = Callable[[int], InputRow]
"""A row that was read and is not parsed yet: called with its number."""

_TRIES = 4
UNREADABLE = (OSError, EOFError, ValueError, NotImplementedError, csv.Error)
"""What Python's and Arrow's readers raise about a file in another format than its name says."""


def read_rows(where: StoragePath, form: FileFormat) -> Iterator[ReadRow]:
    """Every row of a file.

    If the connection to the bucket drops, the file is reopened and reading resumes after the last row.
    Raises: Unavailable, naming the file that cannot be read.
    """
    done, failed = 0, 0
    while True:
        try:
            for row in islice(_READERS[form](where), done, None):
                done, failed = done + 1, 0
                yield row
            return
        except Error:
            raise
        except UNREADABLE as error:
            failed += 1
            if where.is_local or failed >= _TRIES or not failures.classify(error).retryable:
                raise _unreadable(where, error, done) from error
            time.sleep(failures.pause_s(failed))


def _unreadable(where: StoragePath, error: Exception, rows: int) -> Unavailable:
    after = f" after {rows:,} rows" if rows else ""
    return Unavailable(f"'{where.url}' cannot be read{after}: {_why(error)}.")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _json(where: StoragePath) -> Iterator[ReadRow]:
    with _opened(where) as file:
        start = file.peek(4)[:4]
        if start.startswith(_BINARY) or min(start, default=32) < ord("\t"):
            raise ValueError("it is not UTF-8 text; if it is compressed, name it .gz, .bz2, .zst or .lz4")
        for line in _json_items(file):
            yield partial(_parsed, line)


def _json_items(file: Iterable[bytes]) -> Iterator[bytes]:
    """Every line that is not blank, or every item of an array; an array is read whole."""
    lines = filter(None, (line.strip().removeprefix(codecs.BOM_UTF8) for line in file))
    first, second = next(lines, b""), next(lines, b"")
    if not first.startswith(b"[") or (first.endswith(b"]") and second):
        return chain(filter(None, (first, second)), lines)
    try:
        items = msgspec.json.decode(b"\n".join((first, second, *lines)), type=list[msgspec.Raw])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"it begins as a JSON array, but is none: {error}") from error
    return map(bytes, items)


def _parsed(line: bytes, number: int) -> InputRow:
    try:
        fields = msgspec.json.decode(line)
        if isinstance(fields, dict):
            return InputRow(number, cast("dict[str, Any]", fields), len(line))
        fault = f"The line must be a JSON object, but is a {type(fields).__name__}."
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        fault = f"The line is not JSON: {error}."
    except RecursionError:
        fault = "The line is not JSON: it is nested too deeply."
    return InputRow(number, None, len(line), line, fault)


def _csv(where: StoragePath, delimiter: str = ",") -> Iterator[ReadRow]:
    csv.field_size_limit(min(_LONGEST_FIELD, sys.maxsize))
    with _opened(where) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        line = 1
        try:
            for cells in reader:
                line = reader.line_num + 1
                if cells and names is not None:
                    yield partial(_celled, names, cells)
                elif cells:
                    names = cells
                    _check_names(names, where.url)
        except csv.Error as error:
            why = str(error).replace("unexpected end of data", "a quote is never closed")
            raise csv.Error(f"the row that begins in line {line} is not CSV: {why}") from error


def _celled(names: list[str], cells: list[str], number: int) -> InputRow:
    size_bytes = sum(map(len, cells))
    if len(cells) == len(names):
        return InputRow(number, dict(zip(names, cells, strict=True)), size_bytes)
    fault = f"The header names {len(names)} columns; cells of the row: {len(cells)}."
    return InputRow(number, None, size_bytes, msgspec.json.encode(cells), fault)


def _parquet(where: StoragePath) -> Iterator[ReadRow]:
    import pyarrow.parquet as pq

    with closing(where.open()) as file:
        parquet = pq.ParquetFile(file)
        _check_names(parquet.schema_arrow.names, where.url)
        for batch in parquet.iter_batches(_rows_at_a_time(parquet.metadata)):
            rows = _ParquetRows(batch, where)
            yield from (partial(rows.row, index) for index in range(batch.num_rows))


class _ParquetRows:
    """Some rows of a file, which become Python's when the first of them is used."""

    def __init__(self, batch: Any, where: StoragePath) -> None:
        self._batch, self._where = batch, where
        self._row_bytes = batch.nbytes // max(1, batch.num_rows)

    @cached_property
    def _columns(self) -> dict[str, list[Any]]:
        try:
            names = self._batch.schema.names
            return dict(zip(names, map(_values, self._batch.columns), strict=True))
        except UNREADABLE as error:  # a text that is not UTF-8
            raise _unreadable(self._where, error, 0) from error

    def row(self, index: int, number: int) -> InputRow:
        fields = {name: values[index] for name, values in self._columns.items()}
        return InputRow(number, fields, self._row_bytes)


_ROUNDED = "time64[ns]"
"""Arrow rounds values of this type to microseconds when it makes them Python's."""


def _values(column: Any) -> list[Any]:
    """Python's values of an Arrow array; texts for dates and times that Python cannot hold."""
    if str(column.type) != _ROUNDED:
        with suppress(OverflowError, ValueError):
            return column.to_pylist()
    return [_value(one) for one in column]


def _value(scalar: Any) -> Any:
    if str(scalar.type) != _ROUNDED or not scalar.is_valid or scalar.value % 1000 == 0:
        with suppress(OverflowError, ValueError):
            return scalar.as_py()
    if isinstance(scalar, Mapping):
        return {name: _value(one) for name, one in cast("Mapping[str, Any]", scalar).items()}
    return [_value(one) for one in scalar] if hasattr(scalar, "__iter__") else TimeText(scalar)


def _rows_at_a_time(footer: Any) -> int:
    """As many as fit into memory together, judged by the file's row group with the largest rows."""
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES / max(1, row_bytes))))


def read_footer(where: StoragePath) -> tuple[int, dict[str, Any]]:
    """Of a Parquet file: how many rows it has, and Arrow's types of its columns.

    Raises: Unavailable, ConfigError.
    """
    import pyarrow.parquet as pq

    try:
        with closing(where.open()) as file:
            found = pq.ParquetFile(file)
            schema: Any = found.schema_arrow  # pyarrow has no types
            _check_names(schema.names, where.url)
            return found.metadata.num_rows, {field.name: field.type for field in schema}
    except Error:
        raise
    except UNREADABLE as error:
        raise _unreadable(where, error, 0) from error


def common_type(one: Any, other: Any) -> Any:
    """The Arrow type that holds values of both. Raises: pyarrow's errors where there is none."""
    import pyarrow as pa

    if one.equals(other):
        return one
    schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field("column").type


def _check_names(names: Sequence[str], url: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"'{url}' has two columns named {name!r}; rename one of them.")


@contextmanager
def _opened(where: StoragePath) -> Generator[io.BufferedReader]:
    """The file, decompressed where its name says so."""
    with open_lines(where) as file:
        codec = COMPRESSIONS.get(os.path.splitext(where.url.lower())[1])
        if codec is None:
            yield file
            return
        import pyarrow as pa

        decompressed: Any = pa.CompressedInputStream(file, codec)
        with io.BufferedReader(decompressed, _BUFFER_BYTES) as lines:
            yield lines


_READERS: dict[FileFormat, Callable[[StoragePath], Iterator[ReadRow]]] = {
    "jsonl": _json,
    "parquet": _parquet,
    "csv": _csv,
    "tsv": partial(_csv, delimiter="\t"),
}
