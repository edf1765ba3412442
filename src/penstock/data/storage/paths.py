"""Files on this machine, in a bucket (`s3://`, `gs://`), or at any URL that fsspec knows.

Used by readers, the journal and outputs. On a disk and in a bucket, a file appears under its name complete or
not at all, even when this process is killed; other file systems of fsspec (hdfs, sftp, smb) may not do this.
All calls block: use them in threads.
"""

from __future__ import annotations

import glob
import io
import os
import shutil
import stat
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from os.path import expanduser
from pathlib import Path
from typing import IO, Any, Concatenate, NoReturn, ParamSpec, TypeVar
from urllib.parse import unquote

from penstock.errors import SourceNotFound, Unavailable
from penstock.sources import failures
from penstock.sources.cache import sync
from penstock.sources.protocol import File, shown

_P = ParamSpec("_P")
_T = TypeVar("_T")
_COPY_BYTES = 8 << 20


def storage_path(url: str | os.PathLike[str]) -> StoragePath:
    """What a user means by a path or a URL."""
    text = os.fspath(url)
    if text.startswith("file://"):
        text = unquote(text.removeprefix("file://").removeprefix("localhost"))
    if text.startswith("gcs://"):
        text = f"gs://{text.removeprefix('gcs://')}"
    return RemotePath.at(text) if "://" in text else LocalPath(Path(expanduser(text)).absolute())


def absolute(path: str | os.PathLike[str]) -> str:
    """A path that means the same in any working directory; URLs unchanged. A final "/" (folder) stays."""
    text = os.fspath(path)
    if "://" in text:
        return text
    return str(Path(expanduser(text)).absolute()) + ("/" if text.endswith("/") else "")


