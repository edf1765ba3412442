"""Where files and batches lie: a folder, a bucket, or any URL of fsspec. It is the truth; memory is its copy.

    files/ID.json, files/ID.jsonl             a file and its content
    batches/ID.json                           a batch
    batches/ID/output.jsonl[.journal/]        what it writes while it runs, and its outputs
    owner/                                    the lock of the process that may write

In a bucket a record is `ID.OWNER.json`, so that an owner that was stopped, and wakes up when its successor
works, cannot overwrite a record of it; that of the last owner counts. Calls block: use them in threads.
"""

from __future__ import annotations

import errno
import logging
import shutil
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from penstock.data.journal.lock import JobLock, OutputLocked, acquire_lock
from penstock.data.storage.paths import StoragePath, storage_path, unfinished_files
from penstock.errors import StorageFull, Unavailable

log = logging.getLogger(__name__)

Record = TypeVar("Record")

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_SUFFIX = ".json"
_RETRY_S, _MOVED_S = 5.0, 1.0
_READERS = 16  # threads that read records at the start
_AWAY = "The storage of files cannot be read or written now."


class JobStorage:
    """Everything below one folder or prefix."""

    def __init__(self, url: str) -> None:
        """Raises: Unavailable when no client for the URL is installed."""
        self.root = storage_path(url)
        self._lock: JobLock | None = None
        self._versions: dict[str, list[str]] = {}  # that may be there, by path without version and suffix

    def lock(self) -> JobLock:
        """From then on records are written in the name of this owner.

        Raises: OutputLocked while another process holds it; Unavailable.
        """
        self._lock = acquire_lock(self.root / "owner")
        return self._lock

    def read_all(self, folder: str, kind: type[Record]) -> dict[str, Record | None]:
        """The records in a folder by name, each as its last owner wrote it. Removes half-written ones.

        None for one that cannot be read: it is logged, and stays as it is with all that belongs to it.
        Raises: Unavailable.
        """
        for path in unfinished_files(self.root / folder):
            path.unlink(missing_ok=True)
        found: dict[str, list[str]] = {}
        for file in (self.root / folder).files():
            if file.name.endswith(_SUFFIX) and "/" not in file.name:
                name, _, version = file.name.removesuffix(_SUFFIX).partition(".")
                found[name] = sorted([*found.get(name, ()), version])
        self._versions.update({f"{folder}/{name}": versions for name, versions in found.items()})

        def read(name: str) -> Record | None:
            at = self._record(f"{folder}/{name}", found[name][-1])
            try:
                return msgspec.json.decode(at.read(), type=kind)
            except msgspec.DecodeError as error:
                log.error("'%s' is left out, for it cannot be read: %s. Restore or remove it.", at.url, error)
                return None

        with ThreadPoolExecutor(_READERS) as pool:
            return dict(zip(found, pool.map(read, found), strict=True))

    def write(self, folder: str, name: str, record: msgspec.Struct) -> None:
        """When it returns, every later owner reads this record, or a newer one.

        Raises: StorageFull; Unavailable, also when another process has taken over.
        """
        path = f"{folder}/{name}"
        version = self._lock.version if self._lock is not None else ""
        self._check()
        with refusals():
            self._record(path, version).write(msgspec.json.encode(record))
        self._check()  # again: what took long may have come too late
        before = [one for one in self._versions.get(path, ()) if one != version]
        self._versions[path] = [*before, version]
        for old in before:
            self._record(path, old).remove()
        self._versions[path] = [version]

    def remove(self, folder: str, name: str) -> None:
        """A record. Raises: Unavailable, also when another process has taken over."""
        path = f"{folder}/{name}"
        self._check()
        for version in self._versions.get(path, [""]):  # the newest last: none that is older comes back
            self._record(path, version).remove()
        self._check()
        self._versions.pop(path, None)

    def _record(self, path: str, version: str) -> StoragePath:
        return self.root / (f"{path}.{version}{_SUFFIX}" if version else f"{path}{_SUFFIX}")

    def _check(self) -> None:
        """Raises: Unavailable when the lock is lost, or cannot be looked at."""
        if self._lock is None:
            return
        try:
            self._lock.check()
        except OutputLocked as error:
            raise Unavailable(
                "Files and batches have moved to another process; send the request again.",
                retry_after_s=_MOVED_S,
            ) from error
        except Unavailable as error:
            raise Unavailable(_AWAY, retry_after_s=_RETRY_S) from error

    def remove_tree(self, folder: str) -> None:
        """A folder with everything in it; nothing happens when there is none."""
        where = self.root / folder
        if where.is_local:
            shutil.rmtree(Path(where.url), ignore_errors=True)
        else:
            for file in where.files():
                (where / file.name).remove()

    def size_bytes(self, path: str) -> int | None:
        """Of a file; None when there is none."""
        found = (self.root / path).files()
        return found[0].size_bytes if found and not found[0].name else None


@contextmanager
def refusals() -> Generator[None]:
    """Says to clients what storage that cannot be written means. Raises: StorageFull, Unavailable."""
    try:
        yield
    except (OSError, Unavailable) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        if isinstance(cause, OSError) and cause.errno in _FULL:
            text = "The storage of files is full. Delete files, or ask its operator for more space."
            raise StorageFull(text) from error
        raise Unavailable(_AWAY, retry_after_s=_RETRY_S) from error
