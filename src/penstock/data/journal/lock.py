"""One driver for one output: a second one is refused, and the successor of a killed one is not.

On a disk it is a lock of the kernel's, which ends with its process. In a bucket it is an object with a beat:
whoever finds one watches it for a while, so no two clocks are compared.
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

from penstock.data.storage.paths import StoragePath
from penstock.errors import Error, Unavailable

BEAT_S = 2.0
_WATCH_S = 3 * BEAT_S
_MISSED = 15
"""Beats without success in a row; then another driver may have taken over."""


class Taken(Unavailable):
    """Another driver works on the output."""

    code = "output_taken"


class Beat(msgspec.Struct):
    """Who has the output. count: of beats."""

    owner: str
    host: str
    pid: int
    count: int = 0


class Claim(Protocol):
    """Held from its making to `free`."""

    def lost(self) -> bool:
        """Whether another driver has, or may have, taken the output since."""
        ...

    def free(self) -> None: ...


def claim(journal: StoragePath) -> Claim:
    """Raises: Taken, naming who works on the output."""
    return _Lock(Path(journal.url) / "driver") if journal.is_local else _Beating(journal / "driver")


def held(journal: StoragePath) -> bool:
    """Whether somebody works on the output. In a bucket it takes some seconds to know."""
    if journal.is_local:
        return _locked(Path(journal.url) / "driver")
    return _living(journal / "driver") is not None


def _me(count: int = 0, owner: str = "") -> Beat:
    return Beat(owner or uuid.uuid4().hex, socket.gethostname(), os.getpid(), count)


def taken_over(journal: StoragePath) -> Taken:
    """For a driver that has lost its claim."""
    return Taken(f"Another driver has taken over this output ('{journal.url}'), and goes on with it.")


_LOOK_S, _LOOKS = 0.05, 10
"""Who asks for the state of a job holds the lock for a moment, shared with others who ask."""


def _locked(path: Path) -> bool:
    try:
        file = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError as error:
        raise _unlocked(path, error) from error
    finally:
        os.close(file)
    return False


def _unlocked(path: Path, error: OSError) -> Unavailable:
    return Unavailable(
        f"'{path}' cannot be locked: {error.strerror}. Write the output to a file system with locks, or to a "
        "bucket."
    )


class _Lock:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._lock(path)
        except BaseException:
            os.close(self._file)
            raise
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, msgspec.json.encode(_me()), 0)

    def _lock(self, path: Path) -> None:
        for look in range(_LOOKS):
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if look + 1 < _LOOKS:
                    time.sleep(_LOOK_S)
            except OSError as error:
                raise _unlocked(path, error) from error
        raise _taken(path.parent.as_posix(), os.read(self._file, 4096))

    def lost(self) -> bool:
        return False

    def free(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class _Beating:
    def __init__(self, at: StoragePath) -> None:
        if (other := _living(at)) is not None:
            raise _taken(at.url, msgspec.json.encode(other))
        self._at, self._me = at, _me()
        self._beat()
        time.sleep(BEAT_S)  # two that begin at once: the last one to write has it
        if (now := _read(at)) is None or now.owner != self._me.owner:
            raise _taken(at.url, msgspec.json.encode(now))
        self._lost = False
        self._ended = threading.Event()
        self._beating = threading.Thread(target=self._go_on, name="claim", daemon=True)
        self._beating.start()

    def lost(self) -> bool:
        return self._lost

    def free(self) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._beating.join()
            if not self._lost:
                self._at.remove()

    def _go_on(self) -> None:
        missed = 0
        while not self._ended.wait(BEAT_S):
            try:
                now = _read(self._at)
                if now is not None and now.owner != self._me.owner:
                    self._lost = True
                    return
                self._beat()
                missed = 0
            except Error:
                missed += 1
                self._lost = missed > _MISSED

    def _beat(self) -> None:
        self._me.count += 1
        self._at.write(msgspec.json.encode(self._me))


def _living(at: StoragePath) -> Beat | None:
    """Who beats there, after having been watched."""
    before = _read(at)
    if before is None:
        return None
    deadline = time.monotonic() + _WATCH_S
    while time.monotonic() < deadline:
        time.sleep(BEAT_S / 4)
        now = _read(at)
        if now is None:
            return None
        if now != before:
            return now
    return None


def _read(at: StoragePath) -> Beat | None:
    try:
        return msgspec.json.decode(at.read(), type=Beat) if at.exists() else None
    except (msgspec.DecodeError, msgspec.ValidationError):
        return None


def _taken(where: str, said: bytes) -> Taken:
    with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError):
        other = msgspec.json.decode(said, type=Beat)
        return Taken(
            f"Process {other.pid} on {other.host} works on this output already ('{where}'). "
            "Wait for its end, or stop it; `penstock batch status` shows how far it is."
        )
    return Taken(f"Another process works on this output already ('{where}').")
