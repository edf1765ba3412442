"""Rows of one file: JSON lines, Parquet or CSV, on this machine or in a bucket."""

from __future__ import annotations

import codecs
import csv
import gzip
import io
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from penstock.data.storage.paths import StoragePath, open_lines
from penstock.errors import ConfigError, Error, Unavailable
from penstock.sources import failures

FileFormat = Literal["jsonl", "parquet", "csv"]

EXTENSIONS: dict[str, FileFormat] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
}
_GZIP = ".gz"
_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
_LONGEST_FIELD = 1 << 30  # characters of a CSV cell; Python's own limit is 131,072

Wanted = Callable[[int], bool]


@dataclass(slots=True)
class InputRow:
    """One row. fields: its columns; None when it cannot be read: then `fault` says why.

    line: the line itself in a JSON lines file, else None.
    """

    number: int
    fields: dict[str, Any] | None
    line: bytes | None = None
    fault: str | None = None


def format_of(url: str) -> FileFormat | None:
    """By the file name's extension."""
    name = url.lower().removesuffix(_GZIP)
    return next((form for ending, form in EXTENSIONS.items() if name.endswith(ending)), None)


# Each reader yields a row, or the number after a row that is not wanted.
_Read = Iterator["InputRow | int"]

_TRIES = 4
UNREADABLE = (OSError, EOFError, ValueError, NotImplementedError, csv.Error, zlib.error)
"""What Python's and Arrow's readers raise about a file in another format than its name says."""


def read_rows(where: StoragePath, form: FileFormat, first: int, wanted: Wanted) -> _Read:
    """Rows of one file, of which the first has the number `first`; a number after each row not wanted.

    If the connection to the bucket drops, the file is reopened and reading resumes after the last row.
    Raises: Unavailable, naming the file that cannot be read.
    """
    number, failed = first, 0
    while True:
        try:
            for row in _READERS[form](where, first, _from(number, wanted)):
                after = row.number + 1 if isinstance(row, InputRow) else row
                if after > number:
                    number, failed = after, 0
                    yield row
            return
        except Error:
            raise
        except UNREADABLE as error:
            failed += 1
            if where.is_local or failed >= _TRIES or not failures.classify(error).retryable:
                raise _unreadable(where, error, number - first) from error
            time.sleep(failures.pause_s(failed))


def _from(number: int, wanted: Wanted) -> Wanted:
    return lambda one: one >= number and wanted(one)


def _unreadable(where: StoragePath, error: Exception, rows: int) -> Unavailable:
    after = f" after {rows:,} rows" if rows else ""
    return Unavailable(f"'{where.url}' cannot be read{after}: {_why(error)}.")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8"
    if isinstance(error, EOFError):
        return "it is truncated: its gzip stream has no end"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _jsonl(where: StoragePath, number: int, wanted: Wanted) -> _Read:
    with _opened(where) as file:
        for line in file:
            line = line.strip().removeprefix(codecs.BOM_UTF8)
            if not line:
                continue
            yield _parsed(line, number) if wanted(number) else number + 1
            number += 1


def _parsed(line: bytes, number: int) -> InputRow:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InputRow(number, None, line, f"The line is not JSON: {error}.")
    except RecursionError:
        return InputRow(number, None, line, "The line is not JSON: it is nested too deeply.")
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        return InputRow(number, None, line, f"The line must be a JSON object, but is a {kind}.")
    return InputRow(number, cast("dict[str, Any]", fields), line)


def _csv(where: StoragePath, number: int, wanted: Wanted) -> _Read:
    csv.field_size_limit(min(_LONGEST_FIELD, sys.maxsize))
    with _opened(where) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=",")
        names = next(reader, [])
        _check_names(names, where.url)
        for cells in reader:
            if not cells:
                continue
            yield _celled(names, cells, number) if wanted(number) else number + 1
            number += 1


def _celled(names: list[str], cells: list[str], number: int) -> InputRow:
    if len(cells) == len(names):
        return InputRow(number, dict(zip(names, cells, strict=True)))
    fault = f"The row has {len(cells)} cells, but the header names {len(names)} columns."
    return InputRow(number, None, msgspec.json.encode(cells), fault)


def _parquet(where: StoragePath, number: int, wanted: Wanted) -> _Read:
    import pyarrow.parquet as pq

    with closing(where.open()) as file:
        parquet = pq.ParquetFile(file)
        _check_names(parquet.schema_arrow.names, where.url)
        for batch in parquet.iter_batches(_rows_at_a_time(parquet.metadata)):
            numbers = range(number, number + batch.num_rows)
            number += batch.num_rows
            if not any(wanted(one) for one in numbers):
                yield number
                continue
            for one, fields in zip(numbers, batch.to_pylist(), strict=True):
                yield InputRow(one, fields) if wanted(one) else one + 1


def _rows_at_a_time(footer: Any) -> int:
    """As many as fit into memory together, judged by the file's row group with the largest rows."""
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES / max(1, row_bytes))))


class ParquetFooter(NamedTuple):
    """Of a Parquet file. types: Arrow's, by column."""

    num_rows: int
    types: dict[str, Any]


def read_footer(where: StoragePath) -> ParquetFooter:
    """Raises: Unavailable, ConfigError."""
    import pyarrow.parquet as pq

    try:
        with closing(where.open()) as file:
            found = pq.ParquetFile(file)
            schema: Any = found.schema_arrow  # pyarrow has no types
            _check_names(schema.names, where.url)
            return ParquetFooter(found.metadata.num_rows, {field.name: field.type for field in schema})
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
def _opened(where: StoragePath) -> Generator[IO[bytes]]:
    """The file, unzipped where its name says so."""
    with open_lines(where) as file:
        if not where.url.lower().endswith(_GZIP):
            yield file
            return
        with gzip.GzipFile(fileobj=file) as unzipped:
            yield cast("IO[bytes]", unzipped)


_READERS: dict[FileFormat, Callable[[StoragePath, int, Wanted], _Read]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "csv": _csv,
}
