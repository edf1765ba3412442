"""One driver per output: a second one is refused, and the successor of a killed one is not.

On a disk it is a lock of the kernel, released when its process ends. In a bucket each driver writes a claim,
an object of its own with a heartbeat; the last claim in the order of names owns the output. A driver that
finds a claim watches it for a while, so that no clocks of two machines are compared.

Arrow's clients of buckets have no conditional writes. So no driver writes an object that another one writes:
one that was stopped, and wakes up when its successor works, can overwrite nothing of it.
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from penstock.data.storage.paths import StoragePath, unwritable
from penstock.errors import Error, SourceNotFound, Unavailable

HEARTBEAT_S = 2.0
_WATCH_S = 3 * HEARTBEAT_S
_MAX_MISSED = 15
"""Consecutive failed heartbeats after which another driver may have taken over."""

_CLAIM = re.compile("[0-9a-f]{12}-[0-9a-f]{8}")


class OutputLocked(Unavailable):
    """Another driver works on the output."""

    code = "output_taken"


class Heartbeat(msgspec.Struct):
    """Which process holds the output. count: of heartbeats so far."""

    owner: str
    host: str
    pid: int
    count: int = 0


def acquire_lock(journal: StoragePath) -> JobLock:
    """Raises: OutputLocked, which names the process that works on the output; Unavailable."""
    if journal.is_local:
        return _FileLock(journal)
    return _ClaimLock(journal / "drivers")


def is_locked(journal: StoragePath) -> bool:
    """Whether a driver works on the output. For a bucket this takes some seconds."""
    if not journal.is_local:
        return _live_claim(journal / "drivers") is not None
    path = Path(journal.url) / "driver"
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise _cannot_lock(path, error) from error
    finally:
        os.close(file)
    return False


def lost_lock(journal: StoragePath) -> OutputLocked:
    """The error of a driver whose lock was taken over, or removed."""
    return OutputLocked(
        f"Another driver has taken over this output ('{journal.url}'), or its journal was removed. The same "
        "command shows which, or begins anew."
    )


def _this_process() -> Heartbeat:
    return Heartbeat(uuid.uuid4().hex, socket.gethostname(), os.getpid())


_RETRY_S, _TRIES = 0.05, 10
"""`is_locked` holds a shared lock for a moment, which must not fail a driver that starts."""


def _cannot_lock(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"'{path}' cannot be locked: {error.strerror}. Write the output to a file system with locks, or to a "
        "bucket."
    )


class _FileLock:
    """Held from its construction until `release`, by a lock of the kernel."""

    version = ""

    def __init__(self, journal: StoragePath) -> None:
        path = Path(journal.url) / "driver"
        self._journal, self._file = journal, -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock(path)
            self._links = os.fstat(self._file).st_nlink
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, msgspec.json.encode(_this_process()), 0)
        except BaseException as error:
            self.release()
            if isinstance(error, OSError):
                raise unwritable(str(path), error) from error
            raise

    def _lock(self, path: Path) -> None:
        for tried in range(1, _TRIES + 1):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if tried < _TRIES:
                    time.sleep(_RETRY_S)
            except OSError as error:
                raise _cannot_lock(path, error) from error
        raise _locked_by(path.parent.as_posix(), _decoded(os.read(self._file, 4096)))

    def lost(self) -> bool:
        """Whether it was released: a caller then has gone on for longer than its owner; or removed, and
        another driver may lock a new one.
        """
        try:
            return self._file < 0 or os.fstat(self._file).st_nlink < self._links
        except OSError:  # it was released just now
            return True

    def check(self) -> None:
        """Raises: OutputLocked."""
        if self.lost():
            raise lost_lock(self._journal)

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _ClaimLock:
    """Held from its construction until `release`. version: sorts after those of earlier owners."""

    def __init__(self, claims: StoragePath) -> None:
        if (other := _live_claim(claims)) is not None:
            raise _locked_by(claims.url, other[1])
        before = _names(claims)
        self._claims, self._own = claims, _this_process()
        self._lost = False
        self.version = f"{_next_term(before):012x}-{self._own.owner[:8]}"
        self._write()
        time.sleep(HEARTBEAT_S)  # of two drivers that start at once, both see the claim of the other
        if self._is_outranked():
            self._path.remove()
            other = _last_claim(claims)
            raise _locked_by(claims.url, other[1] if other else None)
        for name in before:
            (claims / name).remove()
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._thread.start()

    def lost(self) -> bool:
        """Whether another driver has, or may have, taken the output, as of the last heartbeat."""
        return self._lost

    def check(self) -> None:
        """Asks the storage now. Raises: OutputLocked when another driver has taken over; Unavailable."""
        self._lost = self._lost or self._is_outranked()
        if self._lost:
            raise lost_lock(self._claims)

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            with suppress(Error):  # a claim without heartbeat holds nobody up for long
                self._path.remove()

    @property
    def _path(self) -> StoragePath:
        return self._claims / self.version

    def _keep_alive(self) -> None:
        missed = 0
        while not self._released.wait(HEARTBEAT_S):
            try:
                if self._is_outranked():
                    self._lost = True
                    return
                self._write()
                missed = 0
            except Error:
                missed += 1
                self._lost = self._lost or missed > _MAX_MISSED

    def _is_outranked(self) -> bool:
        """A claim that is gone was removed by a successor. Raises: Unavailable."""
        return _names(self._claims)[-1:] != [self.version]

    def _write(self) -> None:
        self._own.count += 1
        self._path.write(msgspec.json.encode(self._own))


JobLock = _FileLock | _ClaimLock


_Claim = tuple[str, Heartbeat | None]
"""Its name, and its heartbeat; None when that cannot be read."""


def _next_term(before: Sequence[str]) -> int:
    """Above that of all claims; the time in milliseconds, so that it is above removed ones, too."""
    highest = before[-1].partition("-")[0] if before else "0"
    return max(time.time_ns() // 1_000_000, int(highest, 16) + 1)


def _names(claims: StoragePath) -> list[str]:
    """Of all claims; the owner's is the last. Raises: Unavailable."""
    return sorted(file.name for file in claims.files() if _CLAIM.fullmatch(file.name))


def _live_claim(claims: StoragePath) -> _Claim | None:
    """The owner's, if its heartbeat advances while it is watched; None if there is none."""
    before, deadline = _last_claim(claims), time.monotonic() + _WATCH_S
    while before is not None and time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 4)
        if (now := _last_claim(claims)) != before:
            return now
    return None


def _last_claim(claims: StoragePath) -> _Claim | None:
    """The owner's, dead or alive."""
    names = _names(claims)
    if not names:
        return None
    try:
        return names[-1], _decoded((claims / names[-1]).read())
    except SourceNotFound:  # it was removed in between
        return None


def _locked_by(output: str, other: Heartbeat | None) -> OutputLocked:
    if other is None:
        return OutputLocked(f"Another process works on this output already ('{output}').")
    return OutputLocked(
        f"Process {other.pid} on {other.host} works on this output already ('{output}'). "
        "Wait until it ends, or stop it; `penstock batch status` shows its progress."
    )


def _decoded(owner: bytes) -> Heartbeat | None:
    try:
        return msgspec.json.decode(owner, type=Heartbeat)
    except ValueError:
        return None
