"""Rows of files, each with its number: JSON lines, Parquet or CSV, one file or many, here or in a bucket.

The number of a row is its place in the input: files by name, rows in their order. It is all that the journal
keeps of a row, so no input needs ids; a source that has changed is another source.
"""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import IO, Any, Literal, NamedTuple, cast

import msgspec

from penstock.data.storage.paths import Place, found, place
from penstock.errors import ConfigError, Error, SourceNotFound, Unavailable
from penstock.sources import failures as trouble
from penstock.sources.protocol import shown

Form = Literal["jsonl", "parquet", "csv"]

ENDINGS: dict[str, Form] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".csv": "csv",
}
_ZIPPED = ".gz"
_BATCH_ROWS, _BATCH_BYTES = 1024, 64 << 20
_LONGEST_FIELD = 1 << 30  # characters of a CSV cell; Python's own limit is 131,072

Wanted = Callable[[int], bool]


@dataclass(slots=True)
class Row:
    """One row. fields: its columns; None when it cannot be read, and `fault` says why.

    line: of JSON lines, the line itself; of others, None.
    """

    number: int
    fields: dict[str, Any] | None
    line: bytes | None = None
    fault: str | None = None


class Part(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file of a source. version: differs when its content does. digest: of that, where it is known."""

    url: str
    size_bytes: int
    version: str
    digest: str | None = None

    @property
    def place(self) -> Place:
        """By the URL that the user gave, with what `url` leaves out; in another process by `url` alone."""
        return _PLACES.get(self.url) or place(self.url)

    def same(self, now: Part) -> bool:
        """Whether it holds what `now` holds: a file that was copied or touched has only another version."""
        if (self.url, self.size_bytes) != (now.url, now.size_bytes):
            return False
        return self.version == now.version or (self.digest is not None and self.digest == _digest(now))


_PLACES: dict[str, Place] = {}
"""Of inputs, by what may be shown of their URLs; signatures and passwords are kept in memory only."""

_DIGESTED_BYTES = 1 << 30
"""Of larger inputs, a copy counts as another input: reading all of it twice would take too long."""


def _digest(part: Part) -> str:
    with closing(part.place.open()) as file:
        return hashlib.file_digest(cast("Any", file), "sha256").hexdigest()


class Source(msgspec.Struct, frozen=True):
    """Files of one form, in the order of their names."""

    form: Form
    parts: tuple[Part, ...]

    def rows(self, wanted: Wanted | None = None) -> Iterator[Row]:
        """Every row; those that are not wanted are counted and passed over.

        Raises: Unavailable, naming the file that cannot be read.
        """
        number = 0
        for part in self.parts:
            for row in _rows_of(part, self.form, number, wanted or _every):
                if isinstance(row, Row):
                    number = row.number + 1
                    yield row
                else:
                    number = row

    def count(self) -> int:
        """How many rows there are, without parsing them; a CSV file has to be parsed."""
        if self.form == "parquet":
            return sum(_footer(part).num_rows for part in self.parts)
        number = 0
        for part in self.parts:
            for row in _rows_of(part, self.form, number, _none):
                number = row if isinstance(row, int) else row.number + 1
        return number

    def types(self) -> dict[str, Any]:
        """Arrow's types of the columns, where the form has any; without those about which files disagree."""
        if self.form != "parquet":
            return {}
        found = dict[str, Any]()
        odd = set[str]()
        for part in self.parts:
            for name, kind in _footer(part).types.items():
                try:
                    found[name] = common_type(found.get(name, kind), kind)
                except _UNREADABLE + (TypeError,):
                    odd.add(name)
        return {name: kind for name, kind in found.items() if name not in odd}

    def digested(self) -> Source:
        """With digests of its files, where they are on this machine and not too large."""
        local = all(part.place.is_local for part in self.parts)
        if not local or sum(part.size_bytes for part in self.parts) > _DIGESTED_BYTES:
            return self
        parts = [msgspec.structs.replace(part, digest=_digest(part)) for part in self.parts]
        return Source(self.form, tuple(parts))

    def changed(self, now: Source) -> str | None:
        """What differs from this source in what is there now, as a sentence."""
        before, after = ({part.url: part for part in one.parts} for one in (self, now))
        for url in sorted(before.keys() | after.keys()):
            if url not in after:
                return f"'{url}' is gone."
            if url not in before:
                return f"'{url}' is new."
            if not before[url].same(after[url]):
                return f"'{url}' has changed."
        if list(before) != list(after):
            return "Its files have another order."
        return None


def source(
    inputs: Sequence[str], form: str | None = None, is_output: Callable[[Place], bool] = lambda where: False
) -> Source:
    """The files that paths, folders and globs mean, and how to read them.

    is_output: of files that are no input; those in a folder, and those that a glob matches, are passed over.
    Raises: SourceNotFound; ConfigError when they are of no form, or of several, or one of them is an output.
    """
    parts: dict[str, Part] = {}
    for pattern in inputs:
        for where, file in found(pattern):
            if not is_output(where):
                parts[where.url] = Part(where.url, file.size_bytes, file.version)
                _PLACES[where.url] = where
            elif not file.name:
                raise ConfigError(f"'{where.url}' would be input and output; write the output elsewhere.")
    if not parts:
        raise SourceNotFound(f"There is no file at '{shown(inputs[0])}' but those of the output.")
    if form is not None:
        return Source(_form(form), tuple(parts.values()))
    forms: set[Form | None] = {form_of(url) for url in parts}
    if len(forms) > 1:
        raise ConfigError(
            f"The input holds files of several forms ({', '.join(sorted(str(one) for one in forms))}); "
            "name the files of one form, as in 'data/*.jsonl'."
        )
    only = next(iter(forms))
    if only is None:
        raise ConfigError(
            f"'{next(iter(parts))}' says by no ending what it holds; "
            f"known are {', '.join(ENDINGS)}. Say it with --input-form."
        )
    return Source(only, tuple(parts.values()))


def form_of(url: str) -> Form | None:
    """By the ending of its name."""
    name = url.lower().removesuffix(_ZIPPED)
    return next((form for ending, form in ENDINGS.items() if name.endswith(ending)), None)


def _form(name: str) -> Form:
    if name not in ENDINGS.values():
        raise ConfigError(f"{name!r} is no form of files; known are jsonl, parquet and csv.")
    return cast(Form, name)


# A reader gives a row, or the number after a row that is not wanted.
_Read = Iterator["Row | int"]

_TRIES = 4
_UNREADABLE = (OSError, EOFError, ValueError, NotImplementedError, csv.Error, zlib.error)
"""What Python's and Arrow's readers raise about a file that is not what its name says."""


def _rows_of(part: Part, form: Form, first: int, wanted: Wanted) -> _Read:
    """Rows of one file. Where a bucket breaks off, it is opened again and read on behind the last row."""
    number, failures = first, 0
    where = part.place
    while True:
        try:
            for row in _READERS[form](where, first, _from(number, wanted)):
                after = row.number + 1 if isinstance(row, Row) else row
                if after > number:
                    number, failures = after, 0
                    yield row
            return
        except Error:
            raise
        except _UNREADABLE as error:
            failures += 1
            if where.is_local or failures >= _TRIES or not trouble.classify(error).retryable:
                raise _unreadable(part, error, number - first) from error
            time.sleep(trouble.pause_s(failures))


def _from(number: int, wanted: Wanted) -> Wanted:
    return lambda one: one >= number and wanted(one)


def _unreadable(part: Part, error: Exception, rows: int) -> Unavailable:
    after = f" after {rows:,} rows" if rows else ""
    return Unavailable(f"'{part.url}' cannot be read{after}: {_why(error)}.")


def _why(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"it is not UTF-8 (byte {error.object[error.start]:#04x}); save it as UTF-8"
    if isinstance(error, EOFError):
        return "it is cut off, for its gzip stream has no end"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__


def _jsonl(where: Place, number: int, wanted: Wanted) -> _Read:
    with closing(_opened(where)) as file:
        for line in file:
            line = line.strip().removeprefix(codecs.BOM_UTF8)
            if not line:
                continue
            yield _parsed(line, number) if wanted(number) else number + 1
            number += 1


def _parsed(line: bytes, number: int) -> Row:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return Row(number, None, line, f"The line is not JSON: {error}.")
    except RecursionError:
        return Row(number, None, line, "The line is not JSON: it is nested too deeply.")
    if not isinstance(fields, dict):
        kind = type(fields).__name__
        return Row(number, None, line, f"The line must be a JSON object, but is a {kind}.")
    return Row(number, cast("dict[str, Any]", fields), line)


def _csv(where: Place, number: int, wanted: Wanted) -> _Read:
    csv.field_size_limit(min(_LONGEST_FIELD, sys.maxsize))
    with closing(_opened(where)) as file:
        text = io.TextIOWrapper(file, encoding="utf-8-sig", newline="")
        reader = csv.reader(text, delimiter=",")
        names = next(reader, [])
        _check_names(names, where.url)
        for cells in reader:
            if not cells:
                continue
            yield _celled(names, cells, number) if wanted(number) else number + 1
            number += 1


def _celled(names: list[str], cells: list[str], number: int) -> Row:
    if len(cells) == len(names):
        return Row(number, dict(zip(names, cells, strict=True)))
    fault = f"The row has {len(cells)} cells, but the header names {len(names)} columns."
    return Row(number, None, msgspec.json.encode(cells), fault)


def _parquet(where: Place, number: int, wanted: Wanted) -> _Read:
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
                yield Row(one, fields) if wanted(one) else one + 1


def _rows_at_a_time(footer: Any) -> int:
    """As many as fit into memory together, by what they take in the file's largest group of rows."""
    groups = [footer.row_group(index) for index in range(footer.num_row_groups)]
    row_bytes = max((group.total_byte_size / max(1, group.num_rows) for group in groups), default=1)
    return int(max(1, min(_BATCH_ROWS, _BATCH_BYTES / max(1, row_bytes))))


class _Footer(NamedTuple):
    """Of a Parquet file. types: Arrow's, by column."""

    num_rows: int
    types: dict[str, Any]


def _footer(part: Part) -> _Footer:
    import pyarrow.parquet as pq

    try:
        with closing(part.place.open()) as file:
            found = pq.ParquetFile(file)
            schema: Any = found.schema_arrow  # pyarrow has no types
            _check_names(schema.names, part.url)
            return _Footer(found.metadata.num_rows, {field.name: field.type for field in schema})
    except Error:
        raise
    except _UNREADABLE as error:
        raise _unreadable(part, error, 0) from error


def _check_names(names: Sequence[str], url: str) -> None:
    for index, name in enumerate(names):
        if name in names[:index]:
            raise ConfigError(f"'{url}' has two columns named {name!r}; rename one of them.")


def _opened(where: Place) -> IO[bytes]:
    file = where.open()
    file = file if isinstance(file, io.BufferedReader) else _buffered(file)
    return cast("IO[bytes]", _Unzipped(file)) if where.url.lower().endswith(_ZIPPED) else file


class _Unzipped(gzip.GzipFile):
    """Closes the file below it, too."""

    def __init__(self, packed: IO[bytes]) -> None:
        super().__init__(fileobj=packed, mode="rb")
        self._packed = packed

    def close(self) -> None:
        super().close()
        self._packed.close()


def common_type(one: Any, other: Any) -> Any:
    """Arrow's type that holds values of both. Raises: pyarrow's errors where there is none."""
    import pyarrow as pa

    if one.equals(other):
        return one
    schemas = [pa.schema([("column", kind)]) for kind in (one, other)]
    return pa.unify_schemas(schemas, promote_options="permissive").field("column").type


def _buffered(file: Any) -> IO[bytes]:
    """Arrow's files read lines slowly, one byte at a time."""
    return io.BufferedReader(file, 1 << 20)


def _every(number: int) -> bool:
    return True


def _none(number: int) -> bool:
    return False


_READERS: dict[Form, Callable[[Place, int, Wanted], _Read]] = {
    "jsonl": _jsonl,
    "parquet": _parquet,
    "csv": _csv,
}
