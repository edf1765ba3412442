"""The input of a job: files of one format, and the number of each row in them.

The number of a row is its position in the input: files by name, rows in their order. It is all that the
journal stores of a row, so inputs need no ids; a source that has changed is another source.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import accumulate
from typing import Any, cast, get_args

import msgspec

from penstock.config.messages.problems import nearest
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.data.storage.readers import (
    EXTENSIONS,
    UNREADABLE,
    FileFormat,
    InputRow,
    ReadRow,
    common_type,
    format_of,
    read_footer,
    read_rows,
)
from penstock.errors import ConfigError, SourceNotFound
from penstock.sources.protocol import File, shown

_MAGIC = "*?["
_BESIDE_OUTPUTS = ("errors.jsonl", *(f"failed.{form}" for form in get_args(FileFormat)))
"""Endings of the files with the failed rows of jobs."""


class InputFile(msgspec.Struct, frozen=True, omit_defaults=True):
    """One file. version: differs when its content may. digest: of its content, where it is known."""

    url: str
    size_bytes: int
    version: str
    digest: str | None = None

    @property
    def path(self) -> StoragePath:
        """With the credentials of the URL that the user gave; in another process without them."""
        return _PATHS.get(self.url) or storage_path(self.url)

    def same(self, now: InputFile) -> bool:
        """Whether it has the content of `now`. A file that was copied or touched has another version only."""
        if (self.url, self.size_bytes) != (now.url, now.size_bytes):
            return False
        return self.version == now.version or (self.digest is not None and self.digest == _digest(now))


_PATHS: dict[str, StoragePath] = {}
"""Inputs by their URLs without credentials; signatures and passwords stay in memory only."""

_DIGESTED_BYTES = 1 << 30
"""A copy of a larger input counts as another input: to read all of it twice would take too long."""


def _digest(part: InputFile) -> str:
    with closing(part.path.open()) as file:
        return hashlib.file_digest(cast("Any", file), "sha256").hexdigest()


class InputFiles(msgspec.Struct, frozen=True, rename={"format": "form"}):
    """Files of one format, in the order of their names."""

    format: FileFormat
    parts: tuple[InputFile, ...]

    def rows(self, wanted: Callable[[int], bool] = lambda number: True) -> Iterator[InputRow]:
        """Every row that is wanted; the others are counted and skipped.

        Raises: Unavailable, naming the file that cannot be read.
        """
        for number, row in enumerate(self._read()):
            if wanted(number):
                yield row(number)

    def _read(self) -> Iterator[ReadRow]:
        return (row for part in self.parts for row in read_rows(part.path, self.format))

    def count(self) -> int:
        """How many rows there are. Parses nothing, except CSV files."""
        if self.format == "parquet":
            return sum(read_footer(part.path)[0] for part in self.parts)
        return sum(1 for _ in self._read())

    def types(self) -> dict[str, Any]:
        """Arrow types of the columns, where the format has types; without columns whose files disagree."""
        if self.format != "parquet":
            return {}
        types = dict[str, Any]()
        odd = set[str]()
        for part in self.parts:
            for name, kind in read_footer(part.path)[1].items():
                try:
                    types[name] = common_type(types.get(name, kind), kind)
                except UNREADABLE + (TypeError,):
                    odd.add(name)
        return {name: kind for name, kind in types.items() if name not in odd}

    def digested(self) -> InputFiles:
        """The same with digests, where its files are on this machine and not too large."""
        if not self.is_local or sum(part.size_bytes for part in self.parts) > _DIGESTED_BYTES:
            return self
        parts = [msgspec.structs.replace(part, digest=_digest(part)) for part in self.parts]
        return InputFiles(self.format, tuple(parts))

    @property
    def is_local(self) -> bool:
        return all(part.path.is_local for part in self.parts)

    def now(self) -> InputFiles:
        """The same files as they are now, without those that are gone and without listing a folder."""
        there = [(part.url, file) for part in self.parts for file in part.path.files(1) if not file.name]
        parts = tuple(InputFile(url, file.size_bytes, file.version) for url, file in there)
        return InputFiles(self.format, parts)

    def changed(self, now: InputFiles) -> str | None:
        """How `now` differs from this source, as a sentence; None where it does not."""
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


def find_input(inputs: Sequence[str], format_name: str | None = None) -> InputFiles:
    """The files at paths and in folders, and those that patterns match.

    Raises: SourceNotFound; Unavailable; ConfigError for a pipe, an unknown format, several formats, and no
    inputs.
    """
    if not inputs:
        raise ConfigError("The job has no input: name a file, a folder, or a pattern.")
    parts: dict[str, InputFile] = {}
    for pattern in inputs:
        for path, file in expand_glob(pattern):
            parts[path.url] = InputFile(path.url, file.size_bytes, file.version)
            _PATHS[path.url] = path
    if format_name is not None and format_name not in get_args(FileFormat):
        raise ConfigError(f"{format_name!r} is not a file format; use {', '.join(get_args(FileFormat))}.")
    if format_name is not None:
        return InputFiles(cast(FileFormat, format_name), tuple(parts.values()))
    formats: set[FileFormat | None] = {format_of(url) for url in parts}
    if len(formats) > 1:
        raise ConfigError(
            f"The input has files of several formats ({', '.join(sorted(str(one) for one in formats))}); "
            "name files of one format, as in 'data/*.jsonl'."
        )
    only = next(iter(formats))
    if only is None:
        raise ConfigError(
            f"'{next(iter(parts))}' has no known extension "
            f"({', '.join(EXTENSIONS)}); name the format with --input-form."
        )
    return InputFiles(only, tuple(parts.values()))


def expand_glob(pattern: str | os.PathLike[str]) -> list[tuple[StoragePath, File]]:
    """The files at a path, below a folder, or matched by a pattern, in order; `File.name` is "" for a path.

    A file whose name has `*`, `?` or `[` is found by that name. `*` does not match `/`; `**` matches any
    number of folders. Outputs of jobs are found only by their own paths.
    Raises: SourceNotFound when there is none; ConfigError for a pipe.
    """
    text = os.fspath(pattern)
    whole = storage_path(text)
    if not any(mark in text for mark in _MAGIC) or whole.exists():
        root, wanted = whole, ["**"]
    else:
        names = text.split("/")
        depth = next(index for index, name in enumerate(names) if any(mark in name for mark in _MAGIC))
        root = storage_path("/".join(names[:depth]) or ("/" if depth else "."))
        wanted = names[depth:]
    listed = root.files(None if "**" in wanted else len(wanted))
    outputs = _outputs(file.name for file in listed)
    matched = [file for file in listed if not file.name or _matches(file.name.split("/"), wanted)]
    files = [file for file in matched if outputs.isdisjoint(accumulate(file.name.split("/"), "{}/{}".format))]
    if not files and (whole.name == "-" or (os.path.exists(whole.url) and not os.path.isdir(whole.url))):
        raise ConfigError(
            f"'{text}' is not a file: a job reads its input more than once. Save it as one first."
        )
    if not files:
        but = " except outputs of jobs, which are read if they are named themselves" if matched else ""
        beside = storage_path(os.path.dirname(text) or ".").files(1) if whole.is_local else []
        guess = nearest(os.path.basename(text), (file.name for file in beside))
        hint = f" Did you mean '{os.path.join(os.path.dirname(text), guess)}'?" if guess else ""
        raise SourceNotFound(f"There is no file at '{shown(text)}'{but}.{hint}")
    return [(root / file.name if file.name else root, file) for file in files]


def _outputs(names: Iterable[str]) -> set[str]:
    """Outputs of jobs whose journals are among the files and folders `names`, and what lies beside them."""
    outputs = {name.partition(".journal/")[0] for name in names if ".journal/" in name}
    stems = outputs | {os.path.splitext(output)[0] for output in outputs}
    return outputs | {f"{stem}.{ending}" for stem in stems for ending in _BESIDE_OUTPUTS}


def _matches(names: list[str], wanted: list[str]) -> bool:
    """Whether the components of a path match those of a pattern; `**` matches any number of them.

    Files that hold no data match only by their own first character or ending: `_SUCCESS`, `.crc` files,
    journals of earlier runs.
    """
    if not wanted or not names:
        return not names and all(one == "**" for one in wanted)
    name, pattern = names[0], wanted[0]
    if name.startswith(("_", ".")) and not pattern.startswith(name[0]):
        return False
    if name.endswith(".journal") and not pattern.endswith(".journal"):
        return False
    if pattern == "**":
        return _matches(names, wanted[1:]) or _matches(names[1:], wanted)
    return fnmatch.fnmatchcase(name, pattern) and _matches(names[1:], wanted[1:])
