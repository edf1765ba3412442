"""Where bytes lie: a path of this machine, `s3://`, `gs://`, or any URL that fsspec knows.

Readers, the journal and sinks stand on it. On a disk and in a bucket, what is written under a name is there
wholly or not at all, also when this process is killed meanwhile; of other file systems that fsspec knows
(hdfs, sftp, smb) this is not known. All calls block: use them in threads.
"""

from __future__ import annotations

import fnmatch
import glob
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol, TypeVar
from urllib.parse import unquote

from penstock.errors import SourceNotFound, Unavailable
from penstock.sources import failures
from penstock.sources.protocol import File, shown

_T = TypeVar("_T")
_TRIES = 4
_COPY_BYTES = 8 << 20
_MAGIC = "*?["


class Place(Protocol):
    """A file, or the beginning of the names of several."""

    url: str
    """Without credentials; absolute, so that it means the same in any process."""
    is_local: bool

    def __truediv__(self, name: str) -> Place: ...

    def beside(self, ending: str) -> Place:
        """The place with the same name and `ending` after it."""
        ...

    def sibling(self, name: str) -> Place:
        """Another name in its folder; "" for the folder."""
        ...

    @property
    def name(self) -> str:
        """The last part of its path."""
        ...

    def exists(self) -> bool: ...

    def files(self) -> list[File]:
        """Every file below it, or it itself under the name ""; none when there is nothing."""
        ...

    def open(self) -> IO[bytes]:
        """For reading; it can seek."""
        ...

    def read(self) -> bytes: ...

    def write(self, data: bytes) -> None: ...

    def take(self, file: Path) -> None:
        """Puts a whole file of this machine there; the file is gone afterwards."""
        ...

    def remove(self) -> None:
        """Does nothing when it is not there."""
        ...


def place(url: str | os.PathLike[str]) -> Place:
    """The place that a user means by a path or a URL."""
    text = os.fspath(url)
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    if text.startswith("gcs://"):
        text = f"gs://{text.removeprefix('gcs://')}"
    return Elsewhere.at(text) if "://" in text else Here(Path(text).expanduser().absolute())


def absolute(path: str | os.PathLike[str]) -> str:
    """The same from any working directory; a URL as it is. A "/" at the end, of a folder, stays."""
    text = os.fspath(path)
    if "://" in text:
        return text
    return str(Path(text).expanduser().absolute()) + ("/" if text.endswith("/") else "")


@contextmanager
def written(to: Place) -> Generator[IO[bytes]]:
    """A file to write; it is at `to`, whole, when the block ends, and is nowhere when the block raises.

    Raises: Unavailable, as when the disk is full.
    """
    folder = Path(to.url).parent if to.is_local else Path(tempfile.gettempdir())
    path = folder / f".{Path(to.url).name}.{uuid.uuid4().hex[:8]}.unfinished"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        to.take(path)
    except OSError as error:
        raise Unavailable(f"'{to.url}' cannot be written: {error.strerror or error}.") from error
    finally:
        path.unlink(missing_ok=True)


def unfinished(to: Place) -> Iterable[Path]:
    """What a killed process left of a file that it was writing on this machine, or of those in a folder."""
    if not to.is_local:
        return ()
    folder, name = (to.url, "*") if Path(to.url).is_dir() else os.path.split(to.url)
    name = name if name == "*" else glob.escape(name)
    return Path(folder).glob(f".{name}.{'[0-9a-f]' * 8}.unfinished")


class Here:
    """A path of this machine."""

    is_local = True

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = str(path)

    def __truediv__(self, name: str) -> Here:
        return Here(self._path / name)

    def beside(self, ending: str) -> Here:
        return Here(self._path.with_name(self._path.name + ending))

    def sibling(self, name: str) -> Here:
        return Here(self._path.parent / name)

    @property
    def name(self) -> str:
        return self._path.name

    def exists(self) -> bool:
        return self._path.exists()

    def files(self) -> list[File]:
        if self._path.is_file():
            return [self._file(self._path, "")]
        found = [path for path in self._path.rglob("*") if path.is_file()]
        return sorted(self._file(path, path.relative_to(self._path).as_posix()) for path in found)

    def _file(self, path: Path, name: str) -> File:
        status = path.stat()
        return File(name, status.st_size, str(status.st_mtime_ns))

    def open(self) -> IO[bytes]:
        return self._path.open("rb")

    def read(self) -> bytes:
        return self._path.read_bytes()

    def write(self, data: bytes) -> None:
        with written(self) as file:
            file.write(data)

    def take(self, file: Path) -> None:
        os.replace(file, self._path)
        folder = os.open(self._path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)  # the name, too, shall survive the loss of power
        finally:
            os.close(folder)

    def remove(self) -> None:
        self._path.unlink(missing_ok=True)


