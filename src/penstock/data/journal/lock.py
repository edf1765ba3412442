"""One driver per output: a second one is refused, and the successor of a killed one is not.

On a disk it is a lock of the kernel, released when its process ends. In a bucket it is an object with a
heartbeat: a driver that finds one watches it for a while, so that no clocks of two machines are compared.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import threading
import time
import uuid
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.data.storage.paths import StoragePath, unwritable
from penstock.errors import Error, Unavailable

HEARTBEAT_S = 2.0
_WATCH_S = 3 * HEARTBEAT_S
_MAX_MISSED = 15
"""Consecutive failed heartbeats after which another driver may have taken over."""


class OutputLocked(Unavailable):
    """Another driver works on the output."""

    code = "output_taken"


class Heartbeat(msgspec.Struct):
    """Which process holds the output. count: of heartbeats so far."""

    owner: str
    host: str
    pid: int
    count: int = 0


class JobLock(Protocol):
    """Held from its construction until `release`."""

    def lost(self) -> bool:
        """Whether another driver has, or may have, taken the output since."""
        ...

    def release(self) -> None: ...


def acquire_lock(journal: StoragePath) -> JobLock:
    """Raises: OutputLocked, which names the process that works on the output; Unavailable."""
    if journal.is_local:
        return _FileLock(Path(journal.url) / "driver")
    return _HeartbeatLock(journal / "driver")


def is_locked(journal: StoragePath) -> bool:
    """Whether a driver works on the output. For a bucket this takes some seconds."""
    if journal.is_local:
        return _is_file_locked(Path(journal.url) / "driver")
    return _live_owner(journal / "driver") is not None


def lost_lock(journal: StoragePath) -> OutputLocked:
    """The error of a driver whose lock was taken over."""
    return OutputLocked(f"Another driver has taken over this output ('{journal.url}') and continues the job.")


def _this_process() -> Heartbeat:
    return Heartbeat(uuid.uuid4().hex, socket.gethostname(), os.getpid())


_RETRY_S, _TRIES = 0.05, 10
"""`is_locked` holds a shared lock for a moment, which must not fail a driver that starts."""


def _is_file_locked(path: Path) -> bool:
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


def _cannot_lock(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"'{path}' cannot be locked: {error.strerror}. Write the output to a file system with locks, or to a "
        "bucket."
    )


class _FileLock:
    def __init__(self, path: Path) -> None:
        self._file = -1
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
            self._lock(path)
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, msgspec.json.encode(_this_process()), 0)
        except OSError as error:
            self.release()
            raise unwritable(str(path), error) from error
        except BaseException:
            self.release()
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
        raise _locked_by(path.parent.as_posix(), os.read(self._file, 4096))

    def lost(self) -> bool:
        return False

    def release(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _HeartbeatLock:
    def __init__(self, path: StoragePath) -> None:
        if (other := _live_owner(path)) is not None:
            raise _locked_by(path.url, msgspec.json.encode(other))
        self._path, self._own = path, _this_process()
        self._write()
        time.sleep(HEARTBEAT_S)  # of two drivers that start at once, the last writer wins
        if (now := _read(path)) is None or now.owner != self._own.owner:
            raise _locked_by(path.url, msgspec.json.encode(now))
        self._lost = False
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._keep_alive, name="heartbeat", daemon=True)
        self._thread.start()

    def lost(self) -> bool:
        return self._lost

    def release(self) -> None:
        if not self._released.is_set():
            self._released.set()
            self._thread.join()
            if not self._lost:
                self._path.remove()

    def _keep_alive(self) -> None:
        missed = 0
        while not self._released.wait(HEARTBEAT_S):
            try:
                now = _read(self._path)
                if now is not None and now.owner != self._own.owner:
                    self._lost = True
                    return
                self._write()
                missed = 0
            except Error:
                missed += 1
                self._lost = self._lost or missed > _MAX_MISSED

    def _write(self) -> None:
        self._own.count += 1
        self._path.write(msgspec.json.encode(self._own))


def _live_owner(path: StoragePath) -> Heartbeat | None:
    """The owner whose heartbeat advances while it is watched; None if there is none."""
    before = _read(path)
    if before is None:
        return None
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(HEARTBEAT_S / 4)
        now = _read(path)
        if now is None:
            return None
        if now != before:
            return now
    return None


def _read(path: StoragePath) -> Heartbeat | None:
    try:
        return msgspec.json.decode(path.read(), type=Heartbeat) if path.exists() else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _locked_by(output: str, owner: bytes) -> OutputLocked:
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
        other = msgspec.json.decode(owner, type=Heartbeat)
        return OutputLocked(
            f"Process {other.pid} on {other.host} works on this output already ('{output}'). "
            "Wait until it ends, or stop it; `penstock batch status` shows its progress."
        )
    return OutputLocked(f"Another process works on this output already ('{output}').")