@contextmanager
def atomic_write(to: StoragePath) -> Generator[IO[bytes]]:
    """A file to write. It appears at `to` when the block ends, and nowhere when the block raises.

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
        to.upload(path)
    except OSError as error:
        raise unwritable(to.url, error) from error
    finally:
        with suppress(OSError):  # it was never made, or has its new name
            path.unlink()


def unwritable(path: str, error: OSError) -> Unavailable:
    """The error to raise for a file that cannot be written, as when the disk is full."""
    return Unavailable(f"'{path}' cannot be written: {error.strerror or error}.")


def unfinished_files(to: StoragePath) -> Iterable[Path]:
    """Temporary files that a killed process left, of the file `to` or of those in the folder `to`."""
    if not to.is_local:
        return ()
    folder, name = (to.url, "*") if Path(to.url).is_dir() else os.path.split(to.url)
    name = name if name == "*" else glob.escape(name)
    return Path(folder).glob(f".{name}.{'[0-9a-f]' * 8}.unfinished")


def _may_fail(
    what: str,
) -> Callable[[Callable[Concatenate[Any, _P], _T]], Callable[Concatenate[Any, _P], _T]]:
    """Decorates a call of a path: it raises SourceNotFound or Unavailable, with the reason."""

    def decorate(call: Callable[Concatenate[Any, _P], _T]) -> Callable[Concatenate[Any, _P], _T]:
        @wraps(call)
        def trying(path: Any, *args: _P.args, **options: _P.kwargs) -> _T:
            def give_up(error: Exception, cause: failures.FailureCause, attempts: int) -> NoReturn:
                kind = SourceNotFound if cause.missing else Unavailable
                message = f"'{path.url}' cannot be {what}{failures.after_tries(attempts)}: {cause.why}."
                raise kind(message, retryable=cause.retryable) from error

            return failures.retry(lambda: call(path, *args, **options), path.tries, give_up)

        return trying

    return decorate


class LocalPath:
    """A file of this machine, or a folder.

    url: absolute, so that it means the same in any process; without credentials.
    """

    is_local = True
    tries = 1

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = str(path)

    def __truediv__(self, name: str) -> LocalPath:
        return LocalPath(self._path / name)

    def with_added_suffix(self, suffix: str) -> LocalPath:
        """The path with `suffix` added to its name."""
        return LocalPath(self._path.with_name(self._path.name + suffix))

    def with_name(self, name: str) -> LocalPath:
        """Another file in its folder; "" for the folder itself."""
        return LocalPath(self._path.parent / name)

    @property
    def name(self) -> str:
        return self._path.name

    def exists(self) -> bool:
        return self._path.exists()

    def files(self, depth: int | None = None) -> list[File]:
        """Every file below it, in linked folders, too; a file is listed alone, under the name "". Empty when
        there is nothing.

        depth: levels of folders to list. Folders below them are listed, under names that end with "/".
        """
        if self._path.is_file():
            return list(self._stat([self._path]))
        found: list[File] = []
        for folder, folders, names in os.walk(self._path, onerror=_not_listed, followlinks=True):
            folders[:] = _without_cycles(Path(folder), folders)
            found += self._stat(Path(folder, name) for name in names)
            below = Path(folder).relative_to(self._path)
            if len(below.parts) + 1 == depth:
                found += [File(f"{(below / name).as_posix()}/", 0) for name in folders]
                folders.clear()
        return sorted(found)

    def _stat(self, paths: Iterable[Path]) -> Iterator[File]:
        for path in paths:
            with suppress(FileNotFoundError):  # a broken link, or removed since it was listed
                status = path.stat()
                if stat.S_ISREG(status.st_mode):
                    name = "" if path == self._path else path.relative_to(self._path).as_posix()
                    yield File(name, status.st_size, str(status.st_mtime_ns))

    @_may_fail("read")
    def open(self) -> IO[bytes]:
        """For reading; seekable."""
        return self._path.open("rb")

    @_may_fail("read")
    def read(self) -> bytes:
        if not self._path.is_file():  # a pipe or a device would be read for ever
            raise FileNotFoundError(self.url)
        return self._path.read_bytes()

    def write(self, data: bytes) -> None:
        with atomic_write(self) as file:
            file.write(data)

    def upload(self, file: Path) -> None:
        """Moves a complete file of this machine there."""
        os.replace(file, self._path)
        sync(self._path.parent)  # the name, too, must survive a power loss

    @_may_fail("removed")
    def remove(self) -> None:
        """Does nothing when it does not exist."""
        self._path.unlink(missing_ok=True)


def _without_cycles(folder: Path, names: list[str]) -> list[str]:
    """The subfolders without links to the folder or to those above it."""
    if not any((folder / name).is_symlink() for name in names):
        return names
    above = {one.resolve() for one in (folder, *folder.parents)}
    return [name for name in names if (folder / name).resolve() not in above]


def _not_listed(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise Unavailable(f"'{error.filename}' cannot be listed: {error.strerror}.") from error


class RemotePath:
    """As `LocalPath`, at a URL: through Arrow's clients, or fsspec's where Arrow has none."""

    is_local = False
    tries = 4

    def __init__(self, url: str, fs: Any, path: str) -> None:  # pyarrow has no types
        self.url, self._fs, self._path = url, fs, path

    @classmethod
    def at(cls, url: str) -> RemotePath:
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

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}", self._fs, f"{self._path}/{name}")

    def with_added_suffix(self, suffix: str) -> RemotePath:
        return RemotePath(self.url + suffix, self._fs, self._path + suffix)

    def with_name(self, name: str) -> RemotePath:
        url, path = self.url.rpartition("/")[0], self._path.rpartition("/")[0]
        return RemotePath(f"{url}/{name}".rstrip("/"), self._fs, f"{path}/{name}".rstrip("/"))

    @property
    def name(self) -> str:
        return self._path.rpartition("/")[2]

    @_may_fail("looked for")
    def exists(self) -> bool:
        return bool(self._info().is_file or self.files())

    @_may_fail("listed")
    def files(self, depth: int | None = None) -> list[File]:
        from pyarrow.fs import FileSelector

        info = self._info()
        if info.is_file:
            return [File("", info.size, str(info.mtime_ns))]
        below = self._fs.get_file_info(FileSelector(self._path, allow_not_found=True, recursive=depth != 1))
        prefix = f"{self._path.lstrip('/')}/"
        found = [(one, one.path.lstrip("/").removeprefix(prefix)) for one in below]
        folders = [File(f"{name}/", 0) for one, name in found if depth is not None and not one.is_file]
        files = [File(name, one.size, str(one.mtime_ns)) for one, name in found if one.is_file]
        return sorted(files + folders)

    def _info(self) -> Any:
        (info,) = self._fs.get_file_info([self._path])
        return info

    @_may_fail("read")
    def open(self) -> IO[bytes]:
        return self._fs.open_input_file(self._path)

    @_may_fail("read")
    def read(self) -> bytes:
        with self._fs.open_input_file(self._path) as file:
            return file.read()

    @_may_fail("written")
    def write(self, data: bytes) -> None:
        with self._stream() as stream:
            stream.write(data)

    @_may_fail("written")
    def upload(self, file: Path) -> None:
        """The object becomes visible when the stream is closed, not before."""
        before = self._info()
        try:
            with file.open("rb") as source, self._stream() as stream:
                shutil.copyfileobj(source, stream, _COPY_BYTES)
        except Exception:
            with suppress(Exception):  # the stream was closed all the same, after a part of the file
                if self._info() != before:
                    self._fs.delete_file(self._path)
            raise
        file.unlink()

    def _stream(self) -> Any:
        return self._fs.open_output_stream(self._path, compression=None)  # also where it is named .gz

    @_may_fail("removed")
    def remove(self) -> None:
        if self._info().is_file:
            self._fs.delete_file(self._path)


StoragePath = LocalPath | RemotePath


def open_lines(where: StoragePath) -> io.BufferedReader:
    """The file for reading line by line, which Arrow's own files do one byte at a time."""
    file: Any = where.open()
    return file if isinstance(file, io.BufferedReader) else io.BufferedReader(file, 1 << 20)