class Elsewhere:
    """A URL, by Arrow's clients, or by fsspec's where Arrow has none."""

    is_local = False

    def __init__(self, url: str, fs: Any, path: str) -> None:  # pyarrow has no types
        self.url, self._fs, self._path = url, fs, path

    @classmethod
    def at(cls, url: str) -> Elsewhere:
        """Raises: Unavailable when no client for the scheme is installed."""
        url = url.rstrip("/")
        if url.startswith(("s3://", "gs://")):
            from penstock.sources.bucket import client

            scheme, _, path = url.partition("://")
            bucket, slash, key = path.partition("/")  # which may hold `?` and `#`
            bucket = bucket.rpartition("@")[2]
            path = f"{bucket}{slash}{key}"
            return cls(f"{scheme}://{path}", client(scheme, bucket), path)
        from fsspec.core import url_to_fs
        from pyarrow.fs import FSSpecHandler, PyFileSystem

        try:
            found, path = url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise Unavailable(f"'{shown(url)}' cannot be reached: {error}") from error
        return cls(shown(url), PyFileSystem(FSSpecHandler(found)), path.rstrip("/"))

    def __truediv__(self, name: str) -> Elsewhere:
        return Elsewhere(f"{self.url}/{name}", self._fs, f"{self._path}/{name}")

    def beside(self, ending: str) -> Elsewhere:
        return Elsewhere(self.url + ending, self._fs, self._path + ending)

    def sibling(self, name: str) -> Elsewhere:
        url, path = self.url.rpartition("/")[0], self._path.rpartition("/")[0]
        return Elsewhere(f"{url}/{name}".rstrip("/"), self._fs, f"{path}/{name}".rstrip("/"))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    def exists(self) -> bool:
        return self._tried("looked for", lambda: bool(self._info().is_file or self.files()))

    def files(self) -> list[File]:
        return self._tried("listed", self._files)

    def _files(self) -> list[File]:
        from pyarrow.fs import FileSelector

        info = self._info()
        if info.is_file:
            return [File("", info.size, str(info.mtime_ns))]
        below = self._fs.get_file_info(FileSelector(self._path, allow_not_found=True, recursive=True))
        prefix = f"{self._path.lstrip('/')}/"
        return sorted(
            File(one.path.lstrip("/").removeprefix(prefix), one.size, str(one.mtime_ns))
            for one in below
            if one.is_file
        )

    def _info(self) -> Any:
        (info,) = self._fs.get_file_info([self._path])
        return info

    def open(self) -> IO[bytes]:
        return self._tried("read", lambda: self._fs.open_input_file(self._path))

    def read(self) -> bytes:
        return self._tried("read", self._read)

    def _read(self) -> bytes:
        with self._fs.open_input_file(self._path) as file:
            return file.read()

    def write(self, data: bytes) -> None:
        self._tried("written", lambda: self._put(data))

    def _put(self, data: bytes) -> None:
        with self._fs.open_output_stream(self._path) as stream:
            stream.write(data)

    def take(self, file: Path) -> None:
        self._tried("written", lambda: self._upload(file))
        file.unlink()

    def _upload(self, file: Path) -> None:
        """Closing the stream is what makes the object: up to there nobody sees any of it."""
        with file.open("rb") as source, self._fs.open_output_stream(self._path) as stream:
            shutil.copyfileobj(source, stream, _COPY_BYTES)

    def remove(self) -> None:
        def delete() -> None:
            if self._info().is_file:
                self._fs.delete_file(self._path)

        self._tried("removed", delete)

    def _tried(self, what: str, call: Callable[[], _T]) -> _T:
        """Raises: SourceNotFound, Unavailable; with what went wrong, in words."""
        for attempt in range(1, _TRIES + 1):
            try:
                return call()
            except Exception as error:
                told = failures.classify(error)
                if told.retryable and attempt < _TRIES:
                    time.sleep(failures.pause_s(attempt))
                    continue
                kind = SourceNotFound if told.missing else Unavailable
                raise kind(f"'{self.url}' cannot be {what}: {told.why}.", retryable=told.retryable) from error
        raise AssertionError("the last try returns or raises")


def found(pattern: str | os.PathLike[str]) -> list[tuple[Place, File]]:
    """Files that a path, a folder or a glob means, by name; the name of a file that is meant itself is "".

    A name with `*`, `?` or `[` that is there means itself. `*` does not match `/`; `**` is any number of
    folders. Raises: SourceNotFound when there is none.
    """
    text = os.fspath(pattern)
    whole = place(text)
    if not any(mark in text for mark in _MAGIC) or whole.exists():
        root, wanted = whole, ["**"]
    else:
        base = text
        while any(mark in base for mark in _MAGIC) and "/" in base:
            base = base.rpartition("/")[0]
        base = "." if any(mark in base for mark in _MAGIC) else base
        root, wanted = place(base), text.removeprefix(base).strip("/").split("/")
    files = [
        (root / file.name if file.name else root, file)
        for file in root.files()
        if not file.name or _matches(file.name.split("/"), wanted)
    ]
    if not files:
        raise SourceNotFound(f"There is no file at '{shown(text)}'.")
    return files


def _matches(names: list[str], wanted: list[str]) -> bool:
    """Whether a path has the names that are wanted, one for one; `**` stands for any number of folders.

    What is no data is found by its own name only: `_SUCCESS`, `.crc` files, journals of earlier runs.
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
