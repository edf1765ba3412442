"""Where files and batches lie: a folder, a bucket, or any URL of fsspec. It is the truth; memory is its copy.

    files/ID.json, files/ID.jsonl             a file and its content
    batches/ID.json                           a batch
    batches/ID/output.jsonl[.journal/]        what it writes while it runs, and its outputs
    owner/driver                              the lock of the process that may write

Calls block: use them in threads.
"""

from __future__ import annotations

import errno
import shutil
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.data.journal.lock import JobLock, acquire_lock
from penstock.data.storage.paths import StoragePath, storage_path
from penstock.errors import Error, StorageFull, Unavailable

Record = TypeVar("Record")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SUFFIX = ".json"
_RETRY_S = 5.0


class JobStorage:
    """Everything below one folder or prefix."""

    def __init__(self, url: str) -> None:
        """Raises: Unavailable when no client for the URL is installed."""
        self.root = storage_path(url)

    def lock(self) -> JobLock:
        """Raises: OutputLocked while another process holds it; Unavailable."""
        return acquire_lock(self.root / "owner")

    def at(self, path: str) -> StoragePath:
        """path: below the root, with slashes."""
        found = self.root
        for name in path.split("/"):
            found = found / name
        return found

    def read_all(self, folder: str, kind: type[Record]) -> Iterator[Record]:
        """The records in a folder. Raises: Unavailable."""
        for file in self.at(folder).files():
            if file.name.endswith(_SUFFIX) and "/" not in file.name:
                yield msgspec.json.decode(self.at(f"{folder}/{file.name}").read(), type=kind)

    def write(self, folder: str, name: str, record: msgspec.Struct) -> None:
        """Raises: StorageFull, Unavailable."""
        with refusals():
            self.at(f"{folder}/{name}{_SUFFIX}").write(msgspec.json.encode(record))

    def remove(self, folder: str, name: str) -> None:
        """A record."""
        self.at(f"{folder}/{name}{_SUFFIX}").remove()

    def remove_tree(self, folder: str) -> None:
        """A folder with everything in it; nothing happens when there is none."""
        where = self.at(folder)
        if where.is_local:
            shutil.rmtree(Path(where.url), ignore_errors=True)
        else:
            for file in where.files():
                (where / file.name).remove()

    def size_bytes(self, path: str) -> int | None:
        """Of a file; None when there is none."""
        found = self.at(path).files()
        return found[0].size_bytes if found and not found[0].name else None


@contextmanager
def refusals() -> Generator[None]:
    """Says to clients what storage that cannot be written means. Raises: StorageFull, Unavailable."""
    try:
        yield
    except OSError as error:
        raise _refusal(error) from error
    except Unavailable as error:
        if isinstance(error.__cause__, OSError):
            raise _refusal(error.__cause__) from error
        raise Unavailable("The storage of files cannot be reached.", retry_after_s=_RETRY_S) from error


def _refusal(error: OSError) -> Error:
    if error.errno in _FULL:
        return StorageFull("The storage of files is full. Delete files, or ask its operator for more space.")
    return Unavailable("The storage of files cannot be written now.", retry_after_s=_RETRY_S)
